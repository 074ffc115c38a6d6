"""Frames that a cache reset left in the workers' hands: taken back when the workers, or death, let go of them."""

import logging
from collections.abc import Callable

from kvferry.kvops.store.store import Store

logger = logging.getLogger("vllm.kvferry")

REAP_TIMEOUT_S = 60.0
"""How long the engine is kept stepping for jobs of before a reset; a dead worker must not keep it awake for ever."""


class Orphans:
    """What a reset could not free at once.

    Attributes:
        num_bytes: bytes of stores among them, which still count as being in flight.

    Threads: the scheduler's one thread.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._until_s = 0.0
        self._are_there = False
        self._said_so = False
        self.num_bytes = 0

    @property
    def are_waited_for(self) -> bool:
        """Whether the engine must go on stepping for them."""
        return self._are_there and self._clock() < self._until_s

    def expect(self) -> None:
        """Look after what the reset that has just happened left."""
        self._until_s = self._clock() + REAP_TIMEOUT_S
        self._said_so = False
        self._are_there = True
        self.reap()

    def reap(self) -> None:
        """Take back what workers have let go of."""
        if not self._are_there:
            return
        waited_for = self._store.reap()
        if waited_for and self._clock() >= self._until_s:
            if not self._store.arena.workers_alive():
                waited_for -= self._store.abandon()
            elif not self._said_so:
                self._said_so = True
                logger.error(
                    "%d frames of before a reset are still in a worker's hands after %.0f s; their memory is not used",
                    waited_for, REAP_TIMEOUT_S,
                )  # fmt: skip
        self._are_there = waited_for > 0
        self.num_bytes = self._store.orphaned_bytes() if waited_for else 0
