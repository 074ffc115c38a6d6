"""What do the conversions that ride along cost? Checksums, fp8, and the order of heads, against the plain copy.

Each is timed in turn with the plain move of the same blocks, over the link and inside device memory.
"""

import functools
import statistics

import torch
from perf.device import submission
from perf.device.child import Context
from perf.device.correct_rows import entries_of
from perf.device.paged import PagedJob, Shape
from perf.device.pairs import Frames
from perf.device.record import Case

from kvferry.kernels import gather, heads, quantized, reference_quantized, scatter
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout

HEADS, DIM2 = 8, 256
"""Of Llama 3.1 8B: KV heads, and numbers of a head and token, K and V."""
SHAPE, TINY_SHAPE = Shape(HEADS * 16 * DIM2 * 2, 32, 32), Shape(HEADS * 1 * DIM2 * 2, 2, 3)
LINK_SMS, ALL_SMS = 16, 132
TILE_BYTES = 16 << 10
ROUNDS = 7


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    shape = TINY_SHAPE if tiny else SHAPE
    made = [
        Case(
            f"checksum {where}",
            shape.num_bytes,
            str(shape),
            functools.partial(checksum, shape, where),
        )
        for where in ("d2h", "h2d", "device")
    ]
    made += [
        Case(
            f"{kind} {direction}",
            shape.num_bytes,
            f"{shape}, bf16",
            functools.partial(run, shape, direction),
        )
        for kind, run in (("fp8", numbers), ("heads", order_of_heads))
        for direction in ("d2h", "h2d")
    ]
    return made + submission.cases(tiny)


def both(
    context: Context, case: str, plain, other, name: str, num_bytes: int, match, **more
) -> None:
    """Time *plain* and *other* in turn, and record the second against the first; *match* runs after each."""
    us: dict[str, list[float]] = {"plain": [], name: []}
    for _ in range(1 if context.tiny else ROUNDS):
        us["plain"] += context.machine.timed(plain, rounds=1, warm=1)
        us[name] += context.machine.timed(other, rounds=1, warm=1)
    roof_us = statistics.median(us["plain"])
    right = match()
    for provider, times in us.items():
        context.recorder.row(
            case, provider, us=times, num_bytes=num_bytes, roof_us=roof_us, match=right, **more
        )


def checksum(shape: Shape, where: str, context: Context) -> None:
    """Gather with a checksum of each blob, scatter with its comparison."""
    machine = context.machine
    if where == "device" and not context.tiny:
        # several times the cache of the device
        shape = Shape(shape.segment_bytes, shape.segments, 8 * shape.blocks)
    in_device = torch.empty(shape.num_bytes, dtype=torch.uint8, device=machine.device)
    job = PagedJob(context, shape, frames=in_device if where == "device" else None)
    sms = ALL_SMS if where == "device" else LINK_SMS
    options = {"max_sms": 2, "bytes_in_flight": 2 * TILE_BYTES} if context.tiny else {
        "max_sms": sms, "bytes_in_flight": sms * TILE_BYTES}  # fmt: skip
    sums = torch.zeros(shape.blocks, dtype=torch.int64, device=machine.device)
    wrong = torch.zeros(shape.blocks, dtype=torch.int32, device=machine.device)
    workspace = torch.zeros(shape.blocks, 2, dtype=torch.int64, device=machine.device)
    arguments = (job.table, job.entries, job.counts)
    summing = {"checksums": sums, "workspace": workspace}
    if where == "h2d":
        gather.gather_blocks(*arguments, **options, **summing)
        machine.synchronize()
        plain = functools.partial(scatter.scatter_blocks, *arguments, **options)
        other = functools.partial(plain, **summing, mismatch=wrong)
    else:
        plain = functools.partial(gather.gather_blocks, *arguments, **options)
        other = functools.partial(plain, **summing)
    moved = job.moved(to_host=where != "h2d")

    def match() -> bool:
        machine.synchronize()
        # a sum of random bytes is nothing twice
        distinct = torch.unique(sums).numel() == shape.blocks
        return distinct and not bool(wrong.any()) and moved.right()

    both(
        context,
        f"checksum {where}",
        plain,
        other,
        "with checksum",
        shape.num_bytes,
        match,
        direction=where,
    )


def rows_of(cache: torch.Tensor) -> RowLayout:
    """Return the rows of ``[L, NB, segment_bytes]`` seen as ``[NB, H, BS, K and V]`` bf16."""
    views = [layer.view(torch.bfloat16).view(layer.shape[0], HEADS, -1, DIM2) for layer in cache]
    return RowLayout.from_views(views, "bhnc")


def numbers(shape: Shape, direction: str, context: Context) -> None:
    """Bf16 to fp8 with a scale for each token and head, and back."""
    job = PagedJob(context, shape)
    rows = QuantizedRows.from_rows(rows_of(job.cache))
    frames = job.frames.view(-1)[: shape.blocks * rows.block_bytes].view(shape.blocks, -1)
    entries = entries_of(job.ids, Frames(frames, frames), context.machine.device)
    plain, sms = plain_move(job, direction, context)
    quantized.gather_quantized(rows, entries, max_sms=sms)
    context.machine.synchronize()
    verb = quantized.gather_quantized if direction == "d2h" else quantized.scatter_dequantized
    one = rows_of(job.cache[:, job.ids[0] : job.ids[0] + 1].cpu())
    expected = torch.zeros(1, rows.block_bytes, dtype=torch.uint8)
    reference_quantized.gather_quantized(QuantizedRows.from_rows(one), [0], expected)
    # the plain scatter takes these bytes for numbers: what they become does not matter here
    right = torch.equal(frames[0].cpu(), expected[0])
    both(
        context, f"fp8 {direction}", plain, functools.partial(verb, rows, entries, max_sms=sms), "quantized",
        shape.num_bytes, lambda: right, direction=direction,
    )  # fmt: skip


def order_of_heads(shape: Shape, direction: str, context: Context) -> None:
    """The order of heads that no rank count shows in, written and read."""
    job = PagedJob(context, shape)
    runs = HeadRuns.from_rows(rows_of(job.cache))
    frames = job.frames.view(shape.blocks, runs.block_bytes)
    entries = entries_of(job.ids, Frames(frames, frames), context.machine.device)
    plain, sms = plain_move(job, direction, context)
    heads.gather_heads(runs, entries, max_sms=sms)
    context.machine.synchronize()
    tokens = shape.segment_bytes // (HEADS * DIM2 * 2)
    # [N, L, H, BS, K|V, D] in the cache, [N, L, K|V, H, BS, D] in the blob
    blocks = job.blocks().view(torch.int16).view(shape.blocks, shape.segments, HEADS, tokens, 2, -1)
    expected = blocks.permute(0, 1, 4, 2, 3, 5).contiguous().view(torch.uint8).view(frames.shape)
    right = torch.equal(frames.to(expected.device), expected)
    verb = heads.gather_heads if direction == "d2h" else heads.scatter_heads
    both(
        context, f"heads {direction}", plain, functools.partial(verb, runs, entries, max_sms=sms), "by heads",
        shape.num_bytes, lambda: right, direction=direction,
    )  # fmt: skip


def plain_move(job: PagedJob, direction: str, context: Context):
    """Return what moves the same blocks as they are, and the cap on SMs."""
    sms = 2 if context.tiny else LINK_SMS
    launcher = gather.gather_blocks if direction == "d2h" else scatter.scatter_blocks
    return functools.partial(
        launcher, job.table, job.entries, job.counts, max_sms=sms, bytes_in_flight=sms * TILE_BYTES
    ), sms
