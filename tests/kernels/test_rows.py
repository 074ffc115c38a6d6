import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.rows import RowLayout, RowPart

NB, BS, H, D = 5, 4, 3, 8


def strided(shape, order, dtype=torch.bfloat16, gap=0):
    """Random bytes as a view of *shape* whose axes lie in memory in *order*, outermost first."""
    width = dtype.itemsize
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * shape[axis] + (gap if axis != order[-1] else 0)
    return (
        torch.randint(0, 256, (step * width,), dtype=torch.uint8)
        .view(dtype)
        .as_strided(shape, strides)
    )


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def row(layout, slot):
    """Collect a row by addresses, from the table as a kernel reads it."""
    block, token = divmod(slot, layout.block_size)
    out = torch.full((layout.row_bytes,), 0xA5, dtype=torch.uint8)
    for base, block_stride, token_stride, nbytes, offset in layout.table.tolist():
        address = base + block * block_stride + token * token_stride
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        out[offset : offset + nbytes] = torch.frombuffer(memory, dtype=torch.uint8)
    return out


def check_rows(layout, expected):
    """Compare every row with *expected*(block, token), a list of tensors in the row's order."""
    for slot in range(layout.num_slots):
        truth = torch.cat([as_bytes(t) for t in expected(*divmod(slot, layout.block_size))])
        torch.testing.assert_close(row(layout, slot), truth, rtol=0, atol=0)


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize(
    ("order", "pieces"), [((0, 2, 1, 3), 2 * H), ((0, 1, 2, 3), 2 * H), ((1, 0, 2, 3), 2 * H)]
)
def test_heads_first_in_every_physical_order(order, pieces, gap):
    views = [strided((NB, H, BS, 2 * D), order, gap=gap) for _ in range(2)]
    layout = RowLayout.from_views(views, "bhnc")
    assert len(layout.pieces) == 2 * pieces
    assert layout.row_bytes == 2 * 2 * H * D * 2
    check_rows(
        layout, lambda b, t: [part for v in views for part in (v[b, :, t, :D], v[b, :, t, D:])]
    )


def test_keys_may_be_wider_than_values():
    view = strided((NB, H, BS, 20), (0, 2, 1, 3))
    layout = RowLayout.from_views({"l": view}, "bhnc", head_dim=12)
    check_rows(layout, lambda b, t: [view[b, :, t, :12], view[b, :, t, 12:]])
    assert [part.shape for part in layout.parts] == [(H, 12), (H, 8)]


def test_one_head_is_one_piece():
    view = strided((NB, 1, BS, 2 * D), (0, 1, 2, 3))
    layout = RowLayout.from_views([view], "bhnc")
    assert len(layout.pieces) == 1
    check_rows(layout, lambda b, t: [view[b, 0, t]])


def test_packed_halves_of_a_block_and_head():
    view = strided((NB, H, BS, 2 * D), (0, 1, 2, 3))
    halves = view.view(NB, H, 2, BS, D)
    layout = RowLayout.from_views([view], "bhnc", is_packed=True)
    check_rows(layout, lambda b, t: [halves[b, :, 0, t], halves[b, :, 1, t]])


def test_keys_and_values_apart():
    first = [strided((2, NB, BS, H, D), (0, 1, 2, 3, 4)) for _ in range(2)]
    layout = RowLayout.from_views(first, "kv_first")
    assert [piece.nbytes for piece in layout.pieces] == [H * D * 2] * 4
    check_rows(layout, lambda b, t: [half[b, t] for view in first for half in view])

    second = strided((NB, 2, BS, H, D), (0, 1, 3, 2, 4), torch.float32)
    layout = RowLayout.from_views([second], "kv_second")
    assert [piece.nbytes for piece in layout.pieces] == [D * 4] * 2 * H
    check_rows(layout, lambda b, t: [second[b, 0, t], second[b, 1, t]])


def test_latents_of_several_widths():
    views = [
        strided((NB, BS, 576), (0, 1, 2)),
        strided((NB, 1, BS, 656), (0, 1, 2, 3), torch.uint8),
        strided((NB, 1, BS, 132), (0, 1, 2, 3), torch.uint8),
    ]
    layout = RowLayout.from_views(views, "latent")
    assert [piece.nbytes for piece in layout.pieces] == [1152, 656, 132]
    assert layout.alignment == 4
    check_rows(layout, lambda b, t: [v.reshape(NB, BS, -1)[b, t] for v in views])


def test_parts_say_what_the_bytes_are():
    views = [strided((2, NB, BS, H, D), (0, 1, 2, 3, 4)) for _ in range(2)]
    layout = RowLayout.from_views(views, "kv_first")
    nbytes = H * D * 2
    assert layout.parts == tuple(
        RowPart(name, layer, (H, D), torch.bfloat16, (2 * layer + i) * nbytes)
        for layer in range(2)
        for i, name in enumerate(("key", "value"))
    )
    assert (layout.num_blocks, layout.block_size, layout.num_slots) == (NB, BS, NB * BS)
    assert layout.tensors[1] is views[1]
    assert layout.alignment == 16
    (latent,) = RowLayout.from_views([strided((NB, BS, 9), (0, 1, 2))], "latent").parts
    assert latent == RowPart("latent", 0, (9,), torch.bfloat16, 0)


