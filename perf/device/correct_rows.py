"""Correctness of the kernels that know tokens, heads and numbers, against their twins."""

import functools

import numpy as np
import torch
from perf.device.caches import caches
from perf.device.child import Context
from perf.device.pairs import Frames, Pair, frames
from perf.device.record import Case

from kvferry.kernels import heads, quantized, reference_heads, reference_quantized, slots
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.table import BLOCK_MASK, HOLE

ROW_CACHES = (
    "llama LBNHC",
    "mla 576 bf16",
    "mla 656 B and indexer 132 B",
    "llama LHBNC, heads apart",
    "kv first",
)
HEAD_CACHES = ("llama LBNHC", "llama LHBNC, heads apart", "kv first", "mla 576 bf16")
NUMBER_CACHES = ("llama LBNHC", "mla 576 bf16", "llama LBNHC fp16")


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    built = caches(tiny)
    made = []
    for kind, names, run in (
        ("slots", ROW_CACHES, check_slots),
        ("heads", HEAD_CACHES, check_heads),
        ("fp8", NUMBER_CACHES, check_numbers),
    ):
        made += [
            Case(f"{kind}, {name}", 0, "there and back", functools.partial(run, name, built[name]))
            for name in names
            if name in built
        ]
    return made


def homes(context: Context) -> tuple[str, ...]:
    """Return where frames are: on a CPU both are the same memory."""
    return ("host",) if context.tiny else ("host", "device")


def check_slots(name: str, build, context: Context) -> None:
    """Rows by slot: gather, and scatter of other rows."""
    for where in homes(context):
        pair = Pair(context, build)
        rows, twin_rows = pair.device.rows, pair.cpu.rows
        num_slots = rows.num_blocks * rows.block_size
        chosen = np.random.default_rng(5).permutation(num_slots)[: min(num_slots, 50)]
        chosen[3] = HOLE
        slot_mapping = torch.from_numpy(chosen.astype(np.int64))
        on_device = slot_mapping.to(context.machine.device)
        for verb in ("gather", "scatter"):
            both = frames(context, where, chosen.size * rows.row_bytes, random=verb == "scatter")
            view = both.rows(chosen.size, rows.row_bytes)
            getattr(slots, f"{verb}_slots")(rows, on_device, view.device)
            getattr(reference_heads, f"{verb}_slots")(twin_rows, slot_mapping, view.cpu)
            _record(context, f"slots, {name}", f"{verb}_slots, {where}", both, pair, view)


def entries_of(ids: np.ndarray, both: Frames, device: torch.device) -> torch.Tensor:
    """Return ``[N, 2]`` entries of blocks whose bytes lie one after the other."""
    addresses = both.device.data_ptr() + np.arange(ids.size) * both.device.shape[1]
    packed = np.stack((ids & BLOCK_MASK, addresses), axis=1)
    return torch.from_numpy(packed.astype(np.int64)).to(device)


def chosen_blocks(num_blocks: int) -> np.ndarray:
    """Return some blocks, each once, a hole among them."""
    ids = np.random.default_rng(5).permutation(num_blocks)[:4].astype(np.int64)
    return np.concatenate((ids[:1], [HOLE], ids[1:]))


def check_heads(name: str, build, context: Context) -> None:
    """Pages to canonical blobs of a model with four times the heads, as one of four ranks sees it, and back."""
    for where in homes(context):
        pair = Pair(context, build)
        heads_here = _heads_of(pair)
        share = (
            {} if heads_here is None else {"total_heads": 4 * heads_here, "head_first": heads_here}
        )
        runs, twin_runs = (
            HeadRuns.from_rows(rows, **share) for rows in (pair.device.rows, pair.cpu.rows)
        )
        ids = chosen_blocks(runs.num_blocks)
        # all heads, then one head of this rank
        ranges = [{}] if heads_here is None else [{}, {"head_first": heads_here, "head_count": 1}]
        for selected in ranges:
            for verb in ("gather", "scatter"):
                both = frames(context, where, ids.size * runs.block_bytes, random=verb == "scatter")
                view = both.rows(ids.size, runs.block_bytes)
                entries = entries_of(ids, view, context.machine.device)
                getattr(heads, f"{verb}_heads")(runs, entries, **selected)
                getattr(reference_heads, f"{verb}_heads")(
                    twin_runs, ids.tolist(), view.cpu, **selected
                )
                what = f"{verb}_heads, {'one head' if selected else 'all'}, {where}"
                _record(context, f"heads, {name}", what, both, pair, view)


def _heads_of(pair: Pair) -> int | None:
    """Return how many heads a token has here; None for a latent."""
    part = pair.cpu.rows.parts[0]
    return None if part.name == "latent" else part.shape[0]


def check_numbers(name: str, build, context: Context) -> None:
    """Numbers to fp8 codes and scales, and back: the same codes as the twin's, bit for bit."""
    for where in homes(context):
        pair = Pair(context, build)
        rows, twin_rows = (QuantizedRows.from_rows(one.rows) for one in (pair.device, pair.cpu))
        ids = chosen_blocks(rows.num_blocks)
        for verb in ("gather_quantized", "scatter_dequantized"):
            if verb == "gather_quantized":
                both = frames(context, where, ids.size * rows.block_bytes, random=False)
            view = both.rows(ids.size, rows.block_bytes)
            entries = entries_of(ids, view, context.machine.device)
            getattr(quantized, verb)(rows, entries)
            # codes that come back are those of the first half: scales are never random bits
            getattr(reference_quantized, verb)(twin_rows, ids.tolist(), view.cpu)
            _record(context, f"fp8, {name}", f"{verb}, {where}", both, pair, view)


def _record(
    context: Context, case: str, provider: str, both: Frames, pair: Pair, view: Frames
) -> None:
    """Wait, compare everything, and write the row."""
    context.machine.synchronize()
    context.recorder.row(
        case, provider, num_bytes=2 * view.cpu.numel(), match=both.same() and pair.same(),
        direction="d2h" if provider.startswith("gather") else "h2d",
    )  # fmt: skip
