"""Hand copies to the device's DMA engines: pages <-> pinned frames, without a kernel and without an SM.

One call takes all copies of a transfer (``cuMemcpyBatchAsync``, drivers of CUDA 12.8 and later); where
the driver has none, each copy is a call of its own (``cuMemcpyAsync``). The arrays of descriptors are
passed by address, so Python does nothing per copy in the first case.

    method    calls of the driver     in a CUDA graph
    ------    -------------------     ---------------
    batch     1 per transfer          no
    loop      1 per copy              yes

Order: a store reads its sources, the pages, when the stream gets there, since the model may still be
writing them. A load may read its sources, frames, from the call on: a frame is only offered for loading
when its bytes are complete in host memory, and it stays leased until the load is done. Whoever fills a
frame by earlier work of the same stream must say ``frames_are_complete=False``.

Nothing here waits. The bytes are there when the stream has passed the copies.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .descriptors import BlockRuns, Descriptors, Direction, Int64s
from .driver import (
    CUDA_ERROR_NOT_SUPPORTED,
    FLAG_DEFAULT,
    FLAG_PREFER_OVERLAP_WITH_COMPUTE,
    SOURCE_ORDER_ANY,
    SOURCE_ORDER_STREAM,
    CopyAttributes,
    Driver,
    DriverError,
)

Method = Literal["batch", "loop"]

LEGACY_STREAMS = (0, 1)
"""Handles of the legacy default stream: the null handle, and ``CU_STREAM_LEGACY``."""


class CopyError(RuntimeError):
    """The driver refused a transfer; some of its copies may have been enqueued.

    Frames and pages of the transfer must be left alone until the stream has passed.

    Attributes:
        code: the ``CUresult``.
        index: which descriptor it was; None if the failure is not about one.
    """

    def __init__(self, message: str, code: int | None, index: int | None) -> None:
        super().__init__(message)
        self.code = code
        self.index = index


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What one transfer cost the host.

    Attributes:
        method: how the copies were handed over.
        descriptors: how many there were, after merging.
        nbytes: bytes copied by all of them.
        describe_seconds: host time to make and merge the descriptors.
        submit_seconds: host time inside the driver.
    """

    method: Method
    descriptors: int
    nbytes: int
    describe_seconds: float
    submit_seconds: float


