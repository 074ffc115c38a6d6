"""When a disk fails or is full, leave it alone for a while: memory goes on without it."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FAILURES = 3
"""Failures in a row that open the breaker."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0


class Breaker:
    """Counts failures in a row of one kind of work; open, it lets one attempt through after each pause.

        closed --FAILURES in a row--> open --pause over--> one attempt --ok--> closed
                                        ^                       |
                                        +---- pause doubled ----+ failed

    Threads: any; a race costs one attempt too many.

    Args:
        what: the work, for the log: "saving to /mnt/kv".
        clock: monotonic seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._failures = 0
        self._pause_s = 0.0
        self._next_try_s = 0.0
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether work is being refused or tried out."""
        return self._pause_s > 0

    @property
    def refuses(self) -> bool:
        """Whether it is of no use to prepare an attempt now."""
        return self._pause_s > 0 and self._clock() < self._next_try_s

    def allows(self) -> bool:
        """Say whether to make the attempt that is ready; while open, yes once after each pause."""
        if not self._pause_s:
            return True
        now = self._clock()
        if now < self._next_try_s:
            return False
        # the next one waits for the outcome of this one, or for another pause if this one is never made
        self._is_trying = True
        self._next_try_s = now + self._pause_s
        return True

    def succeeded(self) -> None:
        """Note that an attempt worked."""
        if self._pause_s:
            logger.warning("%s works again", self._what)
        self._failures = 0
        self._pause_s = 0.0
        self._is_trying = False

    def failed(self, why: object) -> None:
        """Note that an attempt did not work; *why* goes into the log when that opens the breaker."""
        self._failures += 1
        if self._is_trying:
            self._is_trying = False
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._next_try_s = self._clock() + self._pause_s
        elif not self._pause_s and self._failures >= FAILURES:
            self._pause_s = FIRST_PAUSE_S
            self._next_try_s = self._clock() + FIRST_PAUSE_S
            logger.error(
                "%s failed %d times in a row (%s): kvferry goes on without it, and tries again after 1 s, then less and "
                "less often",
                self._what, self._failures, why,
            )  # fmt: skip
