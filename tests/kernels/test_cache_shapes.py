import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.cache_shapes import Placement, layout_of_placements, layout_of_views
from kvferry.kernels.host import HostMover
from kvferry.kernels.layout import BlockLayout

from .layouts import (
    LAYOUTS,
    ORDERS,
    ROW_LAYOUTS,
    SIZES,
    as_bytes,
    block_bytes,
    five_axes,
    five_axes_placed,
    memory,
    same,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_block_is_what_torch_indexing_says(case):
    cache = case(CPU)
    for group, layout in enumerate(cache.layouts):
        for block in range(layout.num_blocks):
            truth = cache.expected(group, block)
            same(block_bytes(layout, block), truth)
            # by the byte views that the host mover and the twins use
            pages = zip(layout.tensors, layout.segments, strict=True)
            same(torch.cat([tensor[block, : s.nbytes] for tensor, s in pages]), truth)


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_host_mover_carries_every_layout_there_and_back(case):
    cache = case(CPU)
    before = [storage.clone() for storage in cache.storages]
    for group, layout in enumerate(cache.layouts):
        mover = HostMover(layout)
        for block in range(layout.num_blocks):
            part = torch.full((layout.part_bytes,), 0xA5, dtype=torch.uint8)
            mover.gather([block], 0, part.data_ptr())
            same(part[: layout.block_bytes], cache.expected(group, block))
            for tensor, s in zip(layout.tensors, layout.segments, strict=True):
                tensor[block, : s.nbytes] = 0
            mover.scatter(part.data_ptr(), 0, [block])
            same(cache.storages, before)


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_a_row_is_what_torch_indexing_says(case):
    cache = case(CPU)
    for slot in range(cache.rows.num_slots):
        block, token = divmod(slot, cache.rows.block_size)
        runs = [
            memory(p.base_address + block * p.block_stride + token * p.token_stride, p.nbytes)
            for p in cache.rows.pieces
        ]
        same(torch.cat(runs), cache.expected_row(slot))


L, H = SIZES["L"], SIZES["H"]
SEGMENTS = {"LBNHC": L, "LBHNC": L, "LHBNC": L * H, "BLNHC": 1, "BLHNC": 1, "BHLNC": 1}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [five_axes, five_axes_placed])
def test_adjacent_runs_are_one_segment(order, make):
    (layout,) = make(order)(CPU).layouts
    assert len(layout.segments) == SEGMENTS[order]


def test_from_views_and_from_the_engines_table_are_the_same():
    for order in ORDERS:
        tables = []
        for make in (five_axes, five_axes_placed):
            cache = make(order)(CPU)
            base = cache.storages[0].data_ptr()
            (layout,) = cache.layouts
            tables.append(
                [(s.base_address - base, s.block_stride, s.nbytes) for s in layout.segments]
            )
        assert tables[0] == tables[1]


def test_layers_of_a_block_major_cache_come_in_the_order_of_memory():
    whole = torch.arange(48, dtype=torch.uint8).view(4, 3, 4)
    layout = layout_of_views([whole[:, 2], whole[:, 0], whole[:, 1]])
    assert len(layout.segments) == 1
    same(block_bytes(layout, 2), whole[2].flatten())
    # a layer-major cache keeps the group's order
    pages = whole.view(3, 4, 4)
    layout = layout_of_views([pages[2], pages[0]])
    same(block_bytes(layout, 1), torch.cat([pages[2, 1], pages[0, 1]]))


def test_layers_that_only_look_adjacent_stay_apart():
    """In a cache of two blocks, layer 1 starts where layer 0's second block ends."""
    whole = torch.arange(16, dtype=torch.uint8).view(2, 2, 4)
    layout = layout_of_views(list(whole))
    assert [segment.nbytes for segment in layout.segments] == [4, 4]
    same(block_bytes(layout, 1), torch.cat([whole[0, 1], whole[1, 1]]))


def test_the_layout_is_that_of_from_tensors():
    """One order of bytes, whichever door a cache comes in by."""
    pages = [torch.zeros(6, 48, dtype=torch.uint8) for _ in range(3)]
    made = layout_of_views(pages, blocks_per_chunk=4)
    read = BlockLayout.from_tensors(pages, [48] * 3, 4)
    assert made.segments == read.segments
    assert (made.part_bytes, made.blocks_per_chunk) == (read.part_bytes, 4)


def test_a_layout_keeps_the_cache_alive():
    view = torch.full((2, 16), 7, dtype=torch.uint8)
    layout = layout_of_views([view])
    address = view.data_ptr()
    del view
    assert layout.tensors[0].data_ptr() == address
    assert (layout.tensors[0] == 7).all()


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


