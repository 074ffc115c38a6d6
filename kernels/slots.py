"""Copy tokens: rows of a paged cache, chosen by slot <-> one row per token.

One program moves one piece of many tokens at a time, so that rows of 656 or 1152 bytes fill its lanes as
well as those of 256 do. Which token a lane is of follows from its number by a product and a shift. Reads
and writes are 16 bytes wide wherever a piece allows it; where some do not (132 bytes a token), these are
moved in narrower words by the same launch. Rows may be in device or in pinned host memory.
"""

import torch
import triton
import triton.language as tl

from .budget import MAX_SMS
from .current_device import made_current
from .rows import RowLayout
from .slot_pieces import DIVISOR_BITS, TILE_LANES, slot_pieces

NUM_WARPS = 8
"""Of one program: four lanes a thread, which keeps it below 64 registers (static report)."""

_WORDS = {
    16: (tl.int64, 2),
    8: (tl.int64, 1),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}
"""Bytes of a lane -> the type of its words, and how many words it has."""


# one variant whatever the numbers and the places are: nothing is compiled in the middle of serving
@triton.jit(
    do_not_specialize=[
        "num_tokens", "row_stride", "wide_count", "wide_tokens", "narrow_count", "narrow_tokens",
    ],
    do_not_specialize_on_alignment=["slots_ptr", "rows_ptr"],
)  # fmt: skip
def _move_slots_kernel(
    # [wide_count, 6] and [narrow_count, 6] int64, see SlotPieces; the latter unused with one width
    wide_ptr,
    narrow_ptr,
    # [num_tokens] int64
    slots_ptr,
    # [num_tokens, row_stride] uint8
    rows_ptr,
    num_tokens,
    row_stride,
    wide_count,
    wide_tokens,
    narrow_count,
    narrow_tokens,
    BLOCK_SIZE: tl.constexpr,
    TILE_LANES: tl.constexpr,
    DIVISOR_BITS: tl.constexpr,
    # one or two of each: bytes of a lane, the type of its words, how many it has
    LANE_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    TO_ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    lane = tl.arange(0, TILE_LANES)[:, None]
    for width in tl.static_range(len(LANE_BYTES)):
        pieces_ptr = wide_ptr if width == 0 else narrow_ptr
        count = wide_count if width == 0 else narrow_count
        tokens = wide_tokens if width == 0 else narrow_tokens
        word = tl.arange(0, WORDS[width])[None, :]
        num_units = (num_tokens + tokens - 1) // tokens * count
        for unit in range(program, num_units, num_programs):
            piece = pieces_ptr + (unit % count) * 6
            lanes = tl.load(piece + 4).to(tl.int32)
            token_of_tile = (lane * tl.load(piece + 5).to(tl.int32)) >> DIVISOR_BITS
            start = (lane - token_of_tile * lanes) * LANE_BYTES[width]
            token = (unit // count) * tokens + token_of_tile
            is_token = (token_of_tile < tokens) & (token < num_tokens)
            # MAX_SLOTS lets it be divided in 32 bits: in 64 ptxas spilled for blocks of 24 tokens
            slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int32)
            is_lane = slot >= 0
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            page = tl.load(piece) + block * tl.load(piece + 1) + offset * tl.load(piece + 2) + start
            row = rows_ptr + token.to(tl.int64) * row_stride + tl.load(piece + 3) + start
            page_ptr = page.to(tl.pointer_type(WORD[width]))
            row_ptr = row.to(tl.pointer_type(WORD[width]))
            # promises go on pointers: on an integer address they are lost
            page_ptr = tl.multiple_of(
                page_ptr, [tl.constexpr(LANE_BYTES[width]), tl.constexpr(LANE_BYTES[width])]
            )
            row_ptr = tl.multiple_of(
                row_ptr, [tl.constexpr(LANE_BYTES[width]), tl.constexpr(LANE_BYTES[width])]
            )
            if TO_ROWS:
                values = tl.load(page_ptr + word, mask=is_lane, eviction_policy="evict_first")
                tl.store(row_ptr + word, values, mask=is_lane, cache_modifier=".cs")
            else:
                values = tl.load(row_ptr + word, mask=is_lane, eviction_policy="evict_first")
                tl.store(page_ptr + word, values, mask=is_lane, cache_modifier=".cs")


def gather_slots(
    rows: RowLayout, slot_mapping: torch.Tensor, dst: torch.Tensor, *, max_sms: int = MAX_SMS
) -> None:
    """Copy tokens out of the paged cache, one row each.

    The copy is enqueued on the current stream. ``dst[i]`` receives the token in slot
    ``slot_mapping[i]``; the row of a slot of -1 keeps what it held.

    Args:
        rows: where the bytes of a token are.
        slot_mapping: ``[T]`` int64 on the device of *rows*, ``block * block_size + token`` or -1;
            repeats allowed.
        dst: ``[T, row_bytes]`` uint8, bytes of a row adjacent, any stride between rows. Accesses are
            16 bytes wide where its address and its stride are multiples of 16.
        max_sms: programs at most, and so streaming multiprocessors.

    Units:
        Moves ``2 * T * row_bytes`` bytes (each byte read once, written once).

    Source:
        Meaning ``kernels/reference_heads.py::gather_slots``.
    """
    _launch(rows, slot_mapping, dst, max_sms, to_rows=True)


def scatter_slots(
    rows: RowLayout, slot_mapping: torch.Tensor, src: torch.Tensor, *, max_sms: int = MAX_SMS
) -> None:
    """Copy rows into the paged cache, one token each.

    The inverse of :func:`gather_slots`: arguments and units as there; the slot of -1 moves nothing. A
    slot must not be named twice: which of its two rows wins is not defined.

    Source:
        Meaning ``kernels/reference_heads.py::scatter_slots``.
    """
    _launch(rows, slot_mapping, src, max_sms, to_rows=False)


def _launch(
    rows: RowLayout,
    slot_mapping: torch.Tensor,
    others: torch.Tensor,
    max_sms: int,
    *,
    to_rows: bool,
) -> None:
    num_tokens = slot_mapping.shape[0]
    if not num_tokens:
        return
    widths = slot_pieces(rows, others.data_ptr(), others.stride(0))
    wide, narrow = widths[0], widths[-1]
    num_units = max(-(-num_tokens // width.tokens) * width.count for width in widths)
    words = [_WORDS[width.lane_bytes] for width in widths]
    with made_current(rows.device):
        _move_slots_kernel[(min(num_units, max_sms),)](
            wide.table,
            narrow.table,
            slot_mapping,
            others,
            num_tokens,
            others.stride(0),
            wide.count,
            wide.tokens,
            narrow.count,
            narrow.tokens,
            BLOCK_SIZE=rows.block_size,
            TILE_LANES=TILE_LANES,
            DIVISOR_BITS=DIVISOR_BITS,
            LANE_BYTES=tuple(width.lane_bytes for width in widths),
            WORD=tuple(word for word, _ in words),
            WORDS=tuple(count for _, count in words),
            TO_ROWS=to_rows,
            num_warps=NUM_WARPS,
        )
