"""Chunks that were loaded ahead and wait for whoever asked for them: pinned until they are read, or for a time."""

from collections.abc import Callable, Iterable, Sequence

from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.store import Store

PATIENCE_S = 0.5
"""How long chunks may wait without anything happening before their room is given to others, or others are sent away."""


class Fresh:
    """Pinned frames, each with the time at which it is let go of.

    Attributes:
        num_bytes: bytes of all of them.

    Threads: the store's one thread.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._until: dict[Frame, float] = {}
        self._moved_s = -PATIENCE_S
        self.num_bytes = 0

    def __contains__(self, frame: Frame) -> bool:
        """Return whether *frame* waits."""
        return frame in self._until

    def add(self, frames: Sequence[Frame], until_s: float) -> None:
        """Keep ready frames until somebody lets go of them, or that time."""
        if frames:
            self._moved_s = self._clock()
        self._store.pin(frames)
        self._until.update(dict.fromkeys(frames, until_s))
        self.num_bytes += sum([frame.blob_bytes for frame in frames])

    def let_go(self, frames: Iterable[Frame]) -> None:
        """No longer keep those of *frames* that wait; the others are left alone."""
        if not self._until:
            return
        mine = [frame for frame in frames if self._until.pop(frame, None) is not None]
        if mine:
            self._moved_s = self._clock()
        self.num_bytes -= sum([frame.blob_bytes for frame in mine])
        self._store.unpin(mine)

    def forget_idle(self) -> None:
        """No longer keep what nobody has looked at in this step or the one before, since a while: its request is gone."""
        step, now = self._store.step - 1, self._clock()
        if self._until and now >= self._moved_s + PATIENCE_S:
            self.let_go([frame for frame in self._until if frame.step < step])

    @property
    def is_moving(self) -> bool:
        """Whether something came up, or was taken, a moment ago, so that it may be worth waiting for room."""
        return self._clock() < self._moved_s + PATIENCE_S

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
