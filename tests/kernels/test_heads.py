"""Blobs written by some ranks and read by others, whatever the order of either's cache."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvferry.kernels import heads, reference_heads
from kvferry.kernels.head_boxes import EVERY_HEAD, HeadRun, fold
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.head_spans import heads_of_rank
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.rows import RowLayout

from .blobs import Blobs
from .layouts import BF16, GUARD, ROW_LAYOUTS, Memory, as_bytes, latent, latent_and_indexer, same

CPU = torch.device("cpu")
LAYERS, BLOCKS, HEADS, TOKENS, DIM = 2, 5, 8, 4, 24
"""Of the model: heads of 48 bytes, so that no size of a run is a power of two."""


class Model:
    """Keys and values of all heads, ``[L, 2, NB, H, BS, D]``, and caches of ranks that hold some."""

    def __init__(self, device, seed=0):
        self.device = device
        shape = LAYERS, 2, BLOCKS, HEADS, TOKENS, DIM
        self.whole = Memory(device, seed).tensor(*shape)

    def blob(self, block):
        """Return the canonical bytes of a block: segment, head, token, dim."""
        return as_bytes(self.whole[:, :, block])

    def rank(self, order, tp_size, tp_rank, *, is_empty=False):
        """Return a rank's rows, its runs, and a view of its cache like ``whole`` with its heads."""
        first, count = heads_of_rank(HEADS, tp_size, tp_rank)
        mine = self.whole[:, :, :, first : first + count]
        sizes = dict(zip("LKBHND", mine.shape, strict=True))
        whole = Memory(self.device, 9).tensor(*(sizes[axis] for axis in order))
        view = whole.permute(*(order.index(axis) for axis in "LKBHND"))
        if not is_empty:
            view.copy_(mine)
        # [2, NB, BS, H, D] views of each layer
        rows = RowLayout.from_views([layer.permute(0, 1, 3, 2, 4) for layer in view], "kv_first")
        runs = HeadRuns.from_rows(rows, total_heads=HEADS, head_first=first)
        return runs, view, mine


# token by token or head by head; K and V apart, in a page, or side by side; all layers in a block
ORDERS = ["LKBNHD", "LKBHND", "LBKNHD", "LBNHKD", "LBHKND", "LBHNKD", "BLKNHD", "BHLKND"]


@pytest.mark.parametrize("order", ORDERS)
def test_written_by_four_ranks_read_by_any_number(order, device, poisoned, interpreted):
    launches = interpreted(heads, "_move_heads_kernel")
    model = Model(device)
    block_ids = [3, -1, 0]
    blobs = Blobs(poisoned, 3, model.whole[:, :, 0].numel() * 2, device)
    for tp_rank in range(4):
        runs, _, _ = model.rank(order, 4, tp_rank)
        heads.gather_heads(runs, blobs.entries(block_ids))
    for block, row in zip(block_ids, blobs.rows, strict=True):
        same(row, model.blob(block) if block >= 0 else torch.full_like(row, 0xA5))
    assert (blobs.whole[:GUARD] == 0xA5).all()
    assert (blobs.whole[-GUARD:] == 0xA5).all()
    assert len(launches) == 4
    for tp_size, tp_rank in [(1, 0), (2, 1), (8, 5), (16, 15)]:
        runs, view, mine = model.rank(order, tp_size, tp_rank, is_empty=True)
        before = view.clone()
        heads.scatter_heads(runs, blobs.entries(block_ids))
        for block in range(BLOCKS):
            expected = mine if block in block_ids else before
            same(as_bytes(view[:, :, block]), as_bytes(expected[:, :, block]))
    assert len(launches) == 8


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_head_range_moves_these_heads_only(tp_rank, device, poisoned, interpreted):
    interpreted(heads, "_move_heads_kernel")
    model = Model(device)
    runs, view, _ = model.rank("LBNHKD", 2, tp_rank)
    blobs = Blobs(poisoned, 1, runs.block_bytes, device)
    heads.gather_heads(runs, blobs.entries([2]), head_first=3, head_count=3)
    by_head = blobs.rows[0].view(2 * LAYERS, HEADS, -1)
    wanted = model.blob(2).view(2 * LAYERS, HEADS, -1)
    held = {3} if tp_rank == 0 else {4, 5}
    for head in range(HEADS):
        is_moved = head in held
        same(by_head[:, head], wanted[:, head] if is_moved else torch.full_like(wanted[:, 0], 0xA5))

    before = view.clone()
    blobs.rows[0] = ~model.blob(2)
    heads.scatter_heads(runs, blobs.entries([2]), head_first=3)
    changed = (as_bytes(view) != as_bytes(before)).view(2 * LAYERS, BLOCKS, 4, -1).any(-1)
    first = 4 * tp_rank
    expected = torch.zeros_like(changed)
    expected[:, 2] = torch.tensor([first + head >= 3 for head in range(4)])
    same(changed, expected)


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_every_layout_against_the_twin(case, device, poisoned, interpreted):
    launches = interpreted(heads, "_move_heads_kernel")
    cache, twin = case(device), case(device)
    runs, twin_runs = HeadRuns.from_rows(cache.rows), HeadRuns.from_rows(twin.rows)
    last = cache.rows.num_blocks - 1
    block_ids = [last, -1, 0] if last else [0, -1]
    blobs, expected = (Blobs(poisoned, len(block_ids), runs.block_bytes, device) for _ in range(2))
    heads.gather_heads(runs, blobs.entries(block_ids))
    reference_heads.gather_heads(twin_runs, block_ids, expected.rows)
    same(blobs.whole, expected.whole)
    # the blob holds every byte of the block's rows
    block_rows = [cache.expected_row(slot) for slot in range(cache.rows.block_size)]
    ordered = blobs.rows[block_ids.index(0)].sort().values
    same(ordered, torch.cat(block_rows).sort().values)

    for row in blobs.rows:
        row.copy_(row.flip(0))
    heads.scatter_heads(runs, blobs.entries(block_ids), max_sms=2)
    reference_heads.scatter_heads(twin_runs, block_ids, blobs.rows)
    for storage, other in zip(cache.storages, twin.storages, strict=True):
        same(storage, other)
    assert len(launches) == 2


