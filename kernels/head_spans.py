"""Which heads a rank holds, and where each head of a token is: what conversions are built from."""

from bisect import bisect_right
from dataclasses import dataclass

from .rows import RowLayout, RowPart


@dataclass(frozen=True, slots=True)
class HeadSpan:
    """One head of one part of every token; a latent counts as one head.

    Attributes:
        part: whose head it is.
        segment: index of the part in the row.
        head: index of the head in the part, from 0 on this rank.
        base_address: of token 0 of block 0.
        block_stride: between two blocks, in bytes.
        token_stride: between two tokens of a block, in bytes.
        nbytes: of one token.
    """

    part: RowPart
    segment: int
    head: int
    base_address: int
    block_stride: int
    token_stride: int
    nbytes: int


def head_spans(rows: RowLayout) -> list[HeadSpan]:
    """Return the spans of all heads, in the order of the row."""
    starts = [piece.row_offset for piece in rows.pieces]
    spans = []
    for segment, part in enumerate(rows.parts):
        nbytes = part.shape[-1] * part.dtype.itemsize
        for head in range(num_heads(part)):
            offset = part.row_offset + head * nbytes
            # a head's numbers are adjacent in the cache, so one piece holds them all
            piece = rows.pieces[bisect_right(starts, offset) - 1]
            spans.append(
                HeadSpan(
                    part=part,
                    segment=segment,
                    head=head,
                    base_address=piece.base_address + offset - piece.row_offset,
                    block_stride=piece.block_stride,
                    token_stride=piece.token_stride,
                    nbytes=nbytes,
                )
            )
    return spans


def num_heads(part: RowPart) -> int:
    """Return the heads of *part* on this rank; a latent counts as one."""
    return part.shape[0] if len(part.shape) == 2 else 1


def heads_of_rank(total_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the first head and the number of heads that a tensor-parallel rank holds.

    With more ranks than heads, neighbouring ranks hold copies of one head (GQA replicas).

    Args:
        total_heads: KV heads of the model.
        tp_size: ranks.
        tp_rank: 0 to ``tp_size - 1``.

    Raises:
        ValueError: the heads cannot be shared out evenly, or there is no such rank.
    """
    if total_heads < 1 or tp_size < 1 or (total_heads % tp_size and tp_size % total_heads):
        raise ValueError(
            "total_heads must be a multiple of tp_size, or tp_size of total_heads; "
            f"got {total_heads} heads and {tp_size} ranks"
        )
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank must be in 0..{tp_size - 1}; got {tp_rank}")
    if total_heads >= tp_size:
        count = total_heads // tp_size
        return tp_rank * count, count
    return tp_rank // (tp_size // total_heads), 1


def check_head_share(
    rows: RowLayout, total_heads: int | None, head_first: int
) -> tuple[int | None, int]:
    """Return the model's heads and this rank's, of the keys and values of *rows*.

    Args:
        rows: the cache of one rank.
        total_heads: KV heads of the model; this rank's if None.
        head_first: the first head of the model that this rank holds.

    Returns:
        ``(None, 1)`` of a group of latents, which every rank holds whole.

    Raises:
        ValueError: keys and values have different heads, or the rank's heads lie outside the model's.
    """
    counts = {num_heads(part) for part in rows.parts if part.name != "latent"}
    if not counts:
        if total_heads not in (None, 1) or head_first:
            raise ValueError(
                f"a latent must be given no heads; got heads from {head_first} of {total_heads}"
            )
        return None, 1
    if len(counts) > 1:
        raise ValueError(f"rows must have equally many heads in all layers; got {sorted(counts)}")
    count = counts.pop()
    total = count if total_heads is None else total_heads
    if head_first < 0 or head_first + count > total:
        raise ValueError(
            f"head_first must be in 0..{total - count} for {count} of {total} heads; "
            f"got {head_first}"
        )
    return total, count
