"""Descriptors against a Python loop over blocks and segments, in every layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.descriptors import BlockRuns, Descriptors
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.table import HOLE, LayoutTable

from .conftest import LAYOUTS


def int64s(*values):
    return np.array(values, np.int64)


def make_table(kinds, pages=(64, 32, 48), num_blocks=9):
    layouts = []
    for kind in kinds:
        _, tensors = LAYOUTS[kind](torch.Generator().manual_seed(1), list(pages), num_blocks)
        layouts.append(BlockLayout.from_tensors(tensors, list(pages), 4))
    return LayoutTable.from_layouts(layouts)


def side_by_side(num_layers=4, page=64, num_blocks=8):
    """All layers of a block touch, and so do blocks: a whole block is one run."""
    whole = torch.zeros(num_blocks, num_layers * page, dtype=torch.uint8)
    tensors = [whole[:, page * i : page * (i + 1)] for i in range(num_layers)]
    return LayoutTable.from_layouts([BlockLayout.from_tensors(tensors, [page] * num_layers, 4)])


def byte_moves(copies):
    """Every (destination, source) pair of single bytes: what must not change however they merge."""
    return np.concatenate(
        [
            np.stack((np.arange(d, d + n), np.arange(s, s + n)), axis=1)
            for d, s, n in zip(copies.destinations, copies.sources, copies.sizes, strict=True)
        ]
        or [np.empty((0, 2), np.int64)]
    )


def expected_moves(table, ids, addresses, counts, direction):
    moves, entry = [], 0
    for layout, count in zip(table.layouts, counts, strict=True):
        for block, address in zip(ids[entry:][:count], addresses[entry:][:count], strict=True):
            if block == HOLE:
                continue
            for s in layout.segments:
                cache = s.base_address + int(block) * s.block_stride + np.arange(s.nbytes)
                frame = int(address) + s.blob_offset + np.arange(s.nbytes)
                pair = (frame, cache) if direction == "d2h" else (cache, frame)
                moves.append(np.stack(pair, axis=1))
        entry += count
    return np.concatenate(moves or [np.empty((0, 2), np.int64)])


def in_order(moves):
    return moves[np.lexsort((moves[:, 1], moves[:, 0]))]


@st.composite
def transfers(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=1, max_size=3))
    table = make_table(kinds)
    counts = draw(st.lists(st.integers(0, 7), min_size=len(kinds), max_size=len(kinds)))
    total = sum(counts)
    ids = draw(st.lists(st.integers(HOLE, 8), min_size=total, max_size=total))
    # frames lie one after the other, with and without gaps, and are handed out in any order
    places = draw(st.permutations(range(total)))
    gap = draw(st.sampled_from([0, 16]))
    stride = max(table.block_bytes) + gap
    addresses = [(1 << 40) + place * stride for place in places]
    return table, int64s(*ids), int64s(*addresses), counts


@given(transfers(), st.sampled_from(["d2h", "h2d"]))
@settings(max_examples=60, deadline=None)
def test_descriptors_move_the_bytes_that_a_loop_would(transfer, direction):
    table, ids, addresses, counts = transfer
    copies = BlockRuns(table).describe(ids, addresses, counts, direction)
    moves = expected_moves(table, ids, addresses, counts, direction)
    assert np.array_equal(in_order(byte_moves(copies)), in_order(moves))
    assert copies.nbytes == len(moves)


def test_segments_that_touch_are_one_run():
    runs = BlockRuns(side_by_side())
    assert runs.runs_per_block == (1,)


def test_segments_of_two_storages_stay_apart_even_where_they_touch():
    # two tensors that share no storage, as far as torch knows, but touch in memory
    whole = np.zeros(4 * 64, np.uint8)
    halves = [torch.from_numpy(whole[128 * i :][:128]).view(2, 64) for i in range(2)]
    layout = BlockLayout.from_tensors(halves, [64, 64], 4)
    assert halves[1].data_ptr() == halves[0].data_ptr() + 128
    runs = BlockRuns(LayoutTable.from_layouts([layout]))
    # block 1 of the first ends where block 0 of the second starts, and so do their frames
    copies = runs.describe(int64s(1, 0), int64s(1 << 30, (1 << 30) + 128), [2], "d2h")
    assert runs.runs_per_block == (2,)
    assert copies.count == 4


def test_neighbouring_blocks_that_touch_everywhere_are_one_copy():
    table = side_by_side()
    frames = int64s(*[(1 << 30) + 256 * i for i in range(5)])
    copies = BlockRuns(table).describe(int64s(2, 3, 4, 6, 7), frames, [5], "d2h")
    assert copies.sizes.tolist() == [3 * 256, 2 * 256]
    assert copies.destinations.tolist() == [1 << 30, (1 << 30) + 3 * 256]


def test_blocks_that_touch_in_the_cache_but_not_in_frames_are_not_merged():
    frames = int64s(1 << 30, (1 << 30) + 272)
    assert BlockRuns(side_by_side()).describe(int64s(2, 3), frames, [2], "h2d").count == 2


def test_blocks_given_out_of_order_merge_as_their_frames_lie():
    frames = int64s((1 << 30) + 256, 1 << 30)
    copies = BlockRuns(side_by_side()).describe(int64s(3, 2), frames, [2], "d2h")
    assert copies.sizes.tolist() == [512]


def test_no_copy_crosses_a_cut():
    frames = int64s(*[(1 << 30) + 256 * i for i in range(4)])
    runs = BlockRuns(side_by_side(), frame_cuts=[(1 << 30) + 512])
    copies = runs.describe(int64s(1, 2, 3, 4), frames, [4], "d2h")
    assert copies.destinations.tolist() == [1 << 30, (1 << 30) + 512]
    assert copies.sizes.tolist() == [512, 512]


def test_groups_are_not_merged_with_each_other():
    (layout,) = side_by_side().layouts
    runs = BlockRuns(LayoutTable.from_layouts([layout, layout]))
    frames = int64s(1 << 30, (1 << 30) + 256)
    assert runs.describe(int64s(0, 1), frames, [1, 1], "d2h").count == 2


@pytest.mark.parametrize("ids", [[], [HOLE, HOLE]])
def test_nothing_to_move_is_no_descriptor(ids):
    frames = np.full(len(ids), 4096, np.int64)
    copies = BlockRuns(side_by_side()).describe(int64s(*ids), frames, [len(ids)], "d2h")
    assert (copies.count, copies.nbytes) == (0, 0)


def test_merging_by_hand_joins_neighbours_up_to_a_cut():
    copies = Descriptors(int64s(100, 110, 120, 140), int64s(10, 20, 30, 40), int64s(10, 10, 10, 5))
    merged = copies.merged(int64s())
    assert merged.destinations.tolist() == [100, 140]
    assert (merged.sources.tolist(), merged.sizes.tolist()) == ([10, 40], [30, 5])
    assert copies.merged(int64s(20)).sizes.tolist() == [10, 20, 5]
    assert copies.merged(int64s(120)).sizes.tolist() == [20, 10, 5]
    assert merged.merged(int64s()) is merged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "up"}, r"direction must be 'd2h' or 'h2d'; got 'up'"),
        ({"counts": [1]}, r"block_ids must be int64 \[1\], one for each entry .* got int64 \[2\]"),
        ({"counts": [1, 1]}, r"counts must be 1 numbers, one for each group; got \[1, 1\]"),
        ({"counts": [3, -1]}, r"counts must be 1 numbers, .* got \[3, -1\]"),
        ({"block_ids": np.zeros(2, np.int32)}, r"block_ids must be int64 \[2\].* got int32 \[2\]"),
        ({"addresses": np.zeros((2, 1), np.int64)}, r"addresses must be int64 \[2\].* \[2, 1\]"),
        ({"block_ids": int64s(0, 8)}, r"block ids must be in 0..7; got 8"),
        ({"block_ids": int64s(0, -2)}, r"block ids must be in 0..7; got -2"),
        ({"addresses": int64s(4096, -5)}, r"addresses must be positive; got -5"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    good = {
        "block_ids": int64s(0, 1), "addresses": int64s(4096, 8192), "counts": [2], "direction": "d2h",
    }  # fmt: skip
    runs = BlockRuns(side_by_side())
    assert runs.describe(**good).count == 2
    with pytest.raises(ValueError, match=message):
        runs.describe(**{**good, **change})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((int64s(1), int64s(1, 2), int64s(1)), r"sources must be int64 \[1\]; got int64 \[2\]"),
        ((int64s(1), int64s(1), int64s(0)), r"sizes must be positive; got 0"),
        (
            (np.ones(1, np.uint64), int64s(1), int64s(1)),
            r"destinations must be int64 .* got uint64",
        ),
        (
            (np.ones(4, np.int64)[::2], int64s(1, 1), int64s(1, 1)),
            r"destinations must be contiguous",
        ),
    ],
)
def test_arrays_that_the_driver_could_not_read_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        Descriptors(*arrays).check_values()