class CopyEngine:
    """The copy engines of a device, as one method call per transfer.

    Threads:
        Any number at once; copies go to the CUDA context that is current in the calling thread.

    Attributes:
        method: ``"batch"``, or ``"loop"`` where the driver has no batch copy.
        reason: why it is ``"loop"``; "" otherwise.
    """

    __slots__ = ("_driver", "_flags", "_may_change", "method", "reason")

    def __init__(
        self,
        driver: Driver | None = None,
        *,
        method: Method | None = None,
        prefer_overlap: bool = False,
    ) -> None:
        """Choose the method.

        Args:
            driver: of this machine; None loads it.
            method: ``"loop"`` never uses the batch copy; ``"batch"`` insists on it; None takes the
                batch copy if there is one.
            prefer_overlap: tell the driver that the copies should leave the SMs to other work.

        Raises:
            DriverError: there is no driver, or no batch copy though it was asked for.
            ValueError: *method* is none of the above.
        """
        if method not in (None, "batch", "loop"):
            raise ValueError(f"method must be 'batch', 'loop' or None; got {method!r}")
        self._driver = Driver.load() if driver is None else driver
        self._flags = FLAG_PREFER_OVERLAP_WITH_COMPUTE if prefer_overlap else FLAG_DEFAULT
        self._may_change = method is None
        missing = self._driver.batch_missing
        if method == "batch" and missing:
            raise DriverError(f"method must be 'loop' with this driver, not 'batch': {missing}")
        self.method: Method = "loop" if missing or method == "loop" else "batch"
        self.reason = missing or ("asked for" if method == "loop" else "")

    def copy_blocks(
        self,
        runs: BlockRuns,
        block_ids: Int64s,
        addresses: Int64s,
        counts: Sequence[int],
        direction: Direction,
        stream: int,
        *,
        frames_are_complete: bool = True,
    ) -> CopyReport:
        """Enqueue the copies of whole blocks between a cache and frames.

        Args:
            runs: of the cache.
            block_ids: ``[N]`` int64 in host memory, groups one after the other; ``-1`` is a hole: its
                bytes in the frame stay as they are.
            addresses: ``[N]`` int64 in host memory, where each block's own bytes are in its frame.
                Frames lie in registered memory, or in device memory.
            counts: entries of each group.
            direction: ``"d2h"`` out of the cache, ``"h2d"`` into it.
            stream: a ``CUstream`` handle (``torch.cuda.Stream.cuda_stream``), not the legacy default.
            frames_are_complete: of a load: whether the frames hold their bytes already.

        Returns:
            The number of descriptors and the host time.

        Raises:
            ValueError: an argument is out of range; nothing was enqueued.
            CopyError: the driver refused.

        Units:
            Moves ``2 * nbytes`` bytes (each byte read once, written once).
        """
        _check_stream(stream)
        begin = time.perf_counter()
        copies = runs.describe(block_ids, addresses, counts, direction)
        seconds = time.perf_counter() - begin
        return self._submit(copies, direction, stream, frames_are_complete, seconds)

    def copy(
        self,
        copies: Descriptors,
        direction: Direction,
        stream: int,
        *,
        frames_are_complete: bool = True,
    ) -> CopyReport:
        """Enqueue copies whose descriptors exist already, one per blob for instance.

        Args, errors and result are those of :meth:`copy_blocks`.
        """
        _check_stream(stream)
        if direction not in ("d2h", "h2d"):
            raise ValueError(f"direction must be 'd2h' or 'h2d'; got {direction!r}")
        copies.check_values()
        return self._submit(copies, direction, stream, frames_are_complete, 0.0)

    def _submit(
        self,
        copies: Descriptors,
        direction: Direction,
        stream: int,
        frames_are_complete: bool,
        describe_seconds: float,
    ) -> CopyReport:
        begin = time.perf_counter()
        method = self.method
        if copies.count and method == "batch":
            # a load's sources may be read at any time only if no earlier work writes them
            is_stable = direction == "h2d" and frames_are_complete
            method = self._batch(
                copies, SOURCE_ORDER_ANY if is_stable else SOURCE_ORDER_STREAM, stream
            )
        if copies.count and method == "loop":
            self._loop(copies, stream)
        seconds = time.perf_counter() - begin
        return CopyReport(method, copies.count, copies.nbytes, describe_seconds, seconds)

    def _batch(self, copies: Descriptors, source_order: int, stream: int) -> Method:
        """Enqueue *copies* in one call; return "loop" if this driver cannot after all."""
        attributes = CopyAttributes(source_order=source_order, flags=self._flags)
        try:
            self._driver.copy_batch(
                copies.destinations.ctypes.data,
                copies.sources.ctypes.data,
                copies.sizes.ctypes.data,
                copies.count,
                attributes,
                stream,
            )
        except DriverError as error:
            is_about_one = error.index is not None
            if error.code != CUDA_ERROR_NOT_SUPPORTED or is_about_one or not self._may_change:
                raise _refused(copies, error, error.index) from error
            # the device has no such call; the same copies one by one give the same bytes
            self.method, self.reason = "loop", str(error)
            return "loop"
        return "batch"

    def _loop(self, copies: Descriptors, stream: int) -> None:
        copy_one = self._driver.copy_one
        rows = zip(
            copies.destinations.tolist(),
            copies.sources.tolist(),
            copies.sizes.tolist(),
            strict=True,
        )
        index = 0
        try:
            for index, (destination, source, nbytes) in enumerate(rows):  # noqa: B007
                copy_one(destination, source, nbytes, stream)
        except DriverError as error:
            raise _refused(copies, error, index) from error


def _check_stream(stream: int) -> None:
    if isinstance(stream, bool) or not isinstance(stream, int) or stream < 0:
        raise ValueError(f"stream must be a CUstream handle, an integer; got {stream!r}")
    if stream in LEGACY_STREAMS:
        raise ValueError(
            "stream must be a stream of its own: the legacy default stream waits for all others, and "
            f"the driver refuses a batch copy on it; got {stream}"
        )


def _refused(copies: Descriptors, error: DriverError, index: int | None) -> CopyError:
    """Return the error of a transfer that says which copy it was."""
    if index is None:
        which = f"{copies.count} copies of {copies.nbytes} bytes"
    else:
        which = (
            f"copy {index} of {copies.count}: {copies.sizes[index]} bytes from "
            f"{copies.sources[index]:#x} to {copies.destinations[index]:#x}"
        )
    return CopyError(f"{which}: {error}", error.code, index)
