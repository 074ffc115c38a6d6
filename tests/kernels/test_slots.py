import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvferry.kernels import reference_heads, slots
from kvferry.kernels.rows import RowLayout
from kvferry.kernels.slot_pieces import DIVISOR_BITS, TILE_LANES, slot_pieces

from .layouts import GUARD, ROW_LAYOUTS, latent, latent_and_indexer, same

CPU = torch.device("cpu")


def some_slots(rows, count, seed=1):
    """Return *count* slots, the first and the last among them, with one repeated and two holes."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, rows.num_slots, (count,), generator=generator)
    chosen[:6] = torch.tensor([0, rows.num_slots - 1, -1, rows.num_slots // 2, 0, -1])
    return chosen


def distinct(slots):
    """Keep the first of equal slots: what wins in a scatter is not defined."""
    seen = set()
    return torch.tensor([-1 if s in seen or seen.add(s) else s for s in slots.tolist()])


class Outside:
    """Poisoned rows with guards before, after and, if *gap*, between them."""

    def __init__(self, poisoned, rows, count, device, shift=0, gap=0):
        stride = rows.row_bytes + gap
        self.whole = poisoned(count * stride + 2 * GUARD + shift, device=device)
        self.rows = self.whole.as_strided((count, rows.row_bytes), (stride, 1), GUARD + shift)


def check_gather(cache, poisoned, device, slot_mapping, launches, **outside):
    rows = cache.rows
    before = [storage.clone() for storage in cache.storages]
    actual, expected = (
        Outside(poisoned, rows, len(slot_mapping), device, **outside) for _ in range(2)
    )
    slots.gather_slots(rows, slot_mapping.to(device), actual.rows)
    for row, slot in zip(expected.rows, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            row.copy_(cache.expected_row(slot))
    same(actual.whole, expected.whole)
    for storage, old in zip(cache.storages, before, strict=True):
        same(storage, old)
    assert len(launches) == 1


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_gather_every_layout(case, device, poisoned, interpreted):
    launches = interpreted(slots, "_move_slots_kernel")
    cache = case(device)
    check_gather(cache, poisoned, device, some_slots(cache.rows, 13), launches)


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_scatter_every_layout(case, device, poisoned, interpreted, random_bytes):
    launches = interpreted(slots, "_move_slots_kernel")
    cache, twin = case(device), case(device)
    slot_mapping = distinct(some_slots(cache.rows, 13)).to(device)
    src = random_bytes(13, cache.rows.row_bytes, seed=3).to(device)
    kept = src.clone()
    slots.scatter_slots(cache.rows, slot_mapping, src)
    reference_heads.scatter_slots(twin.rows, slot_mapping, src)
    for storage, expected in zip(cache.storages, twin.storages, strict=True):
        same(storage, expected)
    for row, slot in zip(src, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            same(cache.expected_row(slot), row)
    same(src, kept)
    assert len(launches) == 1


@pytest.mark.parametrize("case", ROW_LAYOUTS)
def test_twin_every_layout(case, poisoned):
    cache = case(CPU)
    slot_mapping = some_slots(cache.rows, 13)
    actual = Outside(poisoned, cache.rows, 13, CPU)
    reference_heads.gather_slots(cache.rows, slot_mapping, actual.rows)
    for row, slot in zip(actual.rows, slot_mapping.tolist(), strict=True):
        expected = cache.expected_row(slot) if slot >= 0 else poisoned(cache.rows.row_bytes)
        same(row, expected)


DENSE, PADDED, BY_FOUR, BY_EIGHT, ODD = (0, 0), (0, 16), (0, 4), (8, 0), (1, 3)


# more tokens than one tile holds, in rows of 41, 72, 36 and 22 lanes, and of 33 words of four bytes
@pytest.mark.parametrize(
    ("width", "place"),
    [
        *((width, DENSE) for width in (656, 1152, 576, 352, 132)),
        *((656, place) for place in (PADDED, BY_FOUR, BY_EIGHT)),
        *((132, place) for place in (BY_FOUR, ODD)),
    ],
)
def test_rows_of_every_width(width, place, device, poisoned, interpreted):
    launches = interpreted(slots, "_move_slots_kernel")
    cache = latent((5, 1, 16, width), torch.uint8)(device)
    slot_mapping = some_slots(cache.rows, 37)
    shift, gap = place
    check_gather(cache, poisoned, device, slot_mapping, launches, shift=shift, gap=gap)


def test_a_piece_longer_than_a_tile_is_cut(device, poisoned, interpreted):
    launches = interpreted(slots, "_move_slots_kernel")
    cache = latent((2, 1, 3, TILE_LANES * 16 * 2 + 48), torch.uint8, layers=1)(device)
    check_gather(cache, poisoned, device, torch.tensor([5, -1, 0]), launches)


def test_wide_and_narrow_pieces_move_in_one_launch(device, poisoned, interpreted):
    launches = interpreted(slots, "_move_slots_kernel")
    cache = latent_and_indexer(is_block_major=False)(device)
    gap = -cache.rows.row_bytes % 16
    wide, narrow = slot_pieces(cache.rows, 0, cache.rows.row_bytes + gap)
    assert (wide.lane_bytes, narrow.lane_bytes) == (16, 4)
    # what is narrow is cut so that no lane waits for the longest
    assert narrow.count == 5 + 1 + 1
    assert narrow.tokens == TILE_LANES // 33
    check_gather(cache, poisoned, device, some_slots(cache.rows, 37), launches, gap=gap)


@pytest.mark.parametrize("max_sms", [1, 3, 1000])
def test_any_number_of_programs(max_sms, device, poisoned, interpreted):
    launches = interpreted(slots, "_move_slots_kernel")
    cache = latent((5, 1, 16, 656), torch.uint8)(device)
    slot_mapping = some_slots(cache.rows, 37)
    actual = Outside(poisoned, cache.rows, 37, device)
    expected = Outside(poisoned, cache.rows, 37, device)
    slots.gather_slots(cache.rows, slot_mapping.to(device), actual.rows, max_sms=max_sms)
    reference_heads.gather_slots(cache.rows, slot_mapping, expected.rows)
    same(actual.whole, expected.whole)
    # two layers, 24 tokens of 41 lanes in a tile
    assert launches == [(min(max_sms, 4),)]


@pytest.mark.parametrize("move", [slots.gather_slots, slots.scatter_slots])
def test_no_tokens_no_launch(move, device, poisoned, interpreted):
    launches = interpreted(slots, "_move_slots_kernel")
    cache = latent((5, 1, 16, 656), torch.uint8)(device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    move(cache.rows, empty, poisoned(0, cache.rows.row_bytes, device=device))
    assert launches == []


@pytest.mark.parametrize("move", [slots.gather_slots, slots.scatter_slots])
def test_only_holes_move_nothing(move, device, poisoned, interpreted):
    launches = interpreted(slots, "_move_slots_kernel")
    cache = latent((5, 1, 16, 656), torch.uint8)(device)
    before = [storage.clone() for storage in cache.storages]
    outside = Outside(poisoned, cache.rows, 30, device)
    move(cache.rows, torch.full((30,), -1, device=device), outside.rows)
    assert (outside.whole == 0xA5).all()
    for storage, old in zip(cache.storages, before, strict=True):
        same(storage, old)
    assert len(launches) == 1


def test_slots_beyond_two_gigabytes(device, poisoned, interpreted):
    interpreted(slots, "_move_slots_kernel")
    # memory that is not touched is not used
    whole = torch.empty(5 << 29, dtype=torch.uint8, device=device)
    view = whole[: len(whole) // 10496 * 10496].view(-1, 16, 656)
    rows = RowLayout.from_views([view], "latent")
    far = rows.num_slots - 3
    view[-1, -3:] = torch.arange(3 * 656, device=device).view(3, 656).to(torch.uint8)
    assert view[-1, -3].data_ptr() - view.data_ptr() > 1 << 31
    out = poisoned(3, 656, device=device)
    slots.gather_slots(rows, torch.arange(far, far + 3, device=device), out)
    same(out, view[-1, -3:])
    slots.scatter_slots(rows, torch.tensor([far + 2, -1, far + 1], device=device), out)
    same(view[-1, -1], out[0])
    same(view[-1, -2], out[2])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_round_trip(data, device, poisoned, interpreted):
    """Rows scattered are gathered; what was not named is as it was."""
    interpreted(slots, "_move_slots_kernel")
    blocks, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    width = data.draw(st.sampled_from([1, 2, 4, 6, 8, 16, 33, 48, 132, 272]))
    cache = latent((blocks, tokens, width), torch.uint8, data.draw(st.integers(1, 3)))(device)
    slot_mapping = data.draw(
        st.lists(st.integers(0, blocks * tokens - 1), unique=True, max_size=40)
    )
    holes = data.draw(st.lists(st.integers(0, len(slot_mapping)), max_size=3))
    for place in holes:
        slot_mapping.insert(place, -1)
    mapping = torch.tensor(slot_mapping, dtype=torch.int64, device=device)
    named = torch.zeros(blocks * tokens, dtype=torch.bool)
    named[[slot for slot in slot_mapping if slot >= 0]] = True
    before = [cache.expected_row(slot).clone() for slot in range(blocks * tokens)]
    src = torch.randint(0, 256, (len(slot_mapping), cache.rows.row_bytes), dtype=torch.uint8)
    src = src.to(device)
    slots.scatter_slots(cache.rows, mapping, src)
    back = Outside(poisoned, cache.rows, len(slot_mapping), device)
    slots.gather_slots(cache.rows, mapping, back.rows)
    for row, sent, slot in zip(back.rows, src, slot_mapping, strict=True):
        same(row, sent if slot >= 0 else torch.full_like(sent, 0xA5))
    for slot in (~named).nonzero().flatten().tolist():
        same(cache.expected_row(slot), before[slot])


def test_a_lane_finds_its_token_by_a_product():
    lane, lanes = np.arange(TILE_LANES)[:, None], np.arange(1, TILE_LANES + 1)[None, :]
    multiplier = -(-(1 << DIVISOR_BITS) // lanes)
    assert (lane * multiplier).max() < 1 << 31
    assert (((lane * multiplier) >> DIVISOR_BITS) == lane // lanes).all()


def test_tables_are_made_once_for_an_alignment():
    rows = latent((5, 1, 16, 656), torch.uint8)(CPU).rows
    assert slot_pieces(rows, 64, 656) is slot_pieces(rows, 128, 672)
    assert slot_pieces(rows, 64, 656) is not slot_pieces(rows, 8, 656)
