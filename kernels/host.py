"""Move chunks in host memory: pages of a CPU cache <-> a part of a blob.

Segments of one size at equal distances in one storage, as an engine lays its layers out, form a
*plane*: one strided array ``[NB, segments, page]``, of which a block is one assignment. Whatever is
left is copied page by page. Every bulk copy lets go of the interpreter lock, and few large ones beat
many small ones twice: each hand-over of the lock can cost a busy engine thread's time slice.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .host_runs import host_memory
from .layout import BlockIds, BlockLayout, Segment

ENOUGH_BLOCKS = 4
"""Blocks from which a scatter to separate storages is one call per segment; perf/bench_scatter.py."""


@dataclass(frozen=True, slots=True)
class _Plane:
    """Equally spaced segments of one size.

    Attributes:
        pages: ``[NB, count, nbytes]`` uint8, strided; the memory belongs to the layout's tensors.
        blob_offset: of the first segment in a block's share of a part, in bytes.
        blob_stride: between two of its segments there, in bytes.
    """

    pages: npt.NDArray[np.uint8]
    blob_offset: int
    blob_stride: int


class HostMover:
    """Gathers blocks into parts and scatters them back, for one group of a CPU cache.

    Threads:
        Any number at once, as long as no two touch the same bytes. The bulk of a move runs without
        the interpreter lock.

    Ownership:
        Keeps the layout, and so the cache, alive. The memory of parts belongs to the caller.

    Source:
        Meaning ``kernels/reference.py::gather_chunk`` and ``scatter_chunk``.
    """

    def __init__(self, layout: BlockLayout) -> None:
        """Fold *layout* into planes.

        Raises:
            ValueError: the cache is not in host memory.
        """
        if layout.device.type != "cpu":
            raise ValueError(f"a host move needs a cache on cpu; got one on {layout.device}")
        self.layout = layout
        self._planes, self._loose = _fold(layout)
        # a lone page per storage is cheapest to take as a row of its array
        self._rows = [_pages_of(layout, [segment])[:, 0] for segment in self._loose]

    def gather(self, block_ids: BlockIds, first: int, dst_address: int) -> None:
        """Copy block ``block_ids[i]`` to place ``first + i`` of the part at *dst_address*.

        Args:
            block_ids: ``[N]`` block numbers; repeats allowed.
            first: place of the first block inside the chunk; other places keep what they held.
            dst_address: start of a part of ``layout.part_bytes`` bytes.

        Raises:
            ValueError: an argument is out of range; no byte has moved.

        Units:
            Moves ``2 * N * layout.block_bytes`` bytes (each byte read once, written once).
        """
        ids = self.layout.check_blocks(block_ids, first)
        self.move(ids, first, _check_address(dst_address), is_load=False)

    def scatter(self, src_address: int, first: int, block_ids: BlockIds) -> None:
        """Copy place ``first + i`` of the part at *src_address* to block ``block_ids[i]``.

        The inverse of :meth:`gather`. Of a repeated block the last place wins.

        Raises:
            ValueError: an argument is out of range; no byte has moved.
        """
        ids = self.layout.check_blocks(block_ids, first)
        self.move(ids, first, _check_address(src_address), is_load=True)

    def move(
        self, block_ids: npt.NDArray[np.int64], first: int, address: int, *, is_load: bool
    ) -> None:
        """Gather, or scatter if *is_load*. Arguments are trusted: a queue checks a job at once."""
        if not block_ids.size:
            return
        ids: list[int] = block_ids.tolist()
        block_bytes = self.layout.block_bytes
        place = address + first * block_bytes
        part = host_memory(place, len(ids) * block_bytes)
        for plane in self._planes:
            _move_plane(plane, ids, part, block_bytes, is_load)
        if not self._loose:
            return
        if is_load and len(ids) >= ENOUGH_BLOCKS:
            self._spread(block_ids, part)
        elif is_load or self._planes:
            self._move_loose(ids, place, is_load)
        else:
            self._concatenate(ids, part)

    def _concatenate(self, ids: list[int], part: "memoryview[int]") -> None:
        """Gather from separate storages: one call per block."""
        blob = np.frombuffer(part, np.uint8).reshape(len(ids), self.layout.block_bytes)
        for row, block_id in zip(blob, ids, strict=True):
            np.concatenate([pages[block_id] for pages in self._rows], out=row)

    def _spread(self, block_ids: npt.NDArray[np.int64], part: "memoryview[int]") -> None:
        """Scatter to the segments that no plane covers, many blocks: one call per segment."""
        block_bytes = self.layout.block_bytes
        for segment, pages in zip(self._loose, self._rows, strict=True):
            # an item as large as a page makes an index assignment one memcpy per page
            page = np.dtype((np.void, segment.nbytes))
            shape, start = (block_ids.size,), segment.blob_offset
            blob: npt.NDArray[np.void] = np.ndarray(shape, page, part, start, (block_bytes,))
            pages.view(page)[:, 0][block_ids] = blob

    def _move_loose(self, ids: list[int], place: int, is_load: bool) -> None:
        """Copy, page by page, the segments that no plane covers."""
        memmove, block_bytes = ctypes.memmove, self.layout.block_bytes
        for segment in self._loose:
            blob = place + segment.blob_offset
            for block_id in ids:
                page = segment.base_address + block_id * segment.block_stride
                if is_load:
                    memmove(page, blob, segment.nbytes)
                else:
                    memmove(blob, page, segment.nbytes)
                blob += block_bytes


def _move_plane(
    plane: _Plane,
    ids: list[int],
    part: "memoryview[int]",
    block_bytes: int,
    is_load: bool,
) -> None:
    """Copy one plane of every block: one assignment per block, or one for a run of blocks."""
    pages, count = plane.pages, len(ids)
    blob: npt.NDArray[np.uint8] = np.ndarray(
        (count, *pages.shape[1:]),
        np.uint8,
        part,
        plane.blob_offset,
        (block_bytes, plane.blob_stride, 1),
    )
    start = ids[0]
    if ids == list(range(start, start + count)):
        if is_load:
            pages[start : start + count] = blob
        else:
            blob[:] = pages[start : start + count]
        return
    for row, block_id in enumerate(ids):
        if is_load:
            pages[block_id] = blob[row]
        else:
            blob[row] = pages[block_id]


def _fold(layout: BlockLayout) -> tuple[list[_Plane], list[Segment]]:
    """Split the segments into planes and the loose rest."""
    starts = sorted({tensor.untyped_storage().data_ptr() for tensor in layout.tensors})
    alike: dict[tuple[int, int, int], list[Segment]] = {}
    for segment in layout.segments:
        storage = bisect_right(starts, segment.base_address)
        key = storage, segment.block_stride, segment.nbytes
        alike.setdefault(key, []).append(segment)
    planes: list[_Plane] = []
    loose: list[Segment] = []
    if len(layout.segments) == 1:
        return [_Plane(_pages_of(layout, layout.segments), 0, layout.block_bytes)], []
    for segments in alike.values():
        offsets = {b.blob_offset - a.blob_offset for a, b in pairwise(segments)}
        steps = {b.base_address - a.base_address for a, b in pairwise(segments)}
        if len(offsets) == 1 and len(steps) == 1 and min(steps) > 0:
            planes.append(
                _Plane(_pages_of(layout, segments), segments[0].blob_offset, offsets.pop())
            )
        else:
            loose.extend(segments)
    return planes, sorted(loose, key=lambda segment: segment.blob_offset)


def _pages_of(layout: BlockLayout, segments: Sequence[Segment]) -> npt.NDArray[np.uint8]:
    """View equally spaced segments as ``[NB, count, nbytes]``."""
    one, count = segments[0], len(segments)
    step = segments[1].base_address - one.base_address if count > 1 else one.nbytes
    span = (layout.num_blocks - 1) * one.block_stride + (count - 1) * step + one.nbytes
    shape = layout.num_blocks, count, one.nbytes
    strides = one.block_stride, step, 1
    return np.ndarray(shape, np.uint8, host_memory(one.base_address, span), 0, strides)


def _check_address(address: int) -> int:
    """Return *address* unless it cannot be one."""
    if not isinstance(address, int) or isinstance(address, bool) or not 0 < address < 1 << 64:
        raise ValueError(f"a part's address must be a positive integer; got {address!r}")
    return address