def test_a_latent_is_in_every_head_range_and_the_same_on_every_rank(device, poisoned, interpreted):
    interpreted(heads, "_move_heads_kernel")
    cache = latent_and_indexer(is_block_major=True)(device)
    runs = HeadRuns.from_rows(cache.rows)
    assert runs.total_heads is None
    assert {run.head for run in runs.runs} == {EVERY_HEAD}
    blobs = Blobs(poisoned, 1, runs.block_bytes, device)
    heads.gather_heads(runs, blobs.entries([4]))
    same(blobs.rows[0], torch.cat([as_bytes(view[4]) for view in cache.rows.tensors]))


def test_one_head_may_be_less_aligned_than_all_together(device, poisoned, interpreted):
    interpreted(heads, "_move_heads_kernel")
    # heads of 24 bytes, head by head: a page of four is 96 bytes in a row
    whole = Memory(device).tensor(2, BLOCKS, 4, 3, 4)
    rows = RowLayout.from_views([whole.transpose(2, 3)], "kv_first")
    runs = HeadRuns.from_rows(rows)
    assert (runs.alignment, runs.tiles(1024).lane_bytes) == (16, 16)
    assert runs.tiles(1024, 1, 1).lane_bytes == 8
    blobs = Blobs(poisoned, 1, runs.block_bytes, device)
    heads.gather_heads(runs, blobs.entries([3]), head_first=1, head_count=1)
    by_head = blobs.rows[0].view(2, 4, 24)
    same(by_head[:, 1], as_bytes(whole[:, 3, 1]).view(2, 24))
    assert (by_head[:, [0, 2, 3]] == 0xA5).all()
    heads.gather_heads(runs, blobs.entries([3]))
    same(blobs.rows[0], as_bytes(whole[:, 3]))


def test_pages_in_order_move_in_wide_words_whatever_their_rows():
    """A page of 64 rows of 132 bytes is as good as any of 8448."""
    assert HeadRuns.from_rows(latent((5, 1, 64, 132), torch.uint8)(CPU).rows).alignment == 16


