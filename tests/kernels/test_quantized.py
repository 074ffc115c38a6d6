"""Codes exactly, values within half a step: the twin against torch's own type, the kernels against the twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvferry.kernels import quantized
from kvferry.kernels import reference_quantized as reference
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout

from .blobs import Blobs
from .layouts import GUARD, Memory, as_bytes, latent, latent_and_indexer, same

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
GATHER, SCATTER = "_gather_quantized_kernel", "_scatter_dequantized_kernel"


def every_number(dtype, width, seed):
    """Return every bit pattern of *dtype* once, in rows of *width*: neighbours, and a mix.

    Rows of neighbours have small scales, too; in a mix most rows have a number near the largest.
    """
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(seed))
    return torch.cat([bits, bits[order]]).view(dtype).view(-1, width)


def half_step(values, scales):
    """Return the largest error allowed of each finite number: half the distance of two codes there."""
    relative = values.double().abs() / scales.double()[..., None]
    exponent = torch.frexp(relative).exponent - 1
    return scales.double()[..., None] * 2.0 ** (exponent.clamp(min=-6) - 4).double()


def check_bound(values, codes, scales):
    back = reference.dequantize(codes, scales, values.dtype).double()
    is_finite = values.isfinite()
    assert back.isfinite().equal(is_finite)
    assert back.isnan().equal(~is_finite)
    error = (back - values.double()).abs()
    bound = half_step(values, scales)
    # the one exception: half a step up would be an infinity
    limit = torch.finfo(values.dtype).max
    is_top = values.double().abs() + bound > limit
    allowed = torch.where(is_top, 2 * bound, bound)
    assert (error <= allowed)[is_finite].all()
    return is_top


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 64])
def test_error_is_half_a_step_at_most(dtype, width):
    values = every_number(dtype, width, seed=width)
    codes, scales = reference.quantize(values)
    is_top = check_bound(values, codes, scales)
    # the exception is rare: numbers within 3 % of the largest
    assert values.double().abs()[is_top & values.isfinite()].min() > torch.finfo(dtype).max * 0.96


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_torch_s_own_type(dtype):
    values = every_number(dtype, 32, seed=3)
    codes, scales = reference.quantize(values)
    relative = values.double() / scales.double()[:, None]
    theirs = relative.float().to(torch.float8_e4m3fn).view(torch.uint8)
    is_top = values.double().abs() > torch.finfo(dtype).max * 0.96
    plain = values.isfinite() & ~is_top
    same(codes[plain], theirs[plain])
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    same(reference.code_values(), table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_went_through_once_goes_through_unchanged(dtype):
    values = every_number(dtype, 32, seed=4)
    codes, scales = reference.quantize(values)
    back = reference.dequantize(codes, scales, dtype)
    again, scales_again = reference.quantize(back)
    twice = reference.dequantize(again, scales_again, dtype)
    same(twice.view(torch.int16), back.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_the_smallest_powers_of_two_that_fit(dtype):
    values = every_number(dtype, 16, seed=5)
    _, scales = reference.quantize(values)
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()
    largest = values.double().abs().where(values.isfinite(), 0.0).amax(-1)
    assert (largest <= 448 * scales.double()).all()
    is_smallest = scales == reference.smallest_scale(dtype)
    assert (is_smallest | (largest > 224 * scales.double())).all()
    assert is_smallest.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers(dtype):
    info = torch.finfo(dtype)
    nan, inf, tiny = float("nan"), float("inf"), info.tiny * info.eps
    values = torch.tensor(
        [
            [0.0, -0.0, 0.0, 0.0],
            [nan, inf, -inf, 448.0],
            [tiny, -tiny, 7 * tiny, 0.0],
            [nan, nan, inf, -inf],
            [info.max, -info.max, 1.0, 0.0],
            [17.0, -19.0, 1.0625, 448.0],
        ],
        dtype=dtype,
    )
    codes, scales = reference.quantize(values)
    smallest = reference.smallest_scale(dtype)
    assert codes.tolist()[:4] == [
        [0, 0x80, 0, 0],
        [0x7F, 0x7F, 0xFF, 0x7E],
        # the smallest numbers of the type are the smallest codes: kept exactly
        [1, 0x81, 7, 0],
        [0x7F, 0x7F, 0x7F, 0xFF],
    ]
    assert scales.tolist()[:4] == [smallest, 1.0, smallest, smallest]
    # the next code would come back as an infinity
    assert codes.tolist()[4][:2] == [0x77, 0xF7]
    # halfway between two codes: the even one
    assert reference.dequantize(codes, scales, dtype)[5].tolist() == [16.0, -20.0, 1.0, 448.0]


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(
        st.floats(width=16, allow_nan=True, allow_infinity=True), min_size=1, max_size=40
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_bound_of_any_row(numbers, dtype):
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    codes, scales = reference.quantize(values[None])
    check_bound(values[None], codes, scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_agree_with_the_twin_on_every_number(dtype, device, poisoned, interpreted):
    launches = [interpreted(quantized, name) for name in (GATHER, SCATTER)]
    width, heads = 64, 2
    values = every_number(dtype, width, seed=6).view(2, -1, 16, heads, width)
    cache = values.to(device).clone()
    rows = QuantizedRows.from_rows(RowLayout.from_views([cache], "kv_first"))
    assert rows.width == width
    block_ids = list(range(rows.num_blocks))
    blobs = Blobs(poisoned, len(block_ids), rows.block_bytes, device)
    quantized.gather_quantized(rows, blobs.entries(block_ids))
    same(as_bytes(cache.cpu()), as_bytes(values))

    # one call of the twin for all rows: its own walk over rows is tested below
    codes, scales = reference.quantize(values.permute(1, 0, 3, 2, 4))
    end = 2 * heads * 16 * width
    same(blobs.rows[:, :end].cpu(), codes.reshape(len(block_ids), -1))
    same(blobs.rows[:, end:].cpu(), as_bytes(scales).view(len(block_ids), -1))
    assert (blobs.whole[:GUARD] == 0xA5).all()

    cache.fill_(7)
    quantized.scatter_dequantized(rows, blobs.entries(block_ids))
    back = reference.dequantize(codes, scales, dtype).permute(1, 0, 3, 2, 4)
    same(cache.cpu().view(torch.int16), back.contiguous().view(torch.int16))
    assert [len(calls) for calls in launches] == [1, 1]


def attention(order, heads, dim, dtype, tokens=5):
    """[L, K|V, NB, H, BS, D] of random bytes in any physical order, as rows."""

    def case(device):
        memory = Memory(device)
        sizes = dict(zip("LKBHND", (2, 2, 4, heads, tokens, dim), strict=True))
        whole = memory.tensor(*(sizes[axis] for axis in order), dtype=dtype)
        view = whole.permute(*(order.index(axis) for axis in "LKBHND"))
        rows = RowLayout.from_views([layer.permute(0, 1, 3, 2, 4) for layer in view], "kv_first")
        return rows, memory.storages

    return case


def of_latent(shape, dtype):
    def case(device):
        cache = latent(shape, dtype)(device)
        return cache.rows, cache.storages

    return case


CASES = {
    # Llama-like and with dims that are no power of two, or no multiple of a word
    "nhd": (attention("LKBNHD", 3, 32, torch.bfloat16), {}),
    "hnd": (attention("LKBHND", 3, 32, torch.float16), {}),
    "k-beside-v": (attention("LBHNKD", 2, 80, torch.bfloat16), {}),
    "layers-in-a-block": (attention("BLKNHD", 2, 96, torch.float16), {}),
    "dim-18": (attention("LBNHKD", 3, 18, torch.bfloat16), {}),
    "dim-7": (attention("LKBNHD", 2, 7, torch.float16), {}),
    "two-ranks": (attention("LKBHND", 2, 32, torch.bfloat16), {"total_heads": 6, "head_first": 3}),
    "parts-of-a-head": (attention("LKBNHD", 2, 64, torch.bfloat16), {"width": 16}),
    "latent": (of_latent((3, 1, 7, 576), torch.bfloat16), {}),
    "latent-in-parts": (of_latent((3, 7, 576), torch.float16), {"width": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_against_the_twin(name, device, poisoned, interpreted):
    launches = [interpreted(quantized, kernel) for kernel in (GATHER, SCATTER)]
    case, options = CASES[name]
    layout, storages = case(device)
    twin_layout, twin_storages = case(device)
    rows = QuantizedRows.from_rows(layout, **options)
    twin = QuantizedRows.from_rows(twin_layout, **options)
    block_ids = [2, -1, 0]
    blobs, expected = (Blobs(poisoned, 3, rows.block_bytes, device) for _ in range(2))
    before = [storage.clone() for storage in storages]
    quantized.gather_quantized(rows, blobs.entries(block_ids))
    reference.gather_quantized(twin, block_ids, expected.rows)
    same(blobs.whole, expected.whole)
    for storage, old in zip(storages, before, strict=True):
        same(storage, old)

    block_ids = [1, 2, -1]
    for blob in (blobs, expected):
        blob.rows[1:] = blob.rows[0].clone()
    quantized.scatter_dequantized(rows, blobs.entries(block_ids), max_sms=2)
    reference.scatter_dequantized(twin, block_ids, expected.rows)
    for storage, other in zip(storages, twin_storages, strict=True):
        same(storage, other)
    same(blobs.whole, expected.whole)
    assert [len(calls) for calls in launches] == [1, 1]


def test_codes_and_scales_lie_in_the_documented_order(poisoned):
    layout, _ = attention("LBNHKD", 2, 32, torch.bfloat16)(CPU)
    rows = QuantizedRows.from_rows(layout, total_heads=4, head_first=1)
    blob = poisoned(1, rows.block_bytes)
    reference.gather_quantized(rows, [3], blob)
    count = 4 * 4 * 5
    codes = blob[0, : count * 32].view(4, 4, 5, 32)
    scales = blob[0, count * 32 : count * 36].view(torch.float32).view(4, 4, 5)
    for segment in range(4):
        kind, layer = segment % 2, layout.tensors[segment // 2]
        code, scale = reference.quantize(layer[kind, 3].transpose(0, 1))
        same(codes[segment, 1:3], code)
        same(scales[segment, 1:3], scale)
        assert (codes[segment, 0::3] == 0xA5).all()
    assert rows.block_bytes == count * 36


def test_ranks_of_any_number_share_a_blob(device, poisoned, interpreted):
    for name in (GATHER, SCATTER):
        interpreted(quantized, name)
    whole, _ = attention("LKBHND", 4, 16, torch.bfloat16)(device)
    blob = Blobs(poisoned, 1, QuantizedRows.from_rows(whole).block_bytes, device)
    expected = Blobs(poisoned, 1, QuantizedRows.from_rows(whole).block_bytes, device)
    quantized.gather_quantized(QuantizedRows.from_rows(whole), expected.entries([1]))
    for first in (0, 2):
        views = [layer[:, :, :, first : first + 2] for layer in whole.tensors]
        part = QuantizedRows.from_rows(
            RowLayout.from_views(views, "kv_first"), total_heads=4, head_first=first
        )
        quantized.gather_quantized(part, blob.entries([1]))
    same(blob.whole, expected.whole)


@pytest.mark.parametrize("move", [quantized.gather_quantized, quantized.scatter_dequantized])
def test_nothing_to_move(move, device, poisoned, interpreted):
    launches = [interpreted(quantized, name) for name in (GATHER, SCATTER)]
    layout, storages = attention("LKBNHD", 2, 32, torch.bfloat16)(device)
    before = [storage.clone() for storage in storages]
    rows = QuantizedRows.from_rows(layout)
    move(rows, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert launches == [[], []]
    blobs = Blobs(poisoned, 2, rows.block_bytes, device)
    move(rows, blobs.entries([-1, -1]))
    assert sum(map(len, launches)) == 1
    assert (blobs.whole == 0xA5).all()
    for storage, old in zip(storages, before, strict=True):
        same(storage, old)


@pytest.mark.parametrize(
    ("views", "kind", "options", "message"),
    [
        ([torch.zeros(5, 4, 8)], "latent", {}, "rows must be all bfloat16 or all float16; got torch.float32"),
        ([torch.zeros(2, 5, 4, 2, 8).half()], "kv_first", {"width": 3}, r"width must divide the dims \[8\]; got 3"),
        ([torch.zeros(2, 5, 4, 2, 8).half()], "kv_first", {"width": 0}, "width must divide"),
        ([torch.zeros(2, 5, 4, 2, 8).half()], "kv_first", {"total_heads": 1}, "head_first must be in"),
        ([torch.zeros(5, 4, 8192).half()], "latent", {}, "width must be at most 4096; got 8192"),
    ],
)  # fmt: skip
def test_what_cannot_be_described_is_refused(views, kind, options, message):
    rows = RowLayout.from_views(views, kind)
    with pytest.raises(ValueError, match=message):
        QuantizedRows.from_rows(rows, **options)


def test_a_cache_of_two_types_is_refused():
    with pytest.raises(ValueError, match=r"got torch\.uint8"):
        QuantizedRows.from_rows(latent_and_indexer(is_block_major=False)(CPU).rows)
