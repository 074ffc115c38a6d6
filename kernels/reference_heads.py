"""Pure-torch twins of the moves that know tokens and heads; each is the definition of its move."""

import torch

from .head_runs import HeadRuns
from .reference_memory import bytes_of
from .rows import RowLayout


def gather_slots(rows: RowLayout, slot_mapping: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy the row of token ``slot_mapping[i]`` to ``dst[i]``, ``[T, row_bytes]`` uint8."""
    for row, slot in zip(dst, slot_mapping.tolist(), strict=True):
        for piece_bytes, row_bytes in _pieces(rows, slot, row):
            row_bytes.copy_(piece_bytes)


def scatter_slots(rows: RowLayout, slot_mapping: torch.Tensor, src: torch.Tensor) -> None:
    """Copy ``src[i]`` to the row of token ``slot_mapping[i]``, in order."""
    for row, slot in zip(src, slot_mapping.tolist(), strict=True):
        for piece_bytes, row_bytes in _pieces(rows, slot, row):
            piece_bytes.copy_(row_bytes)


def _pieces(
    rows: RowLayout, slot: int, row: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each piece of a token in the cache with its place in a row; none if the slot is -1."""
    if slot < 0:
        return []
    block, token = divmod(slot, rows.block_size)
    return [
        (
            bytes_of(
                rows.tensors,
                piece.base_address + block * piece.block_stride + token * piece.token_stride,
                piece.nbytes,
            ),
            row[piece.row_offset : piece.row_offset + piece.nbytes],
        )
        for piece in rows.pieces
    ]


def gather_heads(
    runs: HeadRuns,
    block_ids: list[int],
    blobs: torch.Tensor,
    head_first: int = 0,
    head_count: int | None = None,
) -> None:
    """Copy heads of block ``block_ids[i]`` into ``blobs[i]``, ``[N, block_bytes]`` uint8."""
    for block, blob in zip(block_ids, blobs, strict=True):
        for page_bytes, blob_bytes in _fragments(runs, block, blob, head_first, head_count):
            blob_bytes.copy_(page_bytes)


def scatter_heads(
    runs: HeadRuns,
    block_ids: list[int],
    blobs: torch.Tensor,
    head_first: int = 0,
    head_count: int | None = None,
) -> None:
    """Copy heads of ``blobs[i]`` into block ``block_ids[i]``, in order."""
    for block, blob in zip(block_ids, blobs, strict=True):
        for page_bytes, blob_bytes in _fragments(runs, block, blob, head_first, head_count):
            page_bytes.copy_(blob_bytes)


def _fragments(
    runs: HeadRuns, block: int, blob: torch.Tensor, head_first: int, head_count: int | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each fragment of a block's page with its place in a blob; none if the block is -1."""
    if block < 0:
        return []
    return [
        (
            bytes_of(
                runs.tensors,
                run.base_address + block * run.block_stride + i * run.local_stride,
                run.fragment_bytes,
            ),
            blob[run.blob_offset + i * run.blob_stride :][: run.fragment_bytes],
        )
        for run in runs.within(head_first, head_count)
        for i in range(run.num_fragments)
    ]
