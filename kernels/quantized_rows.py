"""Where rows of numbers are in a paged cache, and where their codes and scales go in a blob.

A block's share of a quantised blob, without gaps:

    codes     [segment][head of the model][part of a head][token][WIDTH]    uint8, e4m3
    scales    [segment][head of the model][part of a head][token]           float32

A segment is a part of a row: the keys or the values of a layer, or its latent, which is one head. A head
is one part unless WIDTH is smaller than its dim: a latent of 576 numbers in parts of 64 has nine scales
a token. As with other canonical blobs, each rank puts its heads where the whole model's heads are.
"""

import math
from dataclasses import dataclass

import torch

from .head_spans import check_head_share, head_spans
from .layout import MAX_WORD_BYTES, refuse_copy
from .rows import RowLayout

SCALE_BYTES = 4
"""Of one row's scale, float32."""

MAX_WIDTH = 4096
"""Of a row: a program of the kernel holds whole rows, because a row has one scale."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """All rows of one KV cache group on one rank.

    Ownership:
        Keeps the tensors alive: addresses in the table stay valid.

    Attributes:
        table: ``[pieces, 5]`` int64 on the device, a piece per (part of a head): address of token 0 of
            block 0, block stride, token stride; offsets of its first code and first scale. Bytes.
        tensors: the cache.
        dtype: of the numbers in the cache, bfloat16 or float16.
        width: numbers of one row.
        block_size: tokens of one block.
        num_blocks: blocks in the cache.
        block_bytes: a block's share of a blob, codes and scales of all heads of the model.
        value_alignment: every row in the cache begins at a multiple of it, up to 16 bytes.
        code_alignment: every row of codes begins at a multiple of it, up to 16 bytes, if a block's
            share of a blob does. That share must begin at a multiple of 4 at least, for the scales.
        device: where the cache and the table live.
    """

    table: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    width: int
    block_size: int
    num_blocks: int
    block_bytes: int
    value_alignment: int
    code_alignment: int
    device: torch.device

    __reduce_ex__ = refuse_copy

    @property
    def num_pieces(self) -> int:
        """Rows of one token."""
        return self.table.shape[0]

    @property
    def alignment(self) -> int:
        """What the address of a block's share of a blob must be a multiple of, in bytes."""
        return max(self.code_alignment, SCALE_BYTES)

    @classmethod
    def from_rows(
        cls,
        rows: RowLayout,
        *,
        width: int | None = None,
        total_heads: int | None = None,
        head_first: int = 0,
    ) -> "QuantizedRows":
        """Read the rows off a cache.

        Args:
            rows: the cache of this rank, all of bfloat16 or all of float16.
            width: numbers that share a scale, a divisor of every head's dim; by default the largest
                such number, so that a head of a token has one scale.
            total_heads: KV heads of the model; this rank's if None.
            head_first: the first head of the model that this rank holds.

        Raises:
            ValueError: the cache has another dtype, *width* does not divide a head's dim or is too large, or the rank's
                heads lie outside the model's.
        """
        dtypes = {part.dtype for part in rows.parts}
        if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(f"rows must be all bfloat16 or all float16; got {names}")
        dims = [part.shape[-1] for part in rows.parts]
        common = math.gcd(*dims)
        width = common if width is None else width
        if width < 1 or common % width:
            raise ValueError(f"width must divide the dims {sorted(set(dims))}; got {width}")
        if width > MAX_WIDTH:
            raise ValueError(f"width must be at most {MAX_WIDTH}; got {width}")
        total, _ = check_head_share(rows, total_heads, head_first)

        starts, num_rows = [], 0
        for part in rows.parts:
            starts.append(num_rows)
            heads = total if total is not None and part.name != "latent" else 1
            num_rows += heads * (part.shape[-1] // width)
        scales = _align(num_rows * rows.block_size * width, SCALE_BYTES)
        dtype = dtypes.pop()
        table = []
        for span in head_spans(rows):
            per_head = span.part.shape[-1] // width
            place = span.head + (0 if span.part.name == "latent" else head_first)
            first = starts[span.segment] + place * per_head
            table += [
                (
                    span.base_address + index * width * dtype.itemsize,
                    span.block_stride,
                    span.token_stride,
                    (first + index) * rows.block_size * width,
                    scales + (first + index) * rows.block_size * SCALE_BYTES,
                )
                for index in range(per_head)
            ]
        places = (number for row in table for number in row[:3])
        return cls(
            table=torch.tensor(table, dtype=torch.int64, device=rows.device),
            tensors=rows.tensors,
            dtype=dtype,
            width=width,
            block_size=rows.block_size,
            num_blocks=rows.num_blocks,
            block_bytes=_align(scales + num_rows * rows.block_size * SCALE_BYTES, MAX_WORD_BYTES),
            value_alignment=math.gcd(MAX_WORD_BYTES, *places),
            code_alignment=math.gcd(MAX_WORD_BYTES, width),
            device=rows.device,
        )


def _align(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
