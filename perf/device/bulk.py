"""T: does a ring of bulk copies fill the link with one or two SMs?

The same shapes as the direct kernels have; bytes in flight are the ring's, all that shared memory holds or less.
"""

import functools

from perf.device import direct
from perf.device.child import Context
from perf.device.link import roof
from perf.device.paged import PagedJob, Shape
from perf.device.pairs import Pair, Transfer, frames
from perf.device.record import Case

from kvferry.kernels import bulk, reference

SMS = (1, 2, 4, 8, 16)
SHARES_KIB = (None, 128, 64, 32)
"""Bytes in flight of each SM: all that fit, or fewer."""
CHECKED = ("llama LBNHC", "mla 576 bf16", "mla 656 B and indexer 132 B", "llama LHBNC, heads apart")


def cases(tiny: bool) -> list[Case]:
    """Return the cases: whether bytes are right, then all caps on SMs for each shape and direction."""
    from perf.device.caches import caches

    shapes = direct.TINY_SHAPES[:1] if tiny else direct.SHAPES
    built = caches(tiny)
    return [
        *(Case(f"blocks, {name}", 0, "there and back", functools.partial(check, name, built[name])) for name in CHECKED),
        *(
            Case(
                direct.label(shape, direction), shape.num_bytes, f"{shape}, SMs {SMS}",
                functools.partial(sweep, shape, direction, (2,) if tiny else SMS),
            )
            for shape in shapes
            for direction in ("h2d", "d2h")
        ),
        *(
            []
            if tiny
            else [
                Case(
                    f"{direction} 64 KiB, fewer bytes in flight", shapes[0].num_bytes, f"KiB of an SM: {SHARES_KIB[1:]}",
                    functools.partial(shares, shapes[0], direction),
                )
                for direction in ("h2d", "d2h")
            ]
        ),
    ]  # fmt: skip


def launcher(direction: str, context: Context):
    """Return the launcher; a rehearsal has the twin, which knows neither SMs nor bytes in flight."""
    if context.machine.is_cuda:
        return bulk.gather_blocks if direction == "d2h" else bulk.scatter_blocks
    twin = reference.gather_blocks if direction == "d2h" else reference.scatter_blocks
    return lambda table, entries, counts, **_: twin(table, entries, counts)


def move(job: PagedJob, direction: str, sms: int, context: Context, share_kib: int | None = None):
    """Return what launches the ring that moves *job* once."""
    if context.machine.is_cuda and (reason := bulk.reason_against(job.table)):
        raise RuntimeError(reason)
    in_flight = None if share_kib is None else sms * (share_kib << 10)
    return functools.partial(
        launcher(direction, context),
        job.table,
        job.entries,
        job.counts,
        max_sms=sms,
        bytes_in_flight=in_flight,
    )


def check(name: str, build, context: Context) -> None:
    """Holes, several tile sizes, guard bytes: the same bytes as the twin's."""
    for direction in ("d2h", "h2d"):
        pair = Pair(context, build)
        transfer = Transfer(pair, repeats=direction == "d2h")
        both = frames(context, "host", transfer.nbytes, random=direction == "h2d")
        entries = transfer.entries(pair.device_table, both.device)
        launcher(direction, context)(pair.device_table, entries, transfer.counts, max_sms=2)
        twin = reference.gather_blocks if direction == "d2h" else reference.scatter_blocks
        twin(pair.cpu_table, transfer.entries(pair.cpu_table, both.cpu), transfer.counts)
        context.machine.synchronize()
        context.recorder.row(
            f"blocks, {name}",
            f"T {direction}",
            num_bytes=2 * both.cpu.numel(),
            match=both.same() and pair.same(),
        )


def sweep(shape: Shape, direction: str, sms: tuple[int, ...], context: Context) -> None:
    """Time one shape in one direction under each cap on SMs."""
    job = PagedJob(context, shape)
    for cap in sms:
        record(job, direction, f"T {cap}", move(job, direction, cap, context), context)


def shares(shape: Shape, direction: str, context: Context) -> None:
    """Time one SM with less in flight."""
    job = PagedJob(context, shape)
    for kib in SHARES_KIB[1:]:
        record(job, direction, f"T 1x{kib}K", move(job, direction, 1, context, kib), context)


def record(job: PagedJob, direction: str, provider: str, run, context: Context) -> None:
    """Time *run*, compare the bytes, write the row."""
    moved = job.moved(direction == "d2h")
    us = context.machine.timed(run)
    context.recorder.row(
        direct.label(job.shape, direction), provider, us=us, num_bytes=job.shape.num_bytes,
        roof_gbps=roof(context, direction), match=moved.right(), direction=direction,
        layout=f"{job.shape.segment_bytes} B segments", num_blocks=job.shape.blocks, layers=job.shape.segments, model=job.shape.model,
    )  # fmt: skip
