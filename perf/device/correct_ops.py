"""Correctness of the operators on a device beyond plain blocks: rows, heads, fp8, checksums, graphs, compilation."""

import functools

import numpy as np
import torch
from perf.device.caches import caches
from perf.device.child import Context
from perf.device.correct_paths import finish, twin
from perf.device.pairs import FRAME_GUARD_BYTES, Pair, Transfer, frames
from perf.device.record import Case

from kvferry.kernels import gather, reference_heads, reference_quantized
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kvops import ops

CACHE = "llama LBNHC"


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    build = caches(tiny)[CACHE]
    named = [
        ("rows, heads and fp8 by operators", by_rows),
        ("checksums by operators", by_checksums),
        ("compiled operators", compiled),
        ("captured graph", captured),
    ]
    return [
        Case(title, 0, CACHE, functools.partial(run, title, build))
        for title, run in named
        # a rehearsal has no graphs, and compiles what it has in the operators' own tests
        if not tiny or run in (by_rows, by_checksums)
    ]


def by_rows(title: str, build, context: Context) -> None:
    """The operators that know tokens, heads and numbers: into frames, and back from them."""
    device = context.machine.device
    pair = Pair(context, build)
    rows, twin_rows = pair.device.rows, pair.cpu.rows
    slots = torch.arange(0, rows.num_blocks * rows.block_size, 3)
    by_slot, by_head, by_number = (
        ops.register_rows(rows),
        ops.register_heads(HeadRuns.from_rows(rows)),
        ops.register_quantized(QuantizedRows.from_rows(rows)),
    )
    runs, numbers = HeadRuns.from_rows(twin_rows), QuantizedRows.from_rows(twin_rows)
    ids = np.arange(rows.num_blocks - 1, 0, -2)
    for verb, undo in (("gather", "scatter"), ("scatter", "")):
        load = not undo
        both = frames(context, "host", slots.numel() * rows.row_bytes, random=load)
        view = both.rows(slots.numel(), rows.row_bytes)
        getattr(ops, f"{verb}_slots")(by_slot, slots.to(device), view.device)
        getattr(reference_heads, f"{verb}_slots")(twin_rows, slots, view.cpu)
        finish(context, title, f"{verb}_slots", both, pair)

        both = frames(context, "host", ids.size * runs.block_bytes, random=load)
        getattr(ops, f"{verb}_heads")(
            by_head, ids, both.device, offsets(ids.size, runs.block_bytes)
        )
        view = both.rows(ids.size, runs.block_bytes)
        getattr(reference_heads, f"{verb}_heads")(runs, ids.tolist(), view.cpu)
        finish(context, title, f"{verb}_heads", both, pair)
    both = frames(context, "host", ids.size * numbers.block_bytes, random=False)
    for verb in ("gather_quantized", "scatter_dequantized"):
        getattr(ops, verb)(by_number, ids, both.device, offsets(ids.size, numbers.block_bytes))
        view = both.rows(ids.size, numbers.block_bytes)
        getattr(reference_quantized, verb)(numbers, ids.tolist(), view.cpu)
        finish(context, title, verb, both, pair)


def offsets(count: int, nbytes: int) -> np.ndarray:
    """Return where *count* blocks begin in frames."""
    return FRAME_GUARD_BYTES + np.arange(count, dtype=np.int64) * nbytes


def by_checksums(title: str, build, context: Context) -> None:
    """A gather that writes checksums, and scatters that compare them: right, and with a bit flipped."""
    pair = Pair(context, build)
    layout = ops.register_layout(pair.device.layouts)
    transfer = Transfer(pair, repeats=False)
    both = frames(context, "host", transfer.nbytes, random=False)
    count, device = transfer.num_blobs, context.machine.device
    sums = torch.zeros(count, dtype=torch.int64, device=device)
    mismatch = torch.zeros(count, dtype=torch.int32, device=device)
    entries = {
        "counts": transfer.counts, "blob_ids": transfer.blobs, "places": transfer.places, "checksums": sums,
    }  # fmt: skip
    ops.gather_blocks(layout, transfer.ids, both.device, transfer.offsets, **entries)
    twin(pair, transfer, both, "d2h")
    finish(context, title, "gather_blocks", both, pair, also=torch.unique(sums).numel() == count)
    for flipped in ([], [1]):
        context.machine.synchronize()
        for blob in flipped:
            at = int(
                transfer.offsets[np.flatnonzero((transfer.blobs == blob) & (transfer.ids >= 0))[0]]
            )
            both.device[at] ^= 1
            both.cpu[at] ^= 1
        ops.scatter_blocks(
            layout, transfer.ids, both.device, transfer.offsets, mismatch=mismatch, **entries
        )
        twin(pair, transfer, both, "h2d")
        found = torch.nonzero(mismatch.cpu()).flatten().tolist()
        what = f"scatter_blocks, {'one bit flipped' if flipped else 'right'}"
        finish(context, title, what, both, pair, also=found == flipped)


def compiled(title: str, build, context: Context) -> None:
    """A whole graph with an operator in it, by torch.compile: the write is neither dropped nor undone."""
    pair = Pair(context, build)
    layout = ops.register_layout(pair.device.layouts)
    transfer = Transfer(pair, repeats=False)
    both = frames(context, "device", transfer.nbytes, random=False)
    ids, places = torch.from_numpy(transfer.ids), torch.from_numpy(transfer.offsets)

    def step(blobs: torch.Tensor) -> torch.Tensor:
        ops.gather_blocks(layout, ids, blobs, places, counts=transfer.counts)
        return blobs.clone()

    seen = torch.compile(step, fullgraph=True, backend="aot_eager")(both.device)
    twin(pair, transfer, both, "d2h")
    finish(context, title, "gather_blocks", both, pair, also=torch.equal(seen, both.device))


def captured(title: str, build, context: Context) -> None:
    """A launch in a CUDA graph, replayed after the blocks, and the blocks' numbers, have changed."""
    pair = Pair(context, build)
    transfer = Transfer(pair, repeats=False)
    both = frames(context, "host", transfer.nbytes, random=False)
    entries = transfer.entries(pair.device_table, both.device)
    gather.gather_blocks(pair.device_table, entries, transfer.counts)
    context.machine.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather.gather_blocks(pair.device_table, entries, transfer.counts)
    context.machine.synchronize()
    # another selection of blocks goes to the same frames
    transfer.ids = transfer.ids[::-1].copy()
    entries.copy_(transfer.entries(pair.device_table, both.device))
    both.device.copy_(both.cpu)
    context.machine.synchronize()
    graph.replay()
    twin(pair, transfer, both, "d2h")
    finish(context, title, "gather_blocks", both, pair)
