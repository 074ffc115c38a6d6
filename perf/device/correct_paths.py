"""Correctness of what is no Triton kernel of its own: the copy engine, operators, arrays of cupy, a captured graph."""

import functools

import torch
from perf.device import copy_engine
from perf.device.caches import caches
from perf.device.child import Context
from perf.device.pairs import FRAME_GUARD_BYTES, Pair, Transfer, frames
from perf.device.record import Case

from kvferry.kernels.descriptors import BlockRuns
from kvferry.kernels.reference import gather_blocks, scatter_blocks
from kvferry.kvops import ops

ENGINE_CACHES = (
    "llama LBNHC",
    "llama BLHNC, one run a block",
    "hybrid, three groups",
    "single bytes",
)
OP_CACHES = ("llama LBNHC", "hybrid, three groups", "words of 4 bytes")


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    built = caches(tiny)
    return [
        *(_case("copy engine", name, built, by_copy_engine) for name in ENGINE_CACHES),
        *(_case("operators", name, built, by_operators) for name in OP_CACHES),
        _case("arrays of cupy", "llama LBNHC", built, from_cupy),
    ]


def _case(kind: str, name: str, built: dict, run) -> Case:
    title = f"{kind}, {name}"
    return Case(title, 0, "there and back", functools.partial(run, title, built[name]))


def by_copy_engine(title: str, build, context: Context) -> None:
    """Whole blocks by the batch copy, and by one call each."""
    for method in ("batch", "loop"):
        engine = copy_engine.engine_of(context, method)
        pair = Pair(context, build)
        runs = BlockRuns(pair.device_table)
        for direction in ("d2h", "h2d"):
            transfer = Transfer(pair, repeats=direction == "d2h")
            both = frames(context, "host", transfer.nbytes, random=direction == "h2d")
            addresses = both.device.data_ptr() + transfer.offsets
            context.machine.synchronize()
            engine.copy_blocks(
                runs,
                transfer.ids,
                addresses,
                transfer.counts,
                direction,
                copy_engine.stream_of(context),
            )
            twin(pair, transfer, both, direction)
            finish(context, title, f"{method}, {direction}", both, pair)


def by_operators(title: str, build, context: Context) -> None:
    """``torch.ops.kvferry``, through the functions that check."""
    for where in ("host", "device"):
        pair = Pair(context, build)
        layout = ops.register_layout(pair.device.layouts)
        for verb, direction in (("gather_blocks", "d2h"), ("scatter_blocks", "h2d")):
            transfer = Transfer(pair, repeats=direction == "d2h")
            both = frames(context, where, transfer.nbytes, random=direction == "h2d")
            getattr(ops, verb)(
                layout, torch.from_numpy(transfer.ids), both.device, torch.from_numpy(transfer.offsets),
                counts=transfer.counts,
            )  # fmt: skip
            twin(pair, transfer, both, direction)
            finish(context, title, f"{verb}, {where}", both, pair)


def from_cupy(title: str, build, context: Context) -> None:
    """Frames and ids that are cupy's arrays, by DLPack; numpy's in a rehearsal."""
    pair = Pair(context, build)
    layout = ops.register_layout(pair.device.layouts)
    transfer = Transfer(pair, repeats=True)
    both = frames(context, "device", transfer.nbytes, random=False)
    if context.machine.is_cuda:
        import cupy

        blobs = cupy.from_dlpack(both.device)
    else:
        blobs = both.device.numpy()
    ops.gather_blocks(layout, transfer.ids, blobs, transfer.offsets, counts=transfer.counts)
    twin(pair, transfer, both, "d2h")
    finish(context, title, "gather_blocks, device", both, pair)


def twin(pair: Pair, transfer: Transfer, both, direction: str) -> None:
    """Have the twin move the same blocks on the CPU."""
    entries = transfer.entries(pair.cpu_table, both.cpu)
    move = gather_blocks if direction == "d2h" else scatter_blocks
    move(pair.cpu_table, entries, transfer.counts)


def finish(
    context: Context, title: str, provider: str, both, pair: Pair, also: bool = True
) -> None:
    """Wait, compare everything, and write the row."""
    context.machine.synchronize()
    context.recorder.row(
        title,
        provider,
        num_bytes=2 * (both.cpu.numel() - 2 * FRAME_GUARD_BYTES),
        match=also and both.same() and pair.same(),
    )
