"""The pieces of a token's row, cut so that a kernel moves many tokens of one piece at a time.

A lane is the widest word that a piece is made of: 16 bytes where its place in the cache and in the rows
allows it, else what is left over for all the others together. Large pieces are cut evenly into pieces
about as long as the smallest, so that a tile of lanes is full whatever the mix.
"""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .layout import MAX_WORD_BYTES
from .rows import RowLayout, RowPiece

TILE_LANES = 1024
"""Lanes of a tile. A piece has no more, and a lane's token is exact by a product of 30 bits."""

DIVISOR_BITS = 20
"""``i // lanes == i * ceil(2 ** 20 / lanes) >> 20`` for all i and lanes up to 1024."""

MAX_SLOTS = 1 << 31
"""Of a cache: a kernel has the number of a slot in 31 bits."""

MIN_LANES = 16
"""Pieces are not cut shorter than this: a warp then reads two runs."""


@dataclass(frozen=True, slots=True)
class SlotPieces:
    """The pieces of one width.

    Attributes:
        table: ``[pieces, 6]`` int64 on the device: address of token 0 of block 0, block stride, token
            stride, offset in the row; lanes, and what a lane's number is multiplied by to find its
            token. Bytes.
        count: pieces.
        lane_bytes: 16, 8, 4, 2 or 1.
        tokens: tokens of one tile.
    """

    table: torch.Tensor
    count: int
    lane_bytes: int
    tokens: int


def slot_pieces(rows: RowLayout, address: int, row_stride: int) -> tuple[SlotPieces, ...]:
    """Return the pieces of *rows*, of one width or of two; made once for each alignment, then kept.

    Args:
        rows: where the bytes of a token are in the cache.
        address: of the first row outside of it.
        row_stride: from one such row to the next, in bytes.

    Raises:
        ValueError: the cache has more than ``MAX_SLOTS`` slots.
    """
    alignment = math.gcd(MAX_WORD_BYTES, address, row_stride)
    # two threads that come first together make the same tables; either may stay
    made = _MADE.setdefault(rows.table, {})
    found = made.get(alignment)
    if found is None:
        found = made.setdefault(alignment, _make(rows, alignment))
    return found


_MADE: MutableMapping[torch.Tensor, dict[int, tuple[SlotPieces, ...]]] = WeakIdKeyDictionary()
"""By a row layout's table on the device, which lives as long as the layout does."""


def _make(rows: RowLayout, alignment: int) -> tuple[SlotPieces, ...]:
    if rows.num_slots > MAX_SLOTS:
        raise ValueError(f"rows must have at most {MAX_SLOTS} slots; got {rows.num_slots}")
    widths = [math.gcd(alignment, _width(piece)) for piece in rows.pieces]
    wide = [p for p, w in zip(rows.pieces, widths, strict=True) if w == MAX_WORD_BYTES]
    narrow = [p for p, w in zip(rows.pieces, widths, strict=True) if w < MAX_WORD_BYTES]
    made = []
    for pieces in (wide, narrow):
        if pieces:
            lane_bytes = math.gcd(alignment, *(_width(piece) for piece in pieces))
            made.append(_cut(pieces, lane_bytes, rows.device))
    return tuple(made)


def _width(piece: RowPiece) -> int:
    """Return the bytes of the widest word that a piece is made of."""
    return math.gcd(
        MAX_WORD_BYTES,
        piece.base_address,
        piece.block_stride,
        piece.token_stride,
        piece.nbytes,
        piece.row_offset,
    )


def _cut(pieces: list[RowPiece], lane_bytes: int, device: torch.device) -> SlotPieces:
    smallest = min(piece.nbytes for piece in pieces) // lane_bytes
    target = min(max(smallest, MIN_LANES), TILE_LANES)
    table = []
    longest = 0
    for piece in pieces:
        total = piece.nbytes // lane_bytes
        parts = -(-total // target)
        lanes = -(-total // parts)
        longest = max(longest, lanes)
        for first in range(0, total, lanes):
            count = min(lanes, total - first)
            start = first * lane_bytes
            table.append(
                (
                    piece.base_address + start, piece.block_stride, piece.token_stride,
                    piece.row_offset + start, count, -(-(1 << DIVISOR_BITS) // count),
                )
            )  # fmt: skip
    return SlotPieces(
        table=torch.tensor(table, dtype=torch.int64, device=device),
        count=len(table),
        lane_bytes=lane_bytes,
        tokens=TILE_LANES // longest,
    )