def test_layers_that_only_start_adjacent_stay_apart():
    whole = torch.randint(0, 256, (512,), dtype=torch.uint8)
    a = whole.as_strided((4, 2, 8), (64, 32, 1))
    for strides in ((64, 40, 1), (128, 32, 1)):
        b = whole.as_strided((4, 2, 8), strides, 8)
        layout = RowLayout.from_views([a, b], "latent")
        assert len(layout.pieces) == 2
        check_rows(layout, lambda block, token, b=b: [a[block, token], b[block, token]])
    b = whole.as_strided((4, 2, 8), (64, 32, 1), 8)
    assert len(RowLayout.from_views([a, b], "latent").pieces) == 1


GOOD = torch.zeros(NB, H, BS, 2 * D)
BAD = [
    pytest.param(torch.zeros(NB, BS, D), "bhnc", {}, r"must be \[NB, H, BS, C\]", id="3-D"),
    pytest.param(torch.zeros(NB, H, BS, 7), "bhnc", {}, r"\(half\)", id="odd-content"),
    pytest.param(GOOD, "bhnc", {"head_dim": 16}, r"\(16\)", id="no-values"),
    pytest.param(torch.zeros(NB + 1, H, BS, 16), "bhnc", {}, "5 blocks of 4 tok", id="blocks"),
    pytest.param(torch.zeros(NB, H, 8, 16), "bhnc", {}, "got 5 of 8 on cpu", id="block-size"),
    pytest.param(torch.zeros(NB, H, 16, BS).mT, "bhnc", {}, "numbers of a head", id="dims-apart"),
    pytest.param(torch.zeros(1, H, BS, 16).expand(NB, -1, -1, -1), "bhnc", {}, "overlap", id="x"),
    pytest.param(GOOD[:, :, :0], "bhnc", {}, "not be empty", id="empty"),
    pytest.param(torch.zeros(NB, H, BS, 16, device="meta"), "bhnc", {}, "memory", id="meta"),
    pytest.param(torch.zeros(NB, BS, H, 16).transpose(1, 2), "bhnc", {"is_packed": True}, "packed",
                 id="packed-by-token"),
    pytest.param(torch.zeros(NB, H, 1, 32)[..., ::2], "bhnc", {"is_packed": True}, "packed",
                 id="packed-strided"),
    pytest.param(GOOD, "bhnc", {"is_packed": True, "head_dim": 6}, "12 adjacent", id="packed-dim"),
]  # fmt: skip


@pytest.mark.parametrize(("view", "kind", "options", "message"), BAD)
def test_a_view_that_cannot_be_described_is_named(view, kind, options, message):
    RowLayout.from_views([GOOD], kind)
    views = {"bad": view} if options else {"good": GOOD, "bad": view}
    with pytest.raises(ValueError, match=rf"views\['bad'\].*{message}"):
        RowLayout.from_views(views, kind, **options)


def test_layers_that_share_bytes_are_named():
    with pytest.raises(ValueError, match=r"views\['b'\] must not share bytes with views\['a'\]"):
        RowLayout.from_views({"a": GOOD, "b": GOOD}, "bhnc")


def test_a_tensor_of_all_layers_is_not_taken_apart():
    with pytest.raises(ValueError, match="views must be a sequence of tensors"):
        RowLayout.from_views(torch.zeros(2, 4, 2, 8, 16), "bhnc")


def test_other_kinds_name_their_shape():
    for kind, shape in (
        ("kv_first", r"\[2, NB, BS, H, D\]"),
        ("kv_second", r"\[NB, 2, BS, H, D\]"),
        ("latent", r"\[NB, BS, C\] or \[NB, 1, BS, C\]"),
    ):
        with pytest.raises(ValueError, match=rf"views\[0\] must be {shape}"):
            RowLayout.from_views([torch.zeros(NB, H, BS, D)], kind)


def test_arguments_that_do_not_go_together():
    with pytest.raises(ValueError, match=r"kind must be one of bhnc, .*got 'nhd'"):
        RowLayout.from_views([GOOD], "nhd")
    with pytest.raises(ValueError, match="left to kind 'bhnc'; got 'latent'"):
        RowLayout.from_views([GOOD], "latent", head_dim=4)
    with pytest.raises(ValueError, match="views must be at least one tensor"):
        RowLayout.from_views([], "bhnc")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    order=st.permutations([0, 1, 2]),
    gap=st.integers(0, 3),
    layers=st.integers(1, 3),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32]),
)
def test_rows_of_random_layouts(sizes, order, gap, layers, dtype):
    blocks, heads, tokens, dim = sizes
    views = [
        strided((blocks, heads, tokens, 2 * dim), (*order, 3), dtype, gap) for _ in range(layers)
    ]
    layout = RowLayout.from_views(views, "bhnc")
    check_rows(
        layout, lambda b, t: [p for v in views for p in (v[b, :, t, :dim], v[b, :, t, dim:])]
    )
    pieces = layout.pieces
    ends = [piece.row_offset + piece.nbytes for piece in pieces]
    assert [piece.row_offset for piece in pieces] == [0, *ends[:-1]]
    assert ends[-1] == layout.row_bytes
