"""Worker threads that move chunks within host memory. Each is one lane and copies while it steps."""

import logging
import threading
from collections.abc import Callable, Sequence

from kvferry.kernels.host import HostMover
from kvferry.kernels.layout import BlockLayout

from .device import Event, Move, Mover, Step

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
"""Longest wait for one thread at the end, seconds. A chunk takes milliseconds; this is a hang."""


class _Passed:
    """An event of a stream whose copies are complete when they return."""

    def query(self) -> bool:
        return True


_PASSED = _Passed()


class _HostStream:
    """Copies in place, on the thread that steps the lane."""

    def wait(self, event: Event) -> None:
        if not event.query():
            raise ValueError("a host stream waits for host work only, which has always passed")

    def copy(self, move: Move) -> None:
        mover = move.mover
        assert isinstance(mover, HostMover)
        mover.move(move.block_ids, move.first, move.address, is_load=move.is_load)

    def record(self) -> Event:
        return _PASSED


class HostDevice:
    """Host memory, and threads named ``kvferry-transfer-N``.

    Threads:
        :meth:`wake` and :meth:`block` by any; the rest by the thread that made it.
    """

    depth = 1

    def __init__(self, threads: int = 1) -> None:
        """Prepare *threads* lanes; they start with :meth:`start`.

        Raises:
            ValueError: not at least one thread.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1; got {threads}")
        self.num_lanes = threads
        self._threads: list[threading.Thread] = []
        # guards the two below
        self._calls = threading.Condition(threading.Lock())
        self._num_calls = 0
        self._closing = False

    def make_mover(self, layout: BlockLayout) -> Mover:
        """Fold the layout for host moves; ValueError if its pages are not on the CPU."""
        return HostMover(layout)

    def open_stream(self, lane: int) -> _HostStream:
        """Return a stream; it has no state, so lanes do not share anything."""
        return _HostStream()

    def fence(self) -> None:
        """Return None: the engine's own work on a CPU has ended when it calls us."""

    def start(self, steps: Sequence[Step]) -> None:
        """Start one thread per lane."""
        for lane, step in enumerate(steps):
            name = f"kvferry-transfer-{lane}"
            thread = threading.Thread(target=self._run, args=(step,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def wake(self) -> None:
        """Wake every idle lane."""
        with self._calls:
            self._num_calls += 1
            self._calls.notify_all()

    def block(
        self, changed: threading.Condition, done: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Sleep on *changed*."""
        return changed.wait_for(done, timeout_s)

    def close(self) -> bool:
        """Join the threads, and return whether all have ended. One that does not is named in the log."""
        with self._calls:
            self._closing = True
            self._calls.notify_all()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            if thread.is_alive():
                logger.error("%s still runs after %.0f s", thread.name, JOIN_TIMEOUT_S)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads

    def _run(self, step: Step) -> None:
        seen = -1
        while True:
            with self._calls:
                while self._num_calls == seen and not self._closing:
                    self._calls.wait()
                seen, closing = self._num_calls, self._closing
            try:
                while step():
                    pass
            except Exception:
                # a step does not raise; if one does, the other chunks still want to be carried
                logger.exception("a step of %s raised", threading.current_thread().name)
            if closing:
                return
