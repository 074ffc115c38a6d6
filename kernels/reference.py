"""Pure-torch twins of the moves: same arguments, no cleverness.

A twin is the definition of its move. Tests compare bit for bit; perf scripts use it as the slowest
baseline. Change a twin only when the meaning changes.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .checksum import SEED, VECTOR_BYTES, checksum_share
from .layout import BlockIds, BlockLayout
from .reference_memory import bytes_of
from .table import BLOB_SHIFT, BLOCK_MASK, MAX_BLOB_ID, MAX_PLACE, PLACE_SHIFT, LayoutTable


def gather_chunk(layout: BlockLayout, block_ids: BlockIds, first: int, address: int) -> None:
    """Copy block ``block_ids[i]`` to place ``first + i`` of the part at *address*."""
    part = _bytes_at(address, layout.part_bytes)
    for place, block_id in enumerate(block_ids, start=first):
        for segment, tensor in zip(layout.segments, layout.tensors, strict=True):
            start = place * layout.block_bytes + segment.blob_offset
            page = tensor[int(block_id), : segment.nbytes]
            part[start : start + segment.nbytes] = page.view(torch.uint8)


def scatter_chunk(layout: BlockLayout, block_ids: BlockIds, first: int, address: int) -> None:
    """Copy place ``first + i`` of the part at *address* to block ``block_ids[i]``, in order."""
    part = _bytes_at(address, layout.part_bytes)
    for place, block_id in enumerate(block_ids, start=first):
        for segment, tensor in zip(layout.segments, layout.tensors, strict=True):
            start = place * layout.block_bytes + segment.blob_offset
            page = tensor[int(block_id), : segment.nbytes]
            page.view(torch.uint8)[:] = part[start : start + segment.nbytes]


def gather_blocks(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    *,
    checksums: torch.Tensor | None = None,
    done: torch.Tensor | None = None,
) -> None:
    """Copy each entry's block to its address, then write checksums and flags of complete blobs.

    Args:
        table: of the cache; its addresses are read through the layouts' tensors.
        entries: ``[N, 2]`` int64, see `table.py`; addresses of host memory.
        counts: entries of each group.
        checksums: ``[B]`` int64, or None.
        done: ``[B]`` int32, or None.
    """
    shares: dict[int, int] = {}
    for entry in _entries(table, entries, counts):
        frame = _bytes_at(entry.address, entry.layout.block_bytes)
        for page, part in _pages(entry, frame):
            part.copy_(page)
        _count_share(shares, entry, frame)
    for blob, share in shares.items():
        if checksums is not None:
            checksums[blob] = _as_int64(SEED + share)
        if done is not None:
            done[blob] = 1


def scatter_blocks(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    *,
    checksums: torch.Tensor | None = None,
    mismatch: torch.Tensor | None = None,
    done: torch.Tensor | None = None,
) -> None:
    """Copy each entry's block from its address, in order, then compare checksums and write flags.

    Arguments as of :func:`gather_blocks`; *mismatch* ``[B]`` int32, given with *checksums*, gets 1 where
    one differs.
    """
    shares: dict[int, int] = {}
    for entry in _entries(table, entries, counts):
        frame = _bytes_at(entry.address, entry.layout.block_bytes)
        for page, part in _pages(entry, frame):
            page.copy_(part)
        _count_share(shares, entry, frame)
    for blob, share in shares.items():
        if checksums is not None and int(checksums[blob]) != _as_int64(SEED + share):
            assert mismatch is not None
            mismatch[blob] = 1
        if done is not None:
            done[blob] = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    """One block of a transfer, unpacked."""

    layout: BlockLayout
    block_id: int
    blob_id: int
    place: int
    address: int


def _entries(table: LayoutTable, entries: torch.Tensor, counts: Sequence[int]) -> Iterator[_Entry]:
    """Unpack the entries that are no holes."""
    start = 0
    for layout, count in zip(table.layouts, counts, strict=True):
        for word, address in entries[start : start + count].tolist():
            if word & BLOCK_MASK != BLOCK_MASK:
                blob_id = (word >> BLOB_SHIFT) & MAX_BLOB_ID
                place = (word >> PLACE_SHIFT) & MAX_PLACE
                yield _Entry(layout, word & BLOCK_MASK, blob_id, place, address)
        start += count


def _pages(entry: _Entry, frame: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each segment's bytes in the cache and in the frame."""
    for segment in entry.layout.segments:
        address = segment.base_address + entry.block_id * segment.block_stride
        end = segment.blob_offset + segment.nbytes
        page = bytes_of(entry.layout.tensors, address, segment.nbytes)
        yield page, frame[segment.blob_offset : end]


def _count_share(shares: dict[int, int], entry: _Entry, frame: torch.Tensor) -> None:
    """Add a block's share to its blob's checksum."""
    position = entry.place * entry.layout.block_bytes
    share = 0 if position % VECTOR_BYTES else checksum_share(frame.numpy(), position)
    shares[entry.blob_id] = shares.get(entry.blob_id, 0) + share


def _as_int64(value: int) -> int:
    """Return the number whose 64 bits are those of *value* mod 2**64, as torch holds them."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """View host memory as a uint8 tensor."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