ROW = zeros(64)
BAD_VIEWS = [
    pytest.param([zeros(4, 8), "x"], {}, r"views\[1\] must be a tensor; got str", id="no-tensor"),
    pytest.param([], {}, "at least one tensor", id="none"),
    pytest.param({"l0": zeros(0, 8)}, {}, r"views\['l0'\] must not be empty", id="empty"),
    pytest.param({"l0": zeros(4, 8).to("meta")}, {}, r"views\['l0'\].*memory", id="meta"),
    pytest.param({"a": zeros(4, 8), "b": zeros(5, 8)}, {}, r"views\['b'\].*multiple of 4", id="n"),
    pytest.param([zeros(4, 8)], {"num_blocks": 3}, r"views\[0\].*multiple of 3", id="ratio"),
    pytest.param([zeros(4, 8)], {"num_blocks": 0}, r"views\[0\].*multiple of 0", id="no-blocks"),
    pytest.param([zeros(4, 8)], {"block_axis": 2}, r"views\[0\] must have an axis 2", id="axis"),
    pytest.param([zeros(4, 8)], {"block_axis": [0, 0]}, "each of 1 views; got 2", id="axes"),
    pytest.param([zeros(4, 8)], {"blocks_per_chunk": 0}, "at least 1; got 0", id="chunk"),
    pytest.param([zeros(1, 8).expand(4, 8)], {}, r"views\[0\] must not overlap itself", id="same"),
    pytest.param([zeros(4, 1).expand(4, 8)], {}, r"views\[0\] must not overlap itself", id="wide"),
    pytest.param([ROW.as_strided((4, 8), (4, 1))], {}, "not overlap itself", id="overlapping"),
    pytest.param(
        {"l0": ROW.view(4, 16), "l1": ROW.view(4, 16)}, {}, r"views\['l1'\].*share.*views\['l0'\]",
        id="the-same-twice",
    ),
    pytest.param(
        [ROW.as_strided((4, 8), (8, 1)), ROW.as_strided((4, 8), (8, 1), 31)], {},
        "distance 31", id="last-block-meets-first",
    ),
    pytest.param(
        [ROW.as_strided((3, 4), (16, 1)), ROW.as_strided((3, 2), (7, 1), 5)], {},
        "must not share bytes", id="other-strides",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("views", "options", "message"), BAD_VIEWS)
def test_views_that_cannot_be_described_are_named(views, options, message):
    with pytest.raises(ValueError, match=message):
        layout_of_views(views, **options)


def slices_of_a_buffer(*boxes):
    """Return views [NB, nbytes] of one buffer, each with a storage of its own."""
    buffer = bytearray(range(128))
    return [
        torch.frombuffer(buffer, dtype=torch.uint8, offset=start).as_strided(shape, (stride, 1))
        for start, stride, shape in boxes
    ]


def test_storages_that_happen_to_be_adjacent_stay_apart():
    a, b = slices_of_a_buffer((0, 16, (4, 4)), (4, 16, (4, 4)))
    for views in ([a, b], [b, a]):
        layout = layout_of_views(views)
        assert [s.nbytes for s in layout.segments] == [4, 4]
        same(block_bytes(layout, 3), torch.cat([view[3] for view in views]))


def test_runs_with_other_strides_keep_the_groups_order_and_stay_apart():
    whole = torch.arange(128, dtype=torch.uint8)
    a, b = whole.as_strided((2, 4), (16, 1)), whole.as_strided((2, 4), (32, 1), 4)
    for views in ([a, b], [b, a]):
        layout = layout_of_views(views)
        assert [s.nbytes for s in layout.segments] == [4, 4]
        same(block_bytes(layout, 1), torch.cat([view[1] for view in views]))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_two_views_are_refused_just_when_they_share_a_byte(data):
    num_blocks = data.draw(st.integers(1, 4))
    sizes = [data.draw(st.integers(1, 5)) for _ in range(2)]
    strides = [size + data.draw(st.integers(0, 6)) for size in sizes]
    if data.draw(st.booleans()):
        strides = [max(strides)] * 2
    views, taken = [], []
    for nbytes, stride in zip(sizes, strides, strict=True):
        box = (num_blocks, nbytes), (stride, 1), data.draw(st.integers(0, 20))
        views.append(ROW.as_strided(*box))
        taken.append(set(torch.arange(ROW.numel()).as_strided(*box).flatten().tolist()))
    if taken[0] & taken[1]:
        with pytest.raises(ValueError, match=r"must not share bytes"):
            layout_of_views(views)
    else:
        assert layout_of_views(views).block_bytes == sum(view.shape[1] for view in views)


def test_gaps_inside_a_page_are_left_out():
    """Elements 0, 1, 3, 4 of every five: runs nest tightly, yet share nothing."""
    view = torch.arange(64, dtype=torch.uint8).as_strided((3, 2, 2), (5, 3, 1))
    layout = layout_of_views([view])
    assert [s.nbytes for s in layout.segments] == [2, 2]
    same(block_bytes(layout, 2), torch.tensor([10, 11, 13, 14], dtype=torch.uint8))


def test_views_between_each_other_are_told_from_views_that_meet():
    comb = [ROW.as_strided((4, 8), (16, 1)), ROW.as_strided((4, 8), (16, 1), 8)]
    assert len(layout_of_views(comb).segments) == 1
    apart = [ROW.as_strided((3, 4), (16, 1)), ROW.as_strided((3, 2), (16, 1), 5)]
    assert len(layout_of_views(apart).segments) == 2
    other = [ROW.as_strided((3, 4), (16, 1)), ROW.as_strided((3, 2), (18, 1), 5)]
    assert len(layout_of_views(other).segments) == 2


PLACED = Placement(num_layers=2, page_bytes=8, layer_stride=32, block_stride=8)
BAD_PLACEMENTS = [
    pytest.param(ROW.view(8, 8), {}, "storage must be contiguous, of one axis", id="2-D"),
    pytest.param(ROW[::2], {}, "storage must be contiguous", id="strided"),
    pytest.param(ROW, {"offset": 1}, r"placements\['x'\] must end within 64 bytes.*got 65", id="e"),
    pytest.param(ROW, {"num_layers": 3}, "got 96", id="layers"),
    pytest.param(ROW, {"offset": -8}, "no negative distance", id="negative"),
    pytest.param(ROW, {"page_bytes": 0}, "positive counts", id="page"),
    pytest.param(ROW, {"num_runs": 3}, "page of whole runs", id="runs"),
    pytest.param(ROW, {"layer_stride": 8}, r"'x'\] layer 1 must not share.*layer 0", id="layer"),
    pytest.param(ROW, {"block_stride": 4}, r"'x'\] layer 0 must not overlap itself", id="block"),
]


@pytest.mark.parametrize(("storage", "changes", "message"), BAD_PLACEMENTS)
def test_placements_that_cannot_be_described_are_named(storage, changes, message):
    good = {name: getattr(PLACED, name) for name in Placement.__slots__}
    layout_of_placements(ROW, {"x": PLACED}, 4)
    with pytest.raises(ValueError, match=message):
        layout_of_placements(storage, {"x": Placement(**good | changes)}, 4)


def test_placements_need_layers_and_blocks():
    with pytest.raises(ValueError, match="at least one layer; got none"):
        layout_of_placements(ROW, [], 4)
    with pytest.raises(ValueError, match="num_blocks must be at least 1; got 0"):
        layout_of_placements(ROW, [PLACED], 0)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_layouts_carry_each_byte_once(data):
    """A cache of any shape, axis order and padding: blocks are disjoint, and are all of its bytes."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]))
    ratio = data.draw(st.sampled_from([1, 2, 3]))
    layers = data.draw(st.integers(1, 3))
    shape[axis] *= ratio
    strides, step = [0] * len(shape), 1
    for i in reversed(order):
        strides[i] = step
        step = step * shape[i] + data.draw(st.integers(0, 2))
    whole = torch.arange(layers * step * dtype.itemsize, dtype=torch.int32)
    storage = (whole % 251).to(torch.uint8).view(dtype)
    views = [storage.as_strided(shape, strides, i * step) for i in range(layers)]
    num_blocks = shape[axis] // ratio

    layout = layout_of_views(views, num_blocks=num_blocks, block_axis=axis)

    seen = torch.zeros(whole.numel(), dtype=torch.int32)
    for block in range(num_blocks):
        expected = [
            # the small blocks, then the other axes, in the order of memory
            as_bytes(v.narrow(axis, block * ratio, ratio).permute(order))
            for v in views
        ]
        actual = block_bytes(layout, block)
        same(actual, torch.cat(expected))
        for s in layout.segments:
            start = s.base_address + block * s.block_stride - storage.data_ptr()
            seen[start : start + s.nbytes] += 1
    assert int(seen.max()) == 1
    assert int(seen.sum()) == sum(v.numel() for v in views) * dtype.itemsize
