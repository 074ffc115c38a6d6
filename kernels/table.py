"""What one launch needs to know: segment tables on the device, and 16 bytes of metadata per block.

A table is made once, at registration. Per transfer only the entries change:

    word 0    63        56 55     48 47              28 27              0
              [  blocks  ] [ place ] [    blob id     ] [   block id    ]
    word 1    address of the block's own bytes in its frame

``blocks`` is the number of blocks that the transfer moves of this blob, holes not counted: whoever
computes the blob's checksum counts down from it. A hole has every bit of its block id set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from .checksum import VECTOR_BYTES, position_keys
from .layout import BlockLayout

HOLE = -1
"""A block id that moves nothing: its bytes in the frame, or in the cache, stay as they are."""

MAX_GROUPS = 16
"""KV cache groups of one launch: a kernel looks its group up in a table of this many rows at most."""

MAX_UNITS = 1 << 31
"""Tiles of all entries of one launch: kernels count them in 32 bits."""

MAX_KEPT_COUNTS = 4096
"""Group tables that are kept for one size of tiles, 512 bytes of a device each."""

MIN_TILE_BYTES = 1024
"""The smallest tile: one warp's worth of two 16-byte words a thread."""

BLOB_SHIFT, PLACE_SHIFT, COUNT_SHIFT = 28, 48, 56
BLOCK_MASK = (1 << BLOB_SHIFT) - 1
MAX_BLOCK_ID = BLOCK_MASK - 1
MAX_BLOB_ID = (1 << (PLACE_SHIFT - BLOB_SHIFT)) - 1
MAX_PLACE = (1 << (COUNT_SHIFT - PLACE_SHIFT)) - 1
MAX_BLOCKS_PER_BLOB = 255

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The segments cut into pieces of at most ``tile_bytes``: the units of work of a kernel.

    Attributes:
        table: ``[tiles, 4]`` int64 on the device, groups one after the other, in blob order: address
            of block 0's bytes, block stride, offset in the block's share of a blob, bytes.
        first: per group, its first row in the table.
        count: per group, how many tiles one block has.
        tile_bytes: the size of a full tile; the last one of a segment may be shorter.
        keyed: the same table for the copy kernels: the upper half of a row's last word holds the
            checksum's key of its offset.
    """

    table: torch.Tensor
    first: tuple[int, ...]
    count: tuple[int, ...]
    tile_bytes: int
    keyed: torch.Tensor
    _groups: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict, repr=False)

    def groups(self, counts: Sequence[int]) -> torch.Tensor:
        """Return where each group's work starts, for a launch of *counts* entries per group.

        Kept for the next launch of the same counts, so that what serves in a steady rhythm, or is
        captured in a graph, copies nothing but its entries. What is kept once is kept for good: a
        launch on another stream, or a graph, may still read it.

        Returns:
            ``[groups, 3]`` int64 on the device: entries, first tile, tiles of one block.
        """
        key = tuple(counts)
        found = self._groups.get(key)
        if found is None:
            rows = list(zip(key, self.first, self.count, strict=True))
            found = torch.tensor(rows, dtype=torch.int64).to(self.table.device)
            if len(self._groups) < MAX_KEPT_COUNTS:
                # two threads that come first together must not drop what the other launches with
                found = self._groups.setdefault(key, found)
        return found


class LayoutTable:
    """The segments of all groups of a cache, as tables on the cache's device.

    Ownership:
        Keeps the layouts, and so the cache, alive: addresses in the tables stay valid.

    Threads:
        Any number at once.

    Attributes:
        layouts: one per group; groups may share tensors.
        device: where the cache and the tables live.
        alignment: every address, stride, size and offset in the tables is a multiple of it, in bytes.
        block_bytes: per group, payload of one block in bytes.
        has_whole_vectors: every segment's size is a multiple of 16 bytes, as copy kernels need it that
            compute checksums.
        largest_segment: over all groups, in bytes.
        num_segments: over all groups.
        segments: ``[num_segments, 4]`` int64 on the device, groups one after the other: base address,
            block stride, bytes, offset in the block's share of a blob.
        place_keys: ``[groups, 256]`` int32 on the device: the checksum's key of each place.
    """

    __slots__ = (
        "_tiles", "alignment", "block_bytes", "device", "has_whole_vectors", "largest_segment",
        "layouts", "num_segments", "place_keys", "segments",
    )  # fmt: skip

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        """Build the tables and copy them to the device.

        Raises:
            ValueError: there are no groups, too many of them, or they live on different devices.
        """
        if not 0 < len(layouts) <= MAX_GROUPS:
            raise ValueError(f"layouts must be 1..{MAX_GROUPS} groups; got {len(layouts)}")
        devices = {layout.device for layout in layouts}
        if len(devices) > 1:
            names = sorted(map(str, devices))
            raise ValueError(f"layouts must live on one device; got {', '.join(names)}")
        self.layouts = tuple(layouts)
        self.device = devices.pop()
        self.alignment = min(layout.alignment for layout in layouts)
        self.block_bytes = tuple(layout.block_bytes for layout in layouts)
        rows = [
            (segment.base_address, segment.block_stride, segment.nbytes, segment.blob_offset)
            for layout in layouts
            for segment in layout.segments
        ]
        self.num_segments = len(rows)
        self.largest_segment = max(nbytes for _, _, nbytes, _ in rows)
        self.has_whole_vectors = all(nbytes % VECTOR_BYTES == 0 for _, _, nbytes, _ in rows)
        self.segments = torch.tensor(rows, dtype=torch.int64, device=self.device)
        places = np.arange(MAX_PLACE + 1, dtype=np.int64)
        keys = [position_keys(places * nbytes).view(np.int32) for nbytes in self.block_bytes]
        self.place_keys = torch.from_numpy(np.stack(keys)).to(self.device)
        self._tiles: dict[int, Tiles] = {}

    @classmethod
    def from_layouts(cls, layouts: Sequence[BlockLayout]) -> "LayoutTable":
        """Return the tables of *layouts*, one layout per group."""
        return cls(layouts)

    def tiles(self, tile_bytes: int) -> Tiles:
        """Return the segments cut into tiles; made at the first call for this size, then kept.

        Args:
            tile_bytes: a power of two, at least ``MIN_TILE_BYTES``.

        Raises:
            ValueError: *tile_bytes* is neither.
        """
        found = self._tiles.get(tile_bytes)
        if found is None:
            # two threads that come first together make the same tiles; either set may stay
            found = self._tiles.setdefault(tile_bytes, self._cut(tile_bytes))
        return found

    def _cut(self, tile_bytes: int) -> Tiles:
        if tile_bytes < MIN_TILE_BYTES or tile_bytes & (tile_bytes - 1):
            raise ValueError(
                f"tile_bytes must be a power of two, at least {MIN_TILE_BYTES}; got {tile_bytes}"
            )
        rows: list[tuple[int, int, int, int]] = []
        first = []
        for layout in self.layouts:
            first.append(len(rows))
            rows += [
                (
                    segment.base_address + start,
                    segment.block_stride,
                    segment.blob_offset + start,
                    min(tile_bytes, segment.nbytes - start),
                )
                for segment in layout.segments
                for start in range(0, segment.nbytes, tile_bytes)
            ]
        ends = [*first[1:], len(rows)]
        table = np.array(rows, dtype=np.int64)
        keyed = table.copy()
        keyed[:, 3] |= position_keys(table[:, 2]).astype(np.int64) << 32
        return Tiles(
            table=torch.from_numpy(table).to(self.device),
            keyed=torch.from_numpy(keyed).to(self.device),
            first=tuple(first),
            count=tuple(end - start for start, end in zip(first, ends, strict=True)),
            tile_bytes=tile_bytes,
        )


def pack_entries(
    table: LayoutTable,
    block_ids: Int64s,
    addresses: Int64s,
    counts: Sequence[int],
    blob_ids: Int64s | None = None,
    places: Int64s | None = None,
) -> Int64s:
    """Pack the metadata of one transfer, 16 bytes per block, to be copied to the device.

    Args:
        table: of the cache that the blocks are in.
        block_ids: ``[N]`` int64, groups one after the other; ``HOLE`` moves nothing.
        addresses: ``[N]`` int64, where each block's own bytes are in its frame (start of the part plus
            ``place * block_bytes``); that of a hole is ignored.
        counts: entries of each group, in the order of the table's groups; they sum to N.
        blob_ids: ``[N]`` int64, number of each entry's blob within this transfer, for checksums and
            flags. A blob belongs to one group.
        places: ``[N]`` int64, place of each entry's block in its chunk; given with *blob_ids*.

    Returns:
        ``[N, 2]`` int64 in host memory, owned by the caller.

    Raises:
        ValueError: an argument is out of range, or misaligned for this table; the message says which.
    """
    ids = _int64s("block_ids", block_ids)
    words = _int64s("addresses", addresses, ids.size)
    if len(counts) != len(table.layouts) or min(counts) < 0 or sum(counts) != ids.size:
        raise ValueError(
            f"counts must be {len(table.layouts)} numbers of entries, one for each group, "
            f"that sum to {ids.size}; got {list(counts)}"
        )
    is_moved = ids != HOLE
    _check_block_ids(table, ids, counts)
    moved = words[is_moved]
    if moved.size and (moved.min() <= 0 or np.bitwise_or.reduce(moved) & (table.alignment - 1)):
        wrong = moved[(moved <= 0) | (moved % table.alignment != 0)][0]
        raise ValueError(f"addresses must be positive multiples of {table.alignment}; got {wrong}")
    entries = np.empty((ids.size, 2), np.int64)
    np.bitwise_and(ids, BLOCK_MASK, out=entries[:, 0])
    entries[:, 1] = words
    if (blob_ids is None) != (places is None):
        raise ValueError("blob_ids and places must be given together; got one of them")
    if blob_ids is not None and places is not None:
        blobs = _int64s("blob_ids", blob_ids, ids.size)
        rows = _int64s("places", places, ids.size)
        entries[:, 0] |= _pack_blobs(blobs, rows, is_moved, counts)
    return entries


def _check_block_ids(table: LayoutTable, ids: Int64s, counts: Sequence[int]) -> None:
    """Raise unless every id is that of a hole, or exists in its group."""
    start = 0
    for group, (layout, count) in enumerate(zip(table.layouts, counts, strict=True)):
        of_group, start = ids[start : start + count], start + count
        limit = min(layout.num_blocks, MAX_BLOCK_ID + 1)
        if not _is_within(of_group, HOLE, limit - 1):
            wrong = of_group[(of_group < HOLE) | (of_group >= limit)][0]
            raise ValueError(
                f"block_ids of group {group} must be {HOLE} or in 0..{limit - 1}; got {wrong}"
            )


def _pack_blobs(
    blobs: Int64s, places: Int64s, is_moved: npt.NDArray[np.bool_], counts: Sequence[int]
) -> Int64s:
    """Return the upper 36 bits of word 0."""
    for name, values, largest in (("blob_ids", blobs, MAX_BLOB_ID), ("places", places, MAX_PLACE)):
        if not _is_within(values, 0, largest):
            wrong = values[(values < 0) | (values > largest)][0]
            raise ValueError(f"{name} must be in 0..{largest}; got {wrong}")
    if not blobs.size:
        return blobs
    per_blob = np.bincount(blobs[is_moved], minlength=int(blobs.max()) + 1)
    if per_blob.max() > MAX_BLOCKS_PER_BLOB:
        raise ValueError(
            f"blob_ids must name each blob at most {MAX_BLOCKS_PER_BLOB} times; "
            f"got {per_blob.max()} times {per_blob.argmax()}"
        )
    if len(counts) > 1:
        groups = np.repeat(np.arange(len(counts)), counts)
        group_of = np.zeros(per_blob.size, np.int64)
        group_of[blobs] = groups
        is_shared = group_of[blobs] != groups
        if is_shared.any():
            shared = blobs[is_shared][0]
            raise ValueError(f"blob_ids must keep each blob to one group; got blob {shared} in two")
    # in unsigned arithmetic: 128 blocks or more reach the sign bit
    upper = per_blob.astype(np.uint64)[blobs] << np.uint64(COUNT_SHIFT)
    lower = (places << PLACE_SHIFT) | (blobs << BLOB_SHIFT)
    return upper.view(np.int64) | lower


def _is_within(values: Int64s, first: int, last: int) -> bool:
    """Return whether all values are in first..last; an empty array's are."""
    return not values.size or bool(values.min() >= first and values.max() <= last)


def _int64s(name: str, values: Int64s, size: int | None = None) -> Int64s:
    """Return *values* after checking their type and length; nothing is converted."""
    if values.dtype != np.int64 or values.ndim != 1 or size not in (None, values.size):
        wanted = "N" if size is None else size
        raise ValueError(
            f"{name} must be int64 [{wanted}]; got {values.dtype} {list(values.shape)}"
        )
    return values
