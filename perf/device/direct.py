"""S: what do Triton kernels reach straight to and from registered host memory, with how many SMs?

The sweep is over the size of a segment, the cap on SMs and the bytes in flight of each program. The cases that decide
come first: the sizes of Llama 3.1 8B (64 KiB a layer, 8 KiB under TP8) and of DeepSeek's latent pages (72 KiB).
"""

import functools

from perf.device.child import Context
from perf.device.link import roof
from perf.device.paged import PagedJob, Shape
from perf.device.record import Case

from kvferry.kernels import gather, scatter

SMS = (1, 2, 4, 8, 16, 32, 132)
TILE_BYTES = (16 << 10, 8 << 10, 32 << 10)
SHAPES = (
    Shape(64 << 10, 32, 32, "Llama 3.1 8B"),
    Shape(8 << 10, 32, 256, "Llama 3.1 8B, TP8"),
    Shape(72 << 10, 61, 14, "DeepSeek V3, blocks of 64 tokens"),
    Shape(576 * 16, 27, 256, "DeepSeek V2 Lite, fp8"),
)
"""64 MiB each: some 1.2 ms at the speed of the link."""
TINY_SHAPES = (Shape(8 << 10, 3, 4), Shape(576 * 16, 2, 3))


def cases(tiny: bool) -> list[Case]:
    """Return the cases, one for each shape, direction and bytes in flight: all caps on SMs."""
    made = []
    for tile_bytes in TILE_BYTES[:1] if tiny else TILE_BYTES:
        for shape in TINY_SHAPES if tiny else SHAPES:
            for direction in ("d2h", "h2d"):
                sms = (2,) if tiny else SMS
                name = f"{label(shape, direction)}, {tile_bytes >> 10} KiB a program"
                detail = f"{shape}, SMs {sms}"
                run = functools.partial(sweep, shape, direction, sms, tile_bytes)
                made.append(Case(name, shape.num_bytes, detail, run))
    return made


def label(shape: Shape, direction: str) -> str:
    """Return what the rows of a shape and direction are called."""
    return f"{direction} {shape.segment_bytes / 1024:g} KiB"


def sweep(
    shape: Shape, direction: str, sms: tuple[int, ...], tile_bytes: int, context: Context
) -> None:
    """Time one shape in one direction under each cap on SMs."""
    job = PagedJob(context, shape)
    for cap in sms:
        run = move(job, direction, cap, tile_bytes * cap)
        moved = job.moved(direction == "d2h")
        us = context.machine.timed(run)
        context.recorder.row(
            label(shape, direction), f"S {cap}x{tile_bytes >> 10}K", us=us, num_bytes=shape.num_bytes,
            roof_gbps=roof(context, direction), match=moved.right(), direction=direction,
            layout=f"{shape.segment_bytes} B segments", num_blocks=shape.blocks, layers=shape.segments, model=shape.model,
        )  # fmt: skip


def move(job: PagedJob, direction: str, max_sms: int, bytes_in_flight: int):
    """Return what launches the kernel that moves *job* once."""
    launcher = gather.gather_blocks if direction == "d2h" else scatter.scatter_blocks
    return functools.partial(
        launcher,
        job.table,
        job.entries,
        job.counts,
        max_sms=max_sms,
        bytes_in_flight=bytes_in_flight,
    )
