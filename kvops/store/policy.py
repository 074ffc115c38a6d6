"""Which frame goes next: least recently used, a queue for each frame size.

A policy never sees frames that are being written; held frames it sees and must pass over.
"""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .frame import Frame


class Policy(Protocol):
    """The order in which frames of one size are given up."""

    def add(self, frame: Frame) -> None:
        """Take in a frame that has just become ready."""
        ...

    def touch(self, frame: Frame) -> None:
        """Note that *frame* was used."""
        ...

    def remove(self, frame: Frame) -> None:
        """Forget *frame*: it is no longer ready."""
        ...

    def victim(self, is_held: Callable[[Frame], bool]) -> Frame | None:
        """Return the frame to give up first, of those that are not held; None if there is none."""
        ...

    def frames(self) -> list[Frame]:
        """Return the frames it holds, the one to give up first at the front."""
        ...

    def coldest(self, count: int) -> list[Frame]:
        """Return up to *count* of them, the one to give up first at the front."""
        ...

    def __len__(self) -> int:
        """Return how many frames it holds."""
        ...


class Lru:
    """Least recently used first.

    A frame is appended to a queue each time it is used, and counts the entries that it has there; only the last one
    says where it stands, the others are dropped when they reach the front. So a touch is an append.
    """

    SPARE_ENTRIES = 1024
    """Outdated entries that may lie in the queue, above twice as many as there are frames."""

    def __init__(self) -> None:
        self._queue: deque[Frame] = deque()
        self._size = 0

    def add(self, frame: Frame) -> None:
        """Take in a frame that has just become ready."""
        frame.entries = 1
        self._queue.append(frame)
        self._size += 1

    def touch(self, frame: Frame) -> None:
        """Note that *frame* was used; nothing happens to one that it does not hold."""
        if frame.entries:
            frame.entries += 1
            self._queue.append(frame)
            if len(self._queue) > 2 * self._size + self.SPARE_ENTRIES:
                self._tidy()

    def remove(self, frame: Frame) -> None:
        """Forget *frame*; no error if it is not there."""
        if frame.entries:
            frame.entries = 0
            self._size -= 1
            # what is put and deleted, and never used or evicted, must not pile up
            if len(self._queue) > 2 * self._size + self.SPARE_ENTRIES:
                self._tidy()

    def victim(self, is_held: Callable[[Frame], bool]) -> Frame | None:
        """Return the least recently used frame that is not held. A held one is in use, and goes to the back."""
        queue = self._queue
        for _ in range(len(queue)):
            frame = queue[0]
            if frame.entries == 1:
                if not is_held(frame):
                    return frame
                queue.rotate(-1)
                continue
            queue.popleft()
            if frame.entries:
                frame.entries -= 1
        return None

    def frames(self) -> list[Frame]:
        """Return the frames it holds, least recently used first."""
        self._tidy()
        return list(self._queue)

    def coldest(self, count: int) -> list[Frame]:
        """Return up to *count* frames, least recently used first; fewer where many entries are outdated."""
        front = itertools.islice(self._queue, 4 * count)
        return [frame for frame in front if frame.entries == 1][:count]

    def __len__(self) -> int:
        """Return how many frames it holds."""
        return self._size

    def _tidy(self) -> None:
        """Drop all outdated entries."""
        kept: deque[Frame] = deque()
        for frame in reversed(self._queue):
            if frame.entries > 0:
                # the last entry comes first here; a negative count marks frames that have been seen
                frame.entries = -1
                kept.appendleft(frame)
        for frame in kept:
            frame.entries = 1
        self._queue = kept


POLICIES = {"lru": Lru}
"""Eviction policies by the name used in the ``eviction`` setting."""
