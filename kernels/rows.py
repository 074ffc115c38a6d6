"""Where the bytes of one token are: the token-granular view of one KV cache group.

A token's *row* is what all layers keep of it, without gaps:

    keys and values    [layer][K: head, dim][V: head, dim]
    latent (MLA)       [layer][latent], the rotary part last, as in the cache

whatever the order in the cache. A row is a list of pieces: piece p of the token in slot
``block * block_size + token`` is at ``base + block * block_stride + token * token_stride``.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .cache_shapes import layout_of_views
from .layout import MAX_WORD_BYTES, refuse_copy
from .strides import Views, contiguous_runs, describe, named

RowKind = Literal["bhnc", "kv_first", "kv_second", "latent"]
"""How the cache of one layer is indexed, whatever the order of its bytes:

    bhnc        [NB, H, BS, C]       C holds the head's K numbers, then its V numbers
    kv_first    [2, NB, BS, H, D]
    kv_second   [NB, 2, BS, H, D]
    latent      [NB, BS, C] or [NB, 1, BS, C]
"""

PartName = Literal["key", "value", "latent"]

_SHAPES: dict[RowKind, str] = {
    "bhnc": "[NB, H, BS, C]",
    "kv_first": "[2, NB, BS, H, D]",
    "kv_second": "[NB, 2, BS, H, D]",
    "latent": "[NB, BS, C] or [NB, 1, BS, C]",
}


@dataclass(frozen=True, slots=True)
class RowPiece:
    """One contiguous run of bytes of every token.

    Attributes:
        base_address: where token 0 of block 0 has it, in the address space of its device.
        block_stride: distance between two blocks, in bytes.
        token_stride: distance between two tokens of a block, in bytes.
        nbytes: its length, in bytes.
        row_offset: where it goes inside a row, in bytes.
    """

    base_address: int
    block_stride: int
    token_stride: int
    nbytes: int
    row_offset: int


@dataclass(frozen=True, slots=True)
class RowPart:
    """What one layer keeps of a token: its keys, its values, or its latent.

    Attributes:
        name: what it is.
        layer: index of the layer in the group.
        shape: ``(H, D)`` of keys and values, ``(C,)`` of a latent.
        dtype: of the numbers, as the cache has it.
        row_offset: where the part starts in a row, in bytes.
    """

    name: PartName
    layer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_offset: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """All pieces of a token of one KV cache group.

    Ownership:
        Keeps the tensors alive: the addresses stay valid as long as the layout does.

    Attributes:
        pieces: in the order of the row.
        parts: the same bytes as numbers, in the order of the row.
        tensors: one per layer, as they came.
        num_blocks: blocks in the cache.
        block_size: tokens of one block.
        row_bytes: bytes of a row: the sum over its pieces.
        device: where the cache and the table live.
        table: ``[pieces, 5]`` int64 on the device: the fields of each piece, in their order.
    """

    pieces: tuple[RowPiece, ...]
    parts: tuple[RowPart, ...]
    tensors: tuple[torch.Tensor, ...]
    num_blocks: int
    block_size: int
    row_bytes: int
    device: torch.device
    table: torch.Tensor

    __reduce_ex__ = refuse_copy

    @property
    def num_slots(self) -> int:
        """Places for a token: ``num_blocks * block_size``."""
        return self.num_blocks * self.block_size

    @property
    def alignment(self) -> int:
        """The largest word, of 16, 8, 4, 2 or 1 bytes, that every piece and every row is made of."""
        numbers = [self.row_bytes, MAX_WORD_BYTES]
        for p in self.pieces:
            numbers += (p.base_address, p.block_stride, p.token_stride, p.nbytes, p.row_offset)
        return math.gcd(*numbers)

    @classmethod
    def from_views(
        cls, views: Views, kind: RowKind, *, head_dim: int | None = None, is_packed: bool = False
    ) -> "RowLayout":
        """Read the layout off the caches of the layers of one group.

        Args:
            views: one per layer, of the *kind*'s shape below, any dtype and any order of bytes, as long as
                the numbers of a head (or of a latent) are adjacent. Where an engine splits its
                blocks into smaller ones for its attention kernel, these are the blocks here: slots
                are the same.
            kind: how the views are indexed: ``"bhnc"`` ``[NB, H, BS, C]`` with C a head's K numbers and then
                its V numbers, ``"kv_first"`` ``[2, NB, BS, H, D]``, ``"kv_second"`` ``[NB, 2, BS, H, D]``,
                ``"latent"`` ``[NB, BS, C]`` or ``[NB, 1, BS, C]``. A cache with two axes the other way
                round, such as ``[2, NB, H, BS, D]``, comes transposed.
            head_dim: of ``"bhnc"``, how many of the C numbers are K; half of them if not given.
            is_packed: of ``"bhnc"``, a (block, head) holds ``[BS, D]`` of K and then ``[BS, D]`` of V,
                as vLLM's CPU attention fills it, and the view's own axes N and C mean nothing.

        Raises:
            ValueError: a view cannot be described, or two share bytes; the message names them.
        """
        if kind not in _SHAPES:
            raise ValueError(f"kind must be one of {', '.join(_SHAPES)}; got {kind!r}")
        if kind != "bhnc" and (is_packed or head_dim is not None):
            raise ValueError(f"head_dim and is_packed must be left to kind 'bhnc'; got {kind!r}")
        pieces: list[RowPiece] = []
        parts: list[RowPart] = []
        pairs = named("views", views)
        row_bytes = 0
        shape = None
        for layer, (name, view) in enumerate(pairs):
            fields = _fields(name, view, kind, head_dim, is_packed)
            first = next(iter(fields.values()))
            found = first.shape[0], first.shape[1], view.device
            shape = shape or found
            if found != shape:
                raise ValueError(
                    f"{name} must have {shape[0]} blocks of {shape[1]} tokens on {shape[2]}, as the "
                    f"first has; got {found[0]} of {found[1]} on {found[2]}"
                )
            for what, field in fields.items():
                parts.append(RowPart(what, layer, tuple(field.shape[2:]), field.dtype, row_bytes))
                row_bytes = _add_pieces(pieces, name, field, row_bytes)
        assert shape is not None
        # rows that share bytes could not be scattered: the same checks as of blocks
        layout_of_views(views, block_axis=1 if kind == "kv_first" else 0)
        rows = [
            (p.base_address, p.block_stride, p.token_stride, p.nbytes, p.row_offset) for p in pieces
        ]
        return cls(
            pieces=tuple(pieces),
            parts=tuple(parts),
            tensors=tuple(view for _, view in pairs),
            num_blocks=shape[0],
            block_size=shape[1],
            row_bytes=row_bytes,
            device=shape[2],
            table=torch.tensor(rows, dtype=torch.int64, device=shape[2]),
        )


def _fields(
    name: str, view: torch.Tensor, kind: RowKind, head_dim: int | None, is_packed: bool
) -> dict[PartName, torch.Tensor]:
    """View a layer as ``[NB, BS, H, D]`` keys and values, or as one ``[NB, BS, C]`` latent."""
    sizes = view.shape
    if kind == "latent" and view.ndim == 3:
        return {"latent": view}
    if kind == "latent" and view.ndim == 4 and sizes[1] == 1:
        return {"latent": view.squeeze(1)}
    if kind == "kv_first" and view.ndim == 5 and sizes[0] == 2:
        return {"key": view[0], "value": view[1]}
    if kind == "kv_second" and view.ndim == 5 and sizes[1] == 2:
        return {"key": view[:, 0], "value": view[:, 1]}
    if kind != "bhnc" or view.ndim != 4:
        raise ValueError(f"{name} must be {_SHAPES[kind]}; got {describe(view)}")
    key_dim = sizes[3] // 2 if head_dim is None else head_dim
    if not 0 < key_dim < sizes[3] or (head_dim is None and sizes[3] % 2):
        raise ValueError(
            f"{name} must be {_SHAPES[kind]} with C of a head's K numbers ({head_dim or 'half'}) and "
            f"its V numbers; got {describe(view)}"
        )
    if is_packed:
        return _unpack(name, view, key_dim)
    by_token = view.permute(0, 2, 1, 3)
    return {"key": by_token[..., :key_dim], "value": by_token[..., key_dim:]}


def _unpack(name: str, view: torch.Tensor, key_dim: int) -> dict[PartName, torch.Tensor]:
    """View a (block, head) of ``[BS, D]`` K and ``[BS, D]`` V numbers as keys and values."""
    num_blocks, heads, tokens, content = view.shape
    block_stride, head_stride, token_stride, stride = view.stride()
    if stride != 1 or (tokens > 1 and token_stride != content) or content != 2 * key_dim:
        raise ValueError(
            f"{name} must be {_SHAPES['bhnc']}, packed: {tokens} tokens of {2 * key_dim} adjacent "
            f"numbers in each (block, head); got {describe(view)}"
        )
    shape = num_blocks, tokens, heads, key_dim
    strides = block_stride, key_dim, head_stride, 1
    start = view.storage_offset()
    return {
        "key": view.as_strided(shape, strides, start),
        "value": view.as_strided(shape, strides, start + tokens * key_dim),
    }


def _add_pieces(pieces: list[RowPiece], name: str, field: torch.Tensor, row_offset: int) -> int:
    """Append the pieces of one part, from *row_offset* on; return where the next part starts."""
    width = field.element_size()
    block_stride, token_stride, *inner = (stride * width for stride in field.stride())
    offsets, nbytes = contiguous_runs(field.shape[2:], inner, width)
    if nbytes < field.shape[-1] * width:
        what = "a head" if field.ndim == 4 else "a token"
        raise ValueError(f"{name} must have the numbers of {what} adjacent; got {describe(field)}")
    for offset in offsets:
        piece = RowPiece(field.data_ptr() + offset, block_stride, token_stride, nbytes, row_offset)
        row_offset += nbytes
        if pieces and _is_adjacent(pieces[-1], piece):
            last = pieces.pop()
            piece = RowPiece(
                last.base_address, block_stride, token_stride, last.nbytes + nbytes, last.row_offset
            )
        pieces.append(piece)
    return row_offset


def _is_adjacent(a: RowPiece, b: RowPiece) -> bool:
    """Return whether *b*, which follows *a* in the row, follows it in every block, too."""
    return (
        a.base_address + a.nbytes == b.base_address
        and a.block_stride == b.block_stride
        and a.token_stride == b.token_stride
    )
