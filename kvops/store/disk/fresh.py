"""Chunks that were loaded ahead and wait for whoever asked for them: pinned until they are read, or for a time."""

from collections.abc import Iterable, Sequence

from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.store import Store


class Fresh:
    """Pinned frames, each with the time at which it is let go of.

    Attributes:
        num_bytes: bytes of all of them.

    Threads: the store's one thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._until: dict[Frame, float] = {}
        self.num_bytes = 0

    def __contains__(self, frame: Frame) -> bool:
        """Return whether *frame* waits."""
        return frame in self._until

    def add(self, frames: Sequence[Frame], until_s: float) -> None:
        """Keep ready frames until somebody lets go of them, or that time."""
        self._store.pin(frames)
        self._until.update(dict.fromkeys(frames, until_s))
        self.num_bytes += sum([frame.blob_bytes for frame in frames])

    def let_go(self, frames: Iterable[Frame]) -> None:
        """No longer keep those of *frames* that wait; the others are left alone."""
        if not self._until:
            return
        mine = [frame for frame in frames if self._until.pop(frame, None) is not None]
        self.num_bytes -= sum([frame.blob_bytes for frame in mine])
        self._store.unpin(mine)

    def let_go_all(self) -> None:
        """No longer keep any."""
        self.let_go(list(self._until))

    def expire(self, now_s: float) -> None:
        """No longer keep those whose time is over."""
        gone = []
        for frame, until_s in self._until.items():
            if until_s > now_s:
                # those behind came later, and are kept as long
                break
            gone.append(frame)
        if gone:
            self.let_go(gone)
