"""Gather and scatter of blocks: the shipped kernel in Triton's interpreter against its twin, bit for bit."""

import itertools
import mmap

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvferry.kernels import block_copy, reference
from kvferry.kernels.block_copy import choose_shape
from kvferry.kernels.gather import gather_blocks
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.scatter import scatter_blocks
from kvferry.kernels.table import HOLE, LayoutTable, pack_entries

from .layouts import GUARD, LAYOUTS, Cache, same

CPU = torch.device("cpu")
POISON = 0xA5


@pytest.fixture
def launches(interpreted):
    return interpreted(block_copy, "_copy_blocks_kernel")


class Frames:
    """One frame per blob of poisoned or random bytes, guards around each; every entry's address."""

    def __init__(self, table, counts, ids, *, per_blob=2, fill=POISON, seed=3):
        self.ids = np.array(ids, np.int64)
        self.counts = counts
        blobs, places, offsets, end = [], [], [], GUARD
        for block_bytes, count in zip(table.block_bytes, counts, strict=True):
            start = end
            for entry in range(count):
                # the first chunk of a group starts in the middle of its frame
                place = (entry + (per_blob > 1)) % per_blob
                if not places or place == 0 or entry == 0:
                    blobs.append(blobs[-1] + 1 if blobs else 0)
                    start = end
                    end = start + -(-per_blob * block_bytes // 64) * 64 + GUARD
                else:
                    blobs.append(blobs[-1])
                places.append(place)
                offsets.append(start + place * block_bytes)
        self.num_blobs = blobs[-1] + 1 if blobs else 0
        generator = torch.Generator().manual_seed(seed)
        self.bytes = torch.full((end + 64,), fill or 0, dtype=torch.uint8)
        if fill is None:
            self.bytes.random_(0, 256, generator=generator)
        # 64 bytes aligned, as frames of an arena are
        shift = -self.bytes.data_ptr() % 64
        self.offsets = np.array(offsets, np.int64) + shift
        self.places, self.blobs = np.array(places, np.int64), np.array(blobs, np.int64)
        addresses = self.bytes.data_ptr() + self.offsets
        packed = pack_entries(table, self.ids, addresses, counts, self.blobs, self.places)
        self.entries = torch.from_numpy(packed)


def some_ids(layout, count, seed=0, *, distinct=True):
    """Return *count* ids: last block, a hole, then others; -1 where no block is left."""
    order = np.random.default_rng(seed).permutation(layout.num_blocks)
    order = [layout.num_blocks - 1, HOLE, *(i for i in order if i != layout.num_blocks - 1)]
    ids = (order if distinct else order * count)[:count]
    return ids + [HOLE] * (count - len(ids))


def check_gather(cache, counts, ids, launches, expect_launches=1, **options):
    table = LayoutTable.from_layouts(cache.layouts)
    frames, twin = Frames(table, counts, ids), Frames(table, counts, ids)
    before = [storage.clone() for storage in cache.storages]
    launches.clear()
    gather_blocks(table, frames.entries, counts, **options)
    assert len(launches) == expect_launches
    groups = np.repeat(np.arange(len(counts)), counts)
    for group, block, offset in zip(groups, ids, twin.offsets, strict=True):
        if block != HOLE:
            expected = cache.expected(int(group), int(block))
            twin.bytes[offset : offset + expected.numel()] = expected
    same(frames.bytes, twin.bytes)
    for storage, old in zip(cache.storages, before, strict=True):
        same(storage, old)


def check_scatter(make, counts, ids, launches, expect_launches=1, **options):
    cache, twin = make(CPU), make(CPU)
    table, twin_table = (LayoutTable.from_layouts(each.layouts) for each in (cache, twin))
    frames = Frames(table, counts, ids, fill=None)
    same_frames = Frames(twin_table, counts, ids, fill=None)
    launches.clear()
    scatter_blocks(table, frames.entries, counts, **options)
    assert len(launches) == expect_launches
    reference.scatter_blocks(twin_table, same_frames.entries, counts)
    for storage, expected in zip(cache.storages, twin.storages, strict=True):
        same(storage, expected)
    same(frames.bytes, same_frames.bytes)


@pytest.mark.parametrize("case", LAYOUTS)
def test_gather_every_layout(case, launches):
    cache = case(CPU)
    ids = [block for layout in cache.layouts for block in some_ids(layout, 3)]
    check_gather(cache, [3] * len(cache.layouts), ids, launches, max_sms=3)


@pytest.mark.parametrize("case", LAYOUTS)
def test_scatter_every_layout(case, launches):
    cache = case(CPU)
    # groups may share bytes: blocks of different numbers, so that no byte is written twice
    ids = [HOLE] * 2 * len(cache.layouts)
    for group, layout in enumerate(cache.layouts):
        ids[2 * group] = group % layout.num_blocks
    check_scatter(case, [2] * len(cache.layouts), ids, launches, max_sms=3)


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_twin_says_what_plain_indexing_says(case):
    cache = case(CPU)
    table = LayoutTable.from_layouts(cache.layouts)
    counts = [2] * len(cache.layouts)
    ids = [block for layout in cache.layouts for block in some_ids(layout, 2)]
    frames = Frames(table, counts, ids)
    wanted = frames.bytes.clone()
    groups = np.repeat(np.arange(len(counts)), counts)
    for group, block, offset in zip(groups, ids, frames.offsets, strict=True):
        if block != HOLE:
            expected = cache.expected(int(group), block)
            wanted[offset : offset + expected.numel()] = expected
    reference.gather_blocks(table, frames.entries, counts)
    same(frames.bytes, wanted)


def plain(pages, num_blocks, seed=0, padding=0, pieces=1):
    """Return a maker of one group per list of pages, each segment with a storage of its own."""

    def make(device):
        generator = torch.Generator().manual_seed(seed)
        layouts, storages, blocks = [], [], []
        for group in pages if isinstance(pages[0], list) else [pages]:
            wholes = [
                torch.randint(
                    0, 256, (num_blocks * (page + padding) + 2 * GUARD,), dtype=torch.uint8,
                    generator=generator,
                )
                for page in group
            ]  # fmt: skip
            views = [
                whole.as_strided((num_blocks, page), (page + padding, 1), GUARD)
                for whole, page in zip(wholes, group, strict=True)
            ]
            layouts.append(BlockLayout.from_tensors(views, group, 1))
            storages += wholes
            blocks.append(lambda block, views=views: [view[block] for view in views])
        return Cache(layouts, storages, blocks)

    return make


@pytest.mark.parametrize(
    ("pages", "num_blocks", "counts", "ids"),
    [
        pytest.param([4096, 4096], 4, [1], [3], id="one-block"),
        pytest.param([[4096], [2048]], 4, [0, 2], [1, 0], id="a-group-without-blocks"),
        pytest.param([4096], 4, [3], [HOLE] * 3, id="all-holes"),
        pytest.param([2048, 48, 16], 9, [7], [8, 0, 3, HOLE, 5, 1, 2], id="seven-blocks"),
        pytest.param([8 * 132, 8 * 656], 5, [4], [4, 4, 0, 4], id="repeated-ids"),
        pytest.param([1, 3, 577], 7, [5], [6, 0, 2, 2, HOLE], id="single-bytes"),
        pytest.param([70000], 3, [2], [2, 0], id="five-tiles-and-a-rest"),
        pytest.param([[16], [48], [1024], [16]], 3, [1, 2, 0, 3], [0, 1, 2, 2, 1, 0], id="groups"),
    ],
)
def test_gather_odd_sizes(pages, num_blocks, counts, ids, launches):
    check_gather(plain(pages, num_blocks)(CPU), counts, ids, launches, max_sms=4)


@pytest.mark.parametrize("padding", [0, 16, 40, 1])
def test_padded_strides(padding, launches):
    make = plain([4128, 48], 5, padding=padding)
    check_gather(make(CPU), [3], [4, 0, 2], launches, max_sms=2)
    check_scatter(make, [3], [4, 0, 2], launches, max_sms=2)


def test_no_blocks_are_no_launch(launches):
    check_gather(plain([64], 2)(CPU), [0], [], launches, expect_launches=0)
    check_scatter(plain([64], 2), [0], [], launches, expect_launches=0)


@pytest.mark.parametrize("max_sms", [1, 2, 5, 64])
def test_programs_within_the_cap_share_the_work(max_sms, launches):
    make = plain([[2048, 1500], [100, 2048]], 6)
    check_gather(make(CPU), [3, 4], [0, 5, HOLE, 1, 2, 3, 4], launches, max_sms=max_sms)
    (grid,) = launches
    # two tiles a block in both groups
    assert grid == (min(max_sms, 14),)


def test_all_groups_and_layers_are_one_launch(launches):
    make = plain([[512] * 12, [256] * 5, [48] * 3], 4)
    check_gather(make(CPU), [2, 1, 2], [3, 0, 1, 2, 3], launches)
    check_scatter(make, [2, 1, 2], [3, 0, 1, 2, 3], launches)


def test_offsets_over_two_gibibytes(launches):
    # a sparse file: only the pages that are touched take memory
    stride, num_blocks = (1 << 31) + 4096, 3
    with mmap.mmap(-1, num_blocks * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        view = whole.as_strided((num_blocks, 4096), (stride, 1))
        pattern = torch.arange(4096, dtype=torch.int64)
        for block in range(num_blocks):
            view[block] = ((pattern * (block + 3)) % 251).to(torch.uint8)
        layout = BlockLayout.from_tensors([view], [4096], 1)
        table = LayoutTable.from_layouts([layout])
        frames = Frames(table, [2], [2, 1])
        gather_blocks(table, frames.entries, [2])
        for block, offset in zip([2, 1], frames.offsets, strict=True):
            same(frames.bytes[offset : offset + 4096], view[block])
        frames.bytes.fill_(0x5A)
        scatter_blocks(table, frames.entries, [2])
        assert bool((view[1:] == 0x5A).all())
        same(view[0], ((pattern * 3) % 251).to(torch.uint8))
        assert len(launches) == 2
        del whole, view, layout, table


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_round_trip_of_random_layouts(data, launches):
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 16, 16, 16]))
    groups = data.draw(
        st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    num_blocks = data.draw(st.integers(1, 6))
    padding = data.draw(st.sampled_from([0, 1, 3])) * unit
    make = plain(
        [[pages * unit for pages in group] for group in groups], num_blocks, padding=padding
    )
    counts = [data.draw(st.integers(0, num_blocks)) for _ in groups]
    ids = [
        data.draw(st.sampled_from([block, block, block, HOLE]))
        for count in counts
        for block in data.draw(st.permutations(range(num_blocks)))[:count]
    ]
    cache = make(CPU)
    table = LayoutTable.from_layouts(cache.layouts)
    frames = Frames(table, counts, ids, per_blob=data.draw(st.integers(1, 3)))
    before = [storage.clone() for storage in cache.storages]
    options = {
        "max_sms": data.draw(st.integers(1, 9)),
        "bytes_in_flight": 1 << data.draw(st.integers(0, 18)),
    }
    gather_blocks(table, frames.entries, counts, **options)
    groups_of = np.repeat(np.arange(len(counts)), counts)
    for group, block in zip(groups_of, ids, strict=True):
        if block != HOLE:
            for segment in cache.blocks[group](block):
                segment.fill_(POISON)
    scatter_blocks(table, frames.entries, counts, **options)
    for storage, old in zip(cache.storages, before, strict=True):
        same(storage, old)


def test_a_launch_keeps_to_its_budgets():
    for alignment, largest, max_sms, budget in itertools.product(
        [1, 2, 4, 8, 16],
        [1, 1000, 8448, 65536, 1 << 20],
        [1, 3, 16, 132],
        [1, 4096, 1 << 18, 1 << 23],
    ):
        shape = choose_shape(alignment, largest, max_sms, budget)
        smallest = choose_shape(alignment, 1, 1, 1).tile_bytes
        assert 1 <= shape.programs <= max_sms
        assert shape.programs * shape.tile_bytes <= max(budget, smallest)
        # never more than one step above what the largest segment fills
        assert shape.tile_bytes < max(2 * largest, smallest + 1)
        assert shape.num_warps in (1, 2, 4, 8, 16, 32)


def test_more_tiles_than_the_kernel_counts_are_refused(launches):
    cache = torch.zeros(4, 1 << 20, dtype=torch.uint8)
    table = LayoutTable.from_layouts([BlockLayout.from_tensors([cache], [1 << 20], 1)])
    entries = torch.full((1, 2), -1, dtype=torch.int64)
    with pytest.raises(ValueError, match="less than 2147483648 tiles"):
        gather_blocks(table, entries, [1 << 27])
    assert not launches
