"""Slots, heads and quantised blocks as operators: every layout with tokens, against the twins."""

import numpy as np
import pytest
import torch

from kvferry.kernels import reference_heads, reference_quantized
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kvops import ops

from ..kernels.layouts import ROW_LAYOUTS  # noqa: TID252 (tests are no package to name)

CPU = torch.device("cpu")
POISON = 0xA5


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_gather_slots_brings_every_token(case):
    cache = case(CPU)
    rows, before = cache.rows, [storage.clone() for storage in cache.storages]
    layout = ops.register_rows(rows)
    order = np.random.default_rng(1).permutation(rows.num_slots)
    # all slots, then a list with holes and repeats into rows with gaps
    slots = torch.from_numpy(order)
    out = torch.full((rows.num_slots, rows.row_bytes), POISON, dtype=torch.uint8)
    ops.gather_slots(layout, slots, out)
    for row, slot in zip(out, order.tolist(), strict=True):
        same(row, cache.expected_row(slot))

    slots = torch.tensor([-1, order[0], order[-1], order[0], -1])
    wide = torch.full((5, rows.row_bytes + 7), POISON, dtype=torch.uint8)
    ops.gather_slots(layout, slots, wide[:, : rows.row_bytes])
    for row, slot in zip(wide, slots.tolist(), strict=True):
        expected = torch.full_like(row, POISON)
        if slot >= 0:
            expected[: rows.row_bytes] = cache.expected_row(slot)
        same(row, expected)
    same(cache.storages, before)


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_scatter_slots_writes_the_tokens_and_nothing_else(case):
    cache, twin = case(CPU), case(CPU)
    rows = cache.rows
    slots = torch.from_numpy(np.random.default_rng(2).permutation(rows.num_slots)[: 3 + 1])
    slots[1] = -1
    source = torch.randint(0, 256, (slots.numel(), rows.row_bytes + 3), dtype=torch.uint8)
    source = source[:, : rows.row_bytes]
    ops.scatter_slots(ops.register_rows(rows), slots, source)
    reference_heads.scatter_slots(twin.rows, slots, source)
    same(cache.storages, twin.storages)


def shares(num_blocks, share, alignment, ids):
    """Return ids, poisoned blobs and offsets with gaps."""
    step = share + 3 * alignment
    blobs = torch.full((len(ids) * step + alignment,), POISON, dtype=torch.uint8)
    offsets = torch.arange(len(ids)) * step + alignment
    return torch.tensor([i % num_blocks if i >= 0 else -1 for i in ids]), blobs, offsets


def rows_of(blobs, offsets, share):
    return [blobs[offset : offset + share] for offset in offsets.tolist()]


def head_ranges(total):
    return [(0, None)] if total is None else [(0, None), (0, 1), (total - 1, 1), (1, total - 1)]


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_heads_match_their_twins(case):
    cache, twin = case(CPU), case(CPU)
    runs, twin_runs = HeadRuns.from_rows(cache.rows), HeadRuns.from_rows(twin.rows)
    layout, share = ops.register_heads(runs), runs.block_bytes
    for first, count in head_ranges(runs.total_heads):
        keywords = {"head_first": first, "head_count": count}
        ids, blobs, offsets = shares(runs.num_blocks, share, runs.alignment, [2, -1, 0, 2])
        expected = blobs.clone()
        ops.gather_heads(layout, ids, blobs, offsets, **keywords)
        rows = rows_of(expected, offsets, share)
        reference_heads.gather_heads(twin_runs, ids.tolist(), rows, first, count)
        same(blobs, expected)

        ids, blobs, offsets = shares(runs.num_blocks, share, runs.alignment, [0, -1])
        blobs.random_(0, 256)
        ops.scatter_heads(layout, ids, blobs, offsets, **keywords)
        rows = rows_of(blobs, offsets, share)
        reference_heads.scatter_heads(twin_runs, ids.tolist(), rows, first, count)
        same(cache.storages, twin.storages)


def half_precision(param):
    rows = param.values[0](CPU).rows
    return {part.dtype for part in rows.parts} <= {torch.bfloat16, torch.float16}


HALVES = [param for param in ROW_LAYOUTS if half_precision(param)]


