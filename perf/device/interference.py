"""What does each path cost the work beside it?

Two victims, each timed alone and beside a transfer that never ends, in turn: a large bf16 matrix product, bound by the
SMs, and one token for each of 16 requests through large weights, bound by device memory as decoding is.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch
from perf.device import bulk, copy_engine, direct
from perf.device.child import Context
from perf.device.link import roof
from perf.device.paged import PagedJob, Shape
from perf.device.record import Case
from perf.device.staged import Staged

SEGMENTS = Shape(64 << 10, 32, 32)
BLOBS = Shape(2 << 20, 1, 32)
TINY_SEGMENTS, TINY_BLOBS = Shape(4 << 10, 3, 4), Shape(12 << 10, 1, 4)
PATHS = ("B 2048 KiB", "S 8", "G 132", "T 1", "S 132", "S 16", "T 4", "B 64 KiB", "S 4")
TINY_PATHS = ("B 2048 KiB", "S 2", "G 2")
ROUNDS = 3
JOBS_AHEAD = 2.5
"""How long the transfers that are enqueued take, measured in the time that the victim takes alone."""


@dataclasses.dataclass
class Victim:
    """Work that is disturbed.

    Attributes:
        run: enqueues it.
        products: how many there are in one run.
    """

    run: Callable[[], object]
    products: int


def cases(tiny: bool) -> list[Case]:
    """Return the cases: the paths that matter most against both victims first."""
    paths = TINY_PATHS if tiny else PATHS
    shape = TINY_SEGMENTS if tiny else SEGMENTS
    return [
        Case(
            f"{victim} beside {direction} by {path}", shape.num_bytes, "64 MiB a job, one after the other",
            functools.partial(disturb, victim, direction, path),
        )
        for group in (paths[:4], paths[4:])
        for victim in ("gemm", "decode")
        for direction in ("d2h", "h2d")
        for path in group
        # one path is enough to rehearse the other victim
        if not tiny or victim == "gemm" or path == paths[0]
    ]  # fmt: skip


def victim_of(name: str, context: Context) -> Victim:
    """Return a victim."""
    device, tiny = context.machine.device, context.tiny
    if name == "gemm":
        size = 32 if tiny else 8192
        left, right, out = (
            torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(3)
        )
        products = 2 if tiny else 16
        return Victim(lambda: [torch.mm(left, right, out=out) for _ in range(products)], products)
    width, depth = (64, 32) if tiny else (28672, 8192)
    weights = torch.randn(4, depth, width, device=device, dtype=torch.bfloat16)
    tokens = torch.randn(16, depth, device=device, dtype=torch.bfloat16)
    outs = torch.empty(16, width, device=device, dtype=torch.bfloat16)
    repeats = 1 if tiny else 40
    return Victim(
        lambda: [torch.mm(tokens, weight, out=outs) for _ in range(repeats) for weight in weights],
        4 * repeats,
    )


def transfer_of(
    path: str, direction: str, context: Context
) -> tuple[PagedJob, Callable[[], object]]:
    """Return a job and what enqueues it once, on the current stream or behind it."""
    kind, setting = path.split(" ", 1)
    shape = TINY_SEGMENTS if context.tiny else SEGMENTS
    if kind == "B":
        if setting == "2048 KiB":
            shape = TINY_BLOBS if context.tiny else BLOBS
        job = PagedJob(context, shape)
        copies = copy_engine.descriptors(job, direction)
        engine = copy_engine.engine_of(context, "batch")
        return job, lambda: engine.copy(copies, direction, copy_engine.stream_of(context))
    if kind == "G":
        staged = Staged(context, shape, direction, int(setting))
        return staged.job, staged.run
    job = PagedJob(context, shape)
    if kind == "T":
        return job, bulk.move(job, direction, int(setting), context)
    cap = int(setting)
    return job, direct.move(job, direction, cap, cap * (16 << 10))


def disturb(name: str, direction: str, path: str, context: Context) -> None:
    """Time the victim alone and beside the transfer, in turn."""
    machine = context.machine
    victim = context.once(("victim", name), lambda: victim_of(name, context))
    job, transfer = transfer_of(path, direction, context)
    side = context.once("side", machine.new_stream)
    with machine.on(side):
        moved = job.moved(direction == "d2h")
        alone_us = min(machine.timed(transfer, rounds=3))
    right = moved.right()
    alone, beside, copied = [], [], []
    for _ in range(ROUNDS):
        alone += machine.timed(victim.run, rounds=1, warm=1)
        jobs = 1 + int(JOBS_AHEAD * alone[-1] / alone_us)
        together, per_job = run_together(victim, transfer, jobs, side, context)
        beside.append(together)
        copied += per_job
    least = min(alone) / victim.products
    recorder = context.recorder
    recorder.row(f"{name} alone", path, us=[us / victim.products for us in alone], roof_us=least)
    recorder.row(
        f"{name} beside {direction}", path, us=[us / victim.products for us in beside], direction=direction,
        roof_us=sorted(alone)[len(alone) // 2] / victim.products, match=right,
    )  # fmt: skip
    if copied:
        recorder.row(
            f"{direction} beside {name}", path, us=copied, num_bytes=job.shape.num_bytes, direction=direction,
            roof_gbps=roof(context, direction), match=right,
        )  # fmt: skip
    else:
        recorder.note(f"interference: no transfer by {path} {direction} ended while {name} ran")


def run_together(
    victim: Victim, transfer: Callable[[], object], jobs: int, side: object, context: Context
) -> tuple[float, list[float]]:
    """Run *jobs* transfers on *side* and the victim beside them.

    Returns:
        Microseconds of the victim, and of each transfer that ran from start to end while the victim did.

    Raises:
        RuntimeError: the transfers ended before the victim: nothing was measured.
    """
    machine = context.machine
    if not machine.is_cuda:
        transfer()
        victim.run()
        return 1.0, [1.0]
    machine.synchronize()
    ends = []
    with machine.on(side):
        for _ in range(jobs):
            transfer()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
    # the victim starts when the transfers are under way
    ends[0].synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    victim.run()
    end.record()
    end.synchronize()
    if ends[-1].query():
        raise RuntimeError(f"transfers must outlast the victim; {jobs} of them did not")
    machine.synchronize()
    span = start.elapsed_time(end) * 1e3
    within = [
        moment
        for moment in (start.elapsed_time(event) * 1e3 for event in ends)
        if 0 <= moment <= span
    ]
    return span, [after - before for before, after in itertools.pairwise(within)]
