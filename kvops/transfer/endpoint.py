"""The frames' side of a transfer: how it begins and ends there. No exception leaves this file."""

import logging
import threading

from .jobs import FramesLike, Transfer
from .ledger import Ledger
from .states import State

logger = logging.getLogger(__name__)


class Endpoint:
    """Tells frames what becomes of their parts, and the ledger what frames say.

    Threads: any; one transfer by one thread at a time. No lock is held while frames are called.
    """

    def __init__(self, ledger: Ledger, frames: FramesLike) -> None:
        self._ledger = ledger
        self._frames = frames
        self._seen: set[tuple[str, type[Exception]]] = set()
        self._seen_lock = threading.Lock()

    def begin(self, transfer: Transfer) -> int | None:
        """Return the address of the part, or None if there is none to copy to or from."""
        frames = self._frames
        begin = frames.begin_read if transfer.job.is_load else frames.begin_write
        try:
            place = begin(transfer.header, transfer.generation)
        except Exception as error:
            self.caught("beginning", transfer, error)
            return None
        if place is None:
            return None
        offset, num_bytes = place
        expected = transfer.mover.layout.part_bytes
        if num_bytes != expected:
            wrong = ValueError(f"a part must be {expected} bytes; frame has {num_bytes}")
            self.caught("beginning", transfer, wrong)
            return None
        return frames.address + offset

    def end(self, transfer: Transfer) -> None:
        """Tell the frame how it ended, and close the books on it."""
        if transfer.header >= 0:
            try:
                self._tell(transfer)
            except Exception as error:
                self.caught("ending", transfer, error)
                if transfer.state is State.MOVED:
                    self._ledger.fail(transfer)
                    self._fail_part(transfer)
        self._ledger.release(transfer)

    def caught(self, doing: str, transfer: Transfer, error: Exception) -> None:
        """Count an exception; log the first of its kind with its traceback."""
        self._ledger.count_error()
        with self._seen_lock:
            is_new = (doing, type(error)) not in self._seen
            self._seen.add((doing, type(error)))
        job = transfer.job
        logger.log(
            logging.ERROR if is_new else logging.DEBUG,
            "%s a %s failed (job %d, copy %d); further ones are counted only",
            doing, "load" if job.is_load else "store", job.job_id, transfer.index,
            exc_info=error if is_new else None,
        )  # fmt: skip

    def _tell(self, transfer: Transfer) -> None:
        header, generation = transfer.header, transfer.generation
        has_moved = transfer.state is State.MOVED
        if transfer.job.is_load:
            # a load that never began says nothing about the frame
            ok = has_moved or transfer.is_cancelled
            self._frames.finish_read(header, generation, ok=ok)
        elif not has_moved:
            self._frames.fail_write(header, generation)
        elif not self._frames.finish_write(header, generation):
            self._ledger.fail(transfer)

    def _fail_part(self, transfer: Transfer) -> None:
        if transfer.job.is_load:
            return
        try:
            self._frames.fail_write(transfer.header, transfer.generation)
        except Exception as error:
            self.caught("failing", transfer, error)