@pytest.mark.parametrize("move", [heads.gather_heads, heads.scatter_heads])
def test_nothing_to_move(move, device, poisoned, interpreted):
    launches = interpreted(heads, "_move_heads_kernel")
    cache = latent((5, 1, 8, 576), BF16)(device)
    before = [storage.clone() for storage in cache.storages]
    runs = HeadRuns.from_rows(cache.rows)
    move(runs, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert launches == []
    blobs = Blobs(poisoned, 3, runs.block_bytes, device)
    move(runs, blobs.entries([-1, -1, -1]))
    assert len(launches) == 1
    assert (blobs.whole == 0xA5).all()
    for storage, old in zip(cache.storages, before, strict=True):
        same(storage, old)


def test_blocks_beyond_two_gigabytes(device, poisoned, interpreted):
    interpreted(heads, "_move_heads_kernel")
    # memory that is not touched is not used
    whole = torch.empty(5 << 29, dtype=torch.uint8, device=device)
    view = whole[: len(whole) // 10496 * 10496].view(-1, 16, 656)
    runs = HeadRuns.from_rows(RowLayout.from_views([view], "latent"))
    last = len(view) - 1
    view[last] = torch.arange(10496, device=device).view(16, 656).to(torch.uint8)
    assert view[last].data_ptr() - view.data_ptr() > 1 << 31
    blobs = Blobs(poisoned, 1, runs.block_bytes, device)
    heads.gather_heads(runs, blobs.entries([last]))
    same(blobs.rows[0], as_bytes(view[last]))
    blobs.rows[0] = ~blobs.rows[0]
    heads.scatter_heads(runs, blobs.entries([last]))
    same(as_bytes(view[last]), blobs.rows[0])


@dataclass
class Run:
    """vLLM's CopyRun, by its fields."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass
class Mapping:
    """vLLM's CanonicalPageMapping, by the fields that are read."""

    canonical_page_size_bytes: int
    runs: tuple


def test_copy_runs_move_as_they_say(device, poisoned, interpreted):
    interpreted(heads, "_move_heads_kernel")
    memory = Memory(device)
    pages = [memory.tensor(BLOCKS, size, dtype=torch.uint8) for size in (96, 80)]
    layout = BlockLayout.from_tensors(pages, [96, 80], 1)
    mappings = [
        # token by token: two of six heads of eight bytes; then something opaque
        Mapping(6 * 6 * 8, (Run(0, 16, 16, 6, 16, 48),)),
        Mapping(160, (Run(0, 80, 40, 1, 40, 40), Run(40, 120, 40, 1, 40, 40))),
    ]
    runs = HeadRuns.from_copy_runs(layout, mappings)
    assert runs.block_bytes == 288 + 160
    blobs = Blobs(poisoned, 1, runs.block_bytes, device)
    heads.gather_heads(runs, blobs.entries([3]))
    expected = torch.full((448,), 0xA5, dtype=torch.uint8, device=device)
    expected[:288].view(6, 48)[:, 16:32] = pages[0][3].view(6, 16)
    expected[368:] = pages[1][3]
    same(blobs.rows[0], expected)
    with pytest.raises(ValueError, match="heads must be left out where runs do not name them"):
        heads.gather_heads(runs, blobs.entries([3]), head_count=1)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(0, 0, 16, 7, 16, 16), "page of 96 bytes"),
        (Run(0, 96, 16, 2, 16, -112), "canonical page of 192 bytes"),
        (Run(-1, 0, 16, 1, 16, 16), "page of 96 bytes"),
        (Run(0, 0, 0, 1, 16, 16), "at least one byte"),
        (Run(0, 0, 16, 0, 16, 16), "at least one byte"),
    ],
)
def test_copy_runs_that_leave_their_page_are_refused(run, message):
    layout = BlockLayout.from_tensors([torch.zeros(2, 96, dtype=torch.uint8)], [96], 1)
    with pytest.raises(ValueError, match=message):
        HeadRuns.from_copy_runs(layout, [Mapping(192, (run,))])
    with pytest.raises(ValueError, match="mappings must be 1"):
        HeadRuns.from_copy_runs(layout, [])


@pytest.mark.parametrize(
    ("first", "count"), [(-1, 1), (0, 9), (8, 1), (3, 6), (0, -1), (9, None), (1, -1)]
)
def test_heads_that_do_not_exist_are_refused(first, count):
    runs, _, _ = Model(CPU).rank("LBHNKD", 2, 1)
    with pytest.raises(ValueError, match=r"heads must be in 0\.\.7"):
        runs.within(first, count)
    with pytest.raises(ValueError, match=r"heads must be in 0\.\.7"):
        runs.tiles(1024, first, count)


