"""Carry chunks one after the other: claim, copy, let go of the pages, tell the frame."""

from collections import deque

from .device import Event, Move, Stream
from .endpoint import Endpoint
from .jobs import Transfer
from .ledger import Ledger


class Lane:
    """One chunk's work at a time, in steps that never block; with a depth, copies overlap.

    Threads: one at a time, any.
    """

    def __init__(self, ledger: Ledger, endpoint: Endpoint, stream: Stream, depth: int) -> None:
        self._ledger = ledger
        self._endpoint = endpoint
        self._stream = stream
        self._depth = depth
        self._moving: deque[tuple[Transfer, Event]] = deque()
        self._ending: deque[Transfer] = deque()

    def step(self) -> bool:
        """Do one thing, and say whether there was one.

        The end of a chunk comes before the next chunk: a checksum wants bytes that are still in cache.
        """
        if self._ending:
            self._endpoint.end(self._ending.popleft())
            return True
        if self._moving and self._look():
            return True
        if len(self._moving) < self._depth and (transfer := self._ledger.claim()):
            self._begin(transfer)
            return True
        return False

    def _begin(self, transfer: Transfer) -> None:
        """Start the copy, or end the transfer if there is nothing to copy or it was cancelled."""
        address = self._endpoint.begin(transfer)
        if address is None:
            self._ledger.fail(transfer)
            self._ending.append(transfer)
            return
        if not self._ledger.start(transfer):
            self._ending.append(transfer)
            return
        job, stream = transfer.job, self._stream
        move = Move(transfer.mover, transfer.block_ids, transfer.first, address, job.is_load)
        try:
            if job.fence is not None:
                stream.wait(job.fence)
            stream.copy(move)
            self._moving.append((transfer, stream.record()))
        except Exception as error:
            self._fail("copying", transfer, error)

    def _look(self) -> bool:
        """Let go of the oldest copy's pages if it has passed."""
        transfer, event = self._moving[0]
        try:
            if not event.query():
                return False
            self._moving.popleft()
            self._ledger.passed(transfer)
            self._ending.append(transfer)
        except Exception as error:
            self._moving.popleft()
            self._fail("copying", transfer, error)
        return True

    def _fail(self, doing: str, transfer: Transfer, error: Exception) -> None:
        self._endpoint.caught(doing, transfer, error)
        self._ledger.fail(transfer)
        self._ending.append(transfer)