@pytest.mark.parametrize("case", HALVES)
def test_quantised_blocks_match_their_twins(case):
    cache, twin = case(CPU), case(CPU)
    rows, twin_rows = QuantizedRows.from_rows(cache.rows), QuantizedRows.from_rows(twin.rows)
    layout, share = ops.register_quantized(rows), rows.block_bytes
    ids, blobs, offsets = shares(rows.num_blocks, share, 16, [1, -1, 0, 1])
    expected = blobs.clone()
    ops.gather_quantized(layout, ids, blobs, offsets)
    parts = rows_of(expected, offsets, share)
    reference_quantized.gather_quantized(twin_rows, ids.tolist(), parts)
    same(blobs, expected)

    ids = torch.tensor([0, -1]) if rows.num_blocks == 1 else torch.tensor([0, -1, 1])
    blobs, offsets = blobs[: offsets[2] + share], offsets[: ids.numel()]
    ops.scatter_dequantized(layout, ids, blobs, offsets)
    parts = rows_of(blobs, offsets, share)
    reference_quantized.scatter_dequantized(twin_rows, ids.tolist(), parts)
    same(cache.storages, twin.storages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_is_quantised_as_the_twin_says(dtype):
    """All 65,536 numbers, beside a neighbour that makes the scale anything from smallest to largest."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = numbers[numbers.isfinite()]
    generator = torch.Generator().manual_seed(4)
    mate = finite[torch.randint(0, finite.numel(), (1 << 16,), generator=generator)]
    cache = torch.stack([numbers, mate], dim=1).view(64, 1, 1024, 2)
    rows = QuantizedRows.from_rows(RowLayout.from_views([cache], "latent"))
    layout = ops.register_quantized(rows)
    ids, offsets = torch.arange(64), torch.arange(64) * rows.block_bytes
    blobs = torch.zeros(64 * rows.block_bytes, dtype=torch.uint8)
    ops.gather_quantized(layout, ids, blobs, offsets)
    codes, scales = reference_quantized.quantize(cache.view(-1, 2))
    parts = blobs.view(64, rows.block_bytes)
    same(parts[:, :2048].reshape(-1, 2), codes)
    same(parts[:, 2048 : 2048 + 4096].reshape(-1).view(torch.float32), scales)

    back = reference_quantized.dequantize(codes, scales, dtype)
    ops.scatter_dequantized(layout, ids, blobs, offsets)
    same(cache.view(-1, 2).view(torch.int16), back.view(torch.int16))


@pytest.fixture
def cached():
    """Return a bfloat16 cache of two layers, [5, 2, 4, 16], and its rows."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 5, 2, 4, 16, generator=generator).to(torch.bfloat16)
    return cache, RowLayout.from_views(list(cache), "bhnc")


def calls(rows, poisoned):
    """Return name -> (registered layout, index argument, written bytes, more arguments)."""
    heads, quantised = HeadRuns.from_rows(rows), QuantizedRows.from_rows(rows)
    one, ids = torch.zeros(1, dtype=torch.int64), torch.tensor([3])
    slots = torch.tensor([7, -1, 0])
    of_heads = (ops.register_heads(heads), ids, poisoned(heads.block_bytes), one)
    of_codes = (ops.register_quantized(quantised), ids, poisoned(quantised.block_bytes), one)
    of_rows = (ops.register_rows(rows), slots, poisoned(3, rows.row_bytes))
    return {
        "gather_slots": of_rows, "scatter_slots": of_rows, "gather_heads": of_heads,
        "scatter_heads": of_heads, "gather_quantized": of_codes, "scatter_dequantized": of_codes,
    }  # fmt: skip


NAMES = [
    "gather_slots", "scatter_slots", "gather_heads", "scatter_heads", "gather_quantized",
    "scatter_dequantized",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_passes(name, cached, poisoned):
    layout, *arguments = calls(cached[1], poisoned)[name]
    op = getattr(torch.ops.kvferry, name).default
    torch.library.opcheck(op, (layout.handle, list(layout.caches), *arguments))


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_graph_moves_the_same_bytes(name, cached, poisoned):
    cache, rows = cached
    layout, *arguments = calls(rows, poisoned)[name]
    before = cache.clone()
    run = getattr(ops, name)
    run(layout, *arguments)
    expected = cache.clone(), arguments[1].clone()
    cache.copy_(before)
    if name.startswith("gather"):
        arguments[1].fill_(POISON)

    def step(*tensors):
        run(layout, *tensors)
        return cache[0] + 0

    read = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)
    same(cache.view(torch.int16), expected[0].view(torch.int16))
    same(arguments[1], expected[1])
    same(read.view(torch.int16), expected[0][0].add(0).view(torch.int16))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_move_is_no_work(name, cached, poisoned):
    cache, rows = cached
    before = cache.clone()
    layout, index, blobs, *offsets = calls(rows, poisoned)[name]
    blobs = blobs[:0]
    getattr(ops, name)(layout, index[:0], blobs, *(o[:0] for o in offsets))
    same(cache.view(torch.int16), before.view(torch.int16))