def test_ranks_share_heads():
    assert [heads_of_rank(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [heads_of_rank(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    for wrong in [(8, 3, 0), (3, 8, 0), (8, 4, 4), (8, 4, -1), (0, 1, 0), (8, 0, 0)]:
        with pytest.raises(ValueError, match="must be"):
            heads_of_rank(*wrong)


def test_a_share_outside_the_model_is_refused():
    rows = RowLayout.from_views([torch.zeros(2, 5, 4, 2, 8)], "kv_first")
    for total, first in [(1, 0), (8, 7), (8, -1), (None, 1)]:
        with pytest.raises(ValueError, match="head_first must be in"):
            HeadRuns.from_rows(rows, total_heads=total, head_first=first)
    latents = RowLayout.from_views([torch.zeros(5, 4, 8)], "latent")
    with pytest.raises(ValueError, match="a latent must be given no heads"):
        HeadRuns.from_rows(latents, total_heads=8, head_first=1)


def test_a_page_in_the_blob_s_own_order_is_one_run():
    runs, _, _ = Model(CPU).rank("LKBHND", 1, 0)
    # a page for each of K and V of each layer, at equal distances on both sides
    (box,) = fold(runs.runs)
    assert (box.groups, box.run.num_fragments) == (1, 2 * LAYERS)
    assert box.run.fragment_bytes == HEADS * TOKENS * DIM * 2


def moved(runs):
    """Return the (address, offset) of every byte that runs move, with the block stride."""
    return sorted(
        (r.base_address + i * r.local_stride + b, r.blob_offset + i * r.blob_stride + b, r.block_stride)
        for r in runs
        for i in range(r.num_fragments)
        for b in range(r.fragment_bytes)
    )  # fmt: skip


some_runs = st.builds(
    HeadRun,
    base_address=st.integers(0, 40).map(lambda n: 8 * n),
    block_stride=st.sampled_from([512, 1024]),
    blob_offset=st.integers(0, 40).map(lambda n: 8 * n),
    fragment_bytes=st.sampled_from([8, 16, 24]),
    num_fragments=st.integers(1, 6),
    local_stride=st.sampled_from([8, 16, 24, 64]),
    blob_stride=st.sampled_from([8, 16, 24, 48]),
)


@st.composite
def repeated_runs(draw):
    """Runs of which some follow their neighbour at a distance, as heads do."""
    runs = []
    for run in draw(st.lists(some_runs, max_size=4)):
        local, blob = draw(st.sampled_from([8, 24, 96])), draw(st.sampled_from([8, 24, 192]))
        for i in range(draw(st.integers(1, 4))):
            fields = {name: getattr(run, name) for name in HeadRun.__dataclass_fields__}
            fields["base_address"] += i * local
            fields["blob_offset"] += i * blob
            runs.append(HeadRun(**fields))
    return runs


@settings(max_examples=200, deadline=None)
@given(runs=repeated_runs())
def test_folding_moves_the_same_bytes(runs):
    boxes = fold(runs)
    assert len({(box.run.fragment_bytes, box.run.num_fragments) for box in boxes}) <= 1
    unfolded = []
    for box in boxes:
        for group in range(box.groups):
            fields = {name: getattr(box.run, name) for name in HeadRun.__dataclass_fields__}
            fields["base_address"] += group * box.local_stride
            fields["blob_offset"] += group * box.blob_stride
            unfolded.append(HeadRun(**fields))
    assert moved(unfolded) == moved(runs)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_round_trip_of_any_ranks(data, device, poisoned, interpreted):
    """What some ranks of one order wrote, ranks of another number and order read."""
    interpreted(heads, "_move_heads_kernel")
    model = Model(device, data.draw(st.integers(0, 99)))
    block = data.draw(st.integers(0, BLOCKS - 1))
    blobs = Blobs(poisoned, 1, model.whole[:, :, 0].numel() * 2, device)
    writers, readers = (data.draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2))
    order, other = (data.draw(st.permutations("LKBHN")) for _ in range(2))
    for tp_rank in range(writers):
        runs, _, _ = model.rank("".join(order) + "D", writers, tp_rank)
        heads.gather_heads(runs, blobs.entries([block]))
    same(blobs.rows[0], model.blob(block))
    tp_rank = data.draw(st.integers(0, readers - 1))
    runs, view, mine = model.rank("".join(other) + "D", readers, tp_rank, is_empty=True)
    heads.scatter_heads(runs, blobs.entries([block]))
    same(as_bytes(view[:, :, block]), as_bytes(mine[:, :, block]))
