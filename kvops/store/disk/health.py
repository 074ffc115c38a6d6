"""What became of moves, as it bears on those to come: a breaker for each direction, and blobs that could not be read."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvferry.kvops.store.file_io import Direction

from .breaker import Breaker
from .jobs import Move, Status
from .places import Tag

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 10.0
"""When a blob that could not be read is tried once more; if that fails too, it is out of use."""

FAILED_KEPT = 4096
"""Blobs that could not be read, of which that is remembered."""

FAILURES = frozenset({Status.ERROR, Status.TIMEOUT, Status.CORRUPT})
VERBS = {Direction.WRITE: "save", Direction.READ: "load"}


class Health:
    """Threads: one."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._breakers = {
            Direction.WRITE: Breaker(f"saving to {folder}", clock),
            Direction.READ: Breaker(f"loading from {folder}", clock),
        }
        self._failed: dict[Tag, float] = {}
        self._outcomes: dict[Direction, str] = {}
        self._news: dict[Direction, list[tuple[bytes, str]]] = {}

    def is_off(self, direction: Direction) -> bool:
        """Return whether the disk is left alone."""
        return self._breakers[direction].is_open

    def refuses(self, direction: Direction) -> bool:
        """Return whether it is of no use to prepare a move now."""
        return self._breakers[direction].refuses

    def allows(self, direction: Direction) -> bool:
        """Say whether to make the move that is ready."""
        return self._breakers[direction].allows()

    def has_failed(self, tag: Tag) -> bool:
        """Return whether a read of this blob has failed, and none since has not."""
        return tag in self._failed

    def is_too_early(self, tag: Tag) -> bool:
        """Return whether a blob that could not be read is not to be tried again yet."""
        return bool(self._failed) and self._failed.get(tag, 0.0) > self._clock()

    def note(self, move: Move, status: Status, why: str) -> None:
        """Take in how a move ended."""
        direction, tag = move.direction, move.tag
        if status in FAILURES and not self.is_off(direction):
            self._news.setdefault(direction, []).append((move.frame.key, why))
        if status in (Status.ERROR, Status.TIMEOUT):
            self._outcomes.setdefault(direction, why)
            if direction is Direction.READ:
                self._failed.pop(tag, None)
                self._failed[tag] = self._clock() + RETRY_AFTER_S
                if len(self._failed) > FAILED_KEPT:
                    del self._failed[next(iter(self._failed))]
        elif status is Status.CORRUPT:
            self._note_work(direction, (tag,))

    def note_done(self, moves: Sequence[Move]) -> None:
        """Take in moves of one direction that ended well."""
        if moves:
            self._note_work(moves[0].direction, [move.tag for move in moves])

    def _note_work(self, direction: Direction, tags: Iterable[Tag]) -> None:
        """The drive did what it should, whatever came of it."""
        self._breakers[direction].succeeded()
        if self._failed:
            for tag in tags:
                self._failed.pop(tag, None)

    def settle(self) -> None:
        """Count the failures since the last time: many moves may have shared one misfortune, which counts once."""
        for direction, failed in self._news.items():
            key, why = failed[0]
            more = f" (and of {len(failed) - 1} more)" if len(failed) > 1 else ""
            logger.warning(
                "disk: %s of chunk %s%s failed: %s", VERBS[direction], key.hex()[:12], more, why
            )
        self._news.clear()
        for direction, why in self._outcomes.items():
            self._breakers[direction].failed(why)
        self._outcomes.clear()
