"""B: what does the batch copy reach by size and count, and what does it cost the host?

Each copy is one segment of a block, nothing merges: the frames of two segments touch, their pages do not.
"""

import ctypes
import functools
import time

import numpy as np
from perf.device.child import Context
from perf.device.link import roof
from perf.device.paged import PagedJob, Shape
from perf.device.record import Case

from kvferry.kernels.copy_engine import CopyEngine
from kvferry.kernels.descriptors import Descriptors

SIZES = (4 << 10, 8 << 10, 16 << 10, 24 << 10, 28 << 10, 32 << 10, 64 << 10, 256 << 10, 2 << 20)
COUNTS = (1024, 256, 64, 16, 4096)
MOST_BYTES = 256 << 20
LOOP_COUNTS = (256,)


def cases(tiny: bool) -> list[Case]:
    """Return the cases: all sizes with one count before the next count."""
    if tiny:
        return [_case(4 << 10, 16, direction, True) for direction in ("h2d", "d2h")]
    return [
        _case(size, count, direction, count in LOOP_COUNTS)
        for count in COUNTS
        for size in SIZES
        if size * count <= MOST_BYTES
        for direction in ("h2d", "d2h")
    ]


def _case(size: int, count: int, direction: str, with_loop: bool) -> Case:
    shape = Shape(size, 8, count // 8)
    name = f"{direction} {size >> 10} KiB x {count}"
    detail = f"{count} descriptors{', and one call each' if with_loop else ''}"
    return Case(
        name, shape.num_bytes, detail, functools.partial(copy, name, shape, direction, with_loop)
    )


class HostDriver:
    """The copy calls of a driver, made by memmove: for rehearsals."""

    batch_missing = ""

    def copy_batch(self, destinations, sources, sizes, count, attributes, stream) -> None:
        """Copy *count* pieces whose descriptors are at these addresses."""
        arrays = (
            (ctypes.c_uint64 * count).from_address(at) for at in (destinations, sources, sizes)
        )
        for destination, source, size in zip(*arrays, strict=True):
            ctypes.memmove(destination, source, size)

    def copy_one(self, destination, source, nbytes, stream) -> None:
        """Copy one piece."""
        ctypes.memmove(destination, source, nbytes)


def engine_of(context: Context, method: str) -> CopyEngine:
    """Return the section's copy engine."""
    driver = None if context.machine.is_cuda else HostDriver()
    return context.once(("engine", method), lambda: CopyEngine(driver, method=method))


def stream_of(context: Context) -> int:
    """Return the current stream; a rehearsal has none, and the engine takes no null handle."""
    return context.machine.stream_handle() if context.machine.is_cuda else 2


def descriptors(job: PagedJob, direction: str) -> Descriptors:
    """Return one copy for each segment of *job*."""
    arrays = job.segments_of(direction == "d2h")
    return Descriptors(*(np.ascontiguousarray(array.view(np.int64)) for array in arrays))


def copy(name: str, shape: Shape, direction: str, with_loop: bool, context: Context) -> None:
    """Time the batch, and one call for each copy beside it."""
    job = PagedJob(context, shape)
    copies = descriptors(job, direction)
    for method in ("batch", "loop") if with_loop else ("batch",):
        engine = engine_of(context, method)
        submitted = []

        def run(engine=engine, submitted=submitted) -> None:
            started = time.perf_counter()
            engine.copy(copies, direction, stream_of(context))
            submitted.append((time.perf_counter() - started) / copies.count * 1e6)

        moved = job.moved(direction == "d2h")
        us = context.machine.timed(run)
        right = moved.right()
        context.recorder.row(
            name, method, us=us, num_bytes=shape.num_bytes, roof_gbps=roof(context, direction), match=right,
            direction=direction, layout=f"{shape.segment_bytes} B segments",
        )  # fmt: skip
        context.recorder.row(
            name, f"{method} submit", us=submitted[-len(us) :], match=right, direction=direction
        )
