import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.rows import RowLayout
from kvferry.kvops.model_kv import model_kv

L, NB, BS, H, D = 3, 5, 4, 4, 8
DTYPES = [torch.bfloat16, torch.float16, torch.uint8, torch.float32]


def random(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def same(actual, expected):
    """Compare bit for bit: random bytes hold numbers that are not equal to themselves."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    as_bytes = [t.contiguous().view(torch.uint8) for t in (actual, expected)]
    torch.testing.assert_close(*as_bytes, rtol=0, atol=0)


def heads_first(dtype=torch.bfloat16, dim=D, seed=0):
    """vLLM's [NB, H, BS, C] and each token's K and V, ``[slots, L, H, D]``."""
    views = [random(NB, H, BS, 2 * dim, dtype=dtype, seed=seed + i) for i in range(L)]
    whole = torch.stack([v.transpose(1, 2).flatten(0, 1) for v in views], dim=1)
    return RowLayout.from_views(views, "bhnc"), whole[..., :dim], whole[..., dim:]


def packed(dtype=torch.bfloat16):
    """The CPU's K of a head, then V of a head."""
    halves = [random(NB, H, 2, BS, D, dtype=dtype, seed=i) for i in range(L)]
    views = [half.view(NB, H, BS, 2 * D) for half in halves]
    parts = [
        torch.stack([half[:, :, i].transpose(1, 2).flatten(0, 1) for half in halves], dim=1)
        for i in range(2)
    ]
    return RowLayout.from_views(views, "bhnc", is_packed=True), *parts


def halves(kind):
    def case(dtype=torch.bfloat16):
        axis = 0 if kind == "kv_first" else 1
        shape = (2, NB, BS, H, D) if axis == 0 else (NB, 2, BS, H, D)
        views = [random(*shape, dtype=dtype, seed=i) for i in range(L)]
        parts = [
            torch.stack([view.select(axis, i).flatten(0, 1) for view in views], dim=1)
            for i in range(2)
        ]
        return RowLayout.from_views(views, kind), *parts

    return case


def latent(dtype=torch.bfloat16):
    views = [random(NB, 1, BS, 96, dtype=dtype, seed=i) for i in range(L)]
    whole = torch.stack([v.flatten(0, 2) for v in views], dim=1)
    return RowLayout.from_views(views, "latent"), whole[..., :32], whole[..., 32:]


CASES = [heads_first, packed, halves("kv_first"), halves("kv_second"), latent]
NAMES = ["bhnc", "packed", "kv_first", "kv_second", "latent"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_get_is_indexing_and_put_its_inverse(case, dtype):
    rows, first, second = case(dtype)
    kv = model_kv(rows)
    slots = [7, NB * BS - 1, 0, 7]
    one, two = kv.get(slots)
    same(one, first[slots])
    same(two, second[slots])

    before = [t.clone() for t in (first, second)]
    changed = [random(3, *t.shape[1:], dtype=dtype, seed=9) for t in (first, second)]
    kv.put([4, -1, 2], *changed)
    got = kv.get(list(range(NB * BS)))
    for new, old, put in zip(got, before, changed, strict=True):
        expected = old.clone()
        expected[4], expected[2] = put[0], put[2]
        same(new, expected)


def test_keys_and_values_may_differ_in_width():
    views = [random(NB, H, BS, 24 + 16, seed=i) for i in range(L)]
    kv = model_kv(RowLayout.from_views(views, "bhnc", head_dim=24))
    key, value = kv.get([6])
    assert kv.shapes == ((H, 24), (H, 16))
    same(key[0, 1], views[1][1, :, 2, :24])
    same(value[0, 1], views[1][1, :, 2, 24:])


def test_ranks_hold_their_heads():
    """Heads of two ranks, side by side, are those of one; each puts its own back."""
    whole, key, value = heads_first()
    shards = [[view[:, i : i + 2].clone() for view in whole.tensors] for i in (0, 2)]
    ranks = [model_kv(RowLayout.from_views(views, "bhnc")) for views in shards]
    slots = [3, 11]
    both = [rank.get(slots) for rank in ranks]
    same(torch.cat([k for k, _ in both], dim=2), key[slots])
    same(torch.cat([v for _, v in both], dim=2), value[slots])
    ranks[1].put([0, 1], *both[1])
    one = model_kv(whole)
    one.put([0, 1], *one.get(slots))
    same(ranks[1].get([0, 1])[0], one.get([0, 1])[0][:, :, 2:])


def test_holes_are_zero_or_what_out_held():
    rows, key, _ = heads_first()
    kv = model_kv(rows)
    got, _ = kv.get([-1, 2])
    assert not got[0].view(torch.uint8).any()
    same(got[1], key[2])
    out = torch.full((2, rows.row_bytes + 16), 0xA5, dtype=torch.uint8)
    got, _ = kv.get([-1, 2], out=out[:, : rows.row_bytes])
    assert (out[0] == 0xA5).all()
    assert (out[1, rows.row_bytes :] == 0xA5).all()
    same(got[1], key[2])
    assert got.untyped_storage().data_ptr() == out.data_ptr()


@pytest.mark.parametrize("case", [heads_first, latent])
def test_no_tokens(case):
    kv = model_kv(case()[0])
    one, two = kv.get([])
    assert one.shape == (0, L, *kv.shapes[0])
    before = [view.clone() for view in kv.rows.tensors]
    kv.put([], one, two)
    for view, old in zip(kv.rows.tensors, before, strict=True):
        same(view, old)


def test_slots_of_any_integer_type():
    rows, key, _ = heads_first()
    for slots in (torch.tensor([3, 1], dtype=torch.int32), torch.tensor([3, 0, 1])[::2], (3, 1)):
        same(model_kv(rows).get(slots)[0], key[[3, 1]])


@pytest.mark.parametrize("case", [heads_first, latent])
@pytest.mark.parametrize("slots", [[3, 8], [3]])
def test_what_get_returned_is_put_without_another_copy(case, slots):
    rows, _, _ = case()
    kv = model_kv(rows)
    out = torch.full((len(slots), rows.row_bytes + 8), 0xA5, dtype=torch.uint8)
    one, two = kv.get(slots, out=out[:, : rows.row_bytes])
    expected = [t.clone() for t in (one, two)]
    behind = kv._rows_behind(one, two)
    assert behind.data_ptr() == out.data_ptr()
    same(behind, out[:, : rows.row_bytes])
    # views of other rows, of swapped parts, or of some layers are not those rows
    assert kv._rows_behind(two, one) is None
    assert kv._rows_behind(one.clone(), two) is None
    assert kv._rows_behind(one, one) is None
    kv.put(range(len(slots)), one, two)
    for got, wanted in zip(kv.get(range(len(slots))), expected, strict=True):
        same(got, wanted)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(range(len(CASES))),
    slots=st.lists(st.integers(0, NB * BS - 1), unique=True, max_size=NB * BS),
    is_view=st.booleans(),
)
def test_round_trip(kind, slots, is_view):
    rows, _, _ = CASES[kind]()
    kv = model_kv(rows)
    before = kv.get(range(NB * BS))
    parts = [random(len(slots), *t.shape[1:], seed=len(slots)) for t in before]
    if is_view:
        # any strides: layers first, as an engine may hold them
        parts = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    kv.put(slots, *parts)
    untouched = [slot for slot in range(NB * BS) if slot not in slots]
    for new, old, put in zip(kv.get(range(NB * BS)), before, parts, strict=True):
        same(new[slots], put)
        same(new[untouched], old[untouched])


def test_wrong_arguments_are_refused_before_a_byte_moves():
    rows, _, _ = heads_first()
    kv = model_kv(rows)
    before = [view.clone() for view in rows.tensors]
    key, value = kv.get([0, 1])
    for slots, one, two, message in [
        ([0], key, value, r"key must be torch.bfloat16 \[1, 3, 4, 8\]"),
        ([0, 1], key.float(), value, r"got torch.float32 \[2, 3, 4, 8\]"),
        ([0, 1], key, value[:, :2], r"value must be torch.bfloat16 \[2, 3, 4, 8\]"),
        ([0, NB * BS], key, value, "slot_mapping must be"),
        ([0, 0], key, value, "slot_mapping must"),
        ([-2, 0], key, value, "slot_mapping must be"),
        ([0.5, 1.5], key, value, r"slots must be integers \[T\]"),
        ([[0, 1]], key, value, r"slots must be integers \[T\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            kv.put(slots, one, two)
    with pytest.raises(ValueError, match="slot_mapping must be"):
        kv.get([NB * BS])
    with pytest.raises(ValueError, match="rows must be"):
        kv.get([0], out=torch.zeros(1, rows.row_bytes - 2, dtype=torch.uint8))
    uneven = torch.zeros(2, rows.row_bytes + 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out must have rows at multiples of 2 bytes"):
        kv.get([0, 1], out=uneven[:, : rows.row_bytes])
    assert not uneven.any()
    for view, old in zip(rows.tensors, before, strict=True):
        same(view, old)


def test_what_a_model_computed_with_gradients_is_put():
    rows = RowLayout.from_views([torch.zeros(NB, H, BS, 2 * D) for _ in range(L)], "bhnc")
    kv = model_kv(rows)
    key, value = (torch.randn(2, L, H, D, requires_grad=True) for _ in range(2))
    kv.put([3, 1], key, value)
    for put, found in zip((key, value), kv.get([3, 1]), strict=True):
        same(found, put.detach())


def test_layers_that_differ_are_refused():
    mixed = RowLayout.from_views([random(NB, BS, 96), random(NB, BS, 32)], "latent")
    with pytest.raises(ValueError, match=r"layers that are alike.*latent \[32\], latent \[96\]"):
        model_kv(mixed)
    with pytest.raises(ValueError, match=r"rope_dim must be in 0\.\.96; got 97"):
        model_kv(latent()[0], rope_dim=97)
    with pytest.raises(ValueError, match="rope_dim must be left out"):
        model_kv(heads_first()[0], rope_dim=64)


def test_the_rotary_part_may_be_counted_in_bytes():
    """fp8_ds_mla: 512 bytes of codes, 16 of scales, 128 of the rotary part in bf16."""
    views = [random(NB, 1, BS, 656, dtype=torch.uint8, seed=i) for i in range(L)]
    codes, rope = model_kv(RowLayout.from_views(views, "latent"), rope_dim=128).get([9])
    same(codes[0, 2], views[2][2, 0, 1, :528])
    same(rope[0, 2].view(torch.bfloat16), views[2][2, 0, 1, 528:].view(torch.bfloat16))


def test_the_rotary_part_of_packed_rows_is_known():
    rows = RowLayout.from_views([random(NB, BS, 656, dtype=torch.uint8)], "latent")
    assert model_kv(rows).shapes == ((528,), (128,))
    assert model_kv(rows, rope_dim=64).shapes == ((592,), (64,))


@pytest.mark.parametrize("wrong", [[torch.zeros(1)], None], ids=["views", "none"])
def test_what_is_no_row_layout_is_refused(wrong):
    with pytest.raises(ValueError, match="rows must be a RowLayout; got"):
        model_kv(wrong)


def test_a_get_is_one_compiled_graph():
    rows, key, _ = heads_first()
    kv = model_kv(rows)
    get = torch.compile(lambda slots: kv.get(slots)[0].clone(), backend="aot_eager", fullgraph=True)
    same(get(torch.tensor([3, 1])), key[[3, 1]])


def test_triton_is_not_needed_on_the_host():
    code = """
import sys
sys.modules["triton"] = None
import torch
from kvferry.kernels.rows import RowLayout
from kvferry.kvops.model_kv import model_kv
kv = model_kv(RowLayout.from_views([torch.arange(64.).view(2, 1, 4, 8)], "bhnc"))
key, value = kv.get([5])
assert key.flatten().tolist() == [40, 41, 42, 43], key
"""
    subprocess.run([sys.executable, "-c", code], check=True)
