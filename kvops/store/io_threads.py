"""An engine of worker threads: preadv and pwritev between files and addresses, nothing in between.

Works on every file system, buffered or direct. Each thread has one transfer in the kernel at a time, so it takes as
many threads as the drive wants transfers.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence

from .file_io import Completion, Request
from .io_engine import Engine, Iovecs, transfer


class ThreadIo(Engine):
    """Transfers on worker threads.

    Args:
        depth: requests in flight at the most.
        max_inflight_bytes: bytes in flight at the most; a single request that is larger goes alone.
        threads: transfers in the kernel at the most.

    Threads: one submits and reaps; calls on files and :meth:`wake` from any.
    """

    name = "threads"

    def __init__(
        self, depth: int = 32, max_inflight_bytes: int = 256 << 20, threads: int = 8
    ) -> None:
        super().__init__(depth, max_inflight_bytes)
        if threads < 1:
            raise ValueError(f"threads must be at least 1; got {threads}")
        self._todo: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        # None: somebody called wake
        self._done: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvferry-io-{number}", daemon=True)
            for number in range(min(threads, depth))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: Sequence[Request]) -> int:
        """Take the leading requests, see :meth:`FileIo.submit`."""
        taken = self._admit(requests)
        now = time.monotonic()
        for request in requests[:taken]:
            request.submitted_s = now
            self._todo.put(request)
        return taken

    def reap(self, timeout_s: float) -> list[Completion]:
        """Return what has ended, see :meth:`FileIo.reap`."""
        completions: list[Completion] = []
        with contextlib.suppress(queue.Empty):
            completion = self._done.get(timeout=max(0.0, timeout_s))
            while True:
                if completion is not None:
                    self._forget(completion.request)
                    completions.append(completion)
                completion = self._done.get_nowait()
        return completions

    def wake(self) -> None:
        """Make :meth:`reap` return at once."""
        self._done.put(None)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more, and wait for what is in flight; it can still be reaped afterwards.

        Returns:
            False if threads are still in the kernel; call it again to wait longer.
        """
        if not self.closed:
            self.closed = True
            for _ in self._threads:
                self._todo.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        iovecs = Iovecs()
        while (request := self._todo.get()) is not None:
            count, number = transfer(request, iovecs)
            request.done_s = time.monotonic()
            self._done.put(Completion(request, count, number))
            # or this thread would keep its owner alive until the next one comes
            del request
