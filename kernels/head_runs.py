"""Where the bytes of a page go in a canonical blob: strided runs, and the boxes a kernel moves.

A blob in canonical order says nothing about how many ranks wrote it: each rank puts its heads where
the whole model's heads are, and any rank of any number of ranks finds its own there.

    without an engine's word    [segment][head of the model][token][dim], a segment per part of a row
    under vLLM                  as its ``CopyRun`` tables say (``canonical_format_id`` names the order)

For the device, runs are folded into boxes (``head_boxes.py``) and boxes are cut into tiles, the units of
work of a kernel.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .head_boxes import EVERY_HEAD, Box, HeadRun, fold
from .head_spans import check_head_share, head_spans
from .layout import MAX_WORD_BYTES, BlockLayout, refuse_copy
from .rows import RowLayout


class CopyRun(Protocol):
    """A strided run between a page and its canonical page; vLLM's class of this name is one."""

    @property
    def local_offset(self) -> int:
        """Where fragment 0 is in this rank's page, in bytes."""
        ...

    @property
    def canonical_offset(self) -> int:
        """Where fragment 0 is in the canonical page, in bytes."""
        ...

    @property
    def fragment_size(self) -> int:
        """Bytes of one fragment."""
        ...

    @property
    def num_fragments(self) -> int:
        """How many fragments there are."""
        ...

    @property
    def local_stride(self) -> int:
        """Between two fragments of the page, in bytes."""
        ...

    @property
    def canonical_stride(self) -> int:
        """Between two fragments of the canonical page, in bytes."""
        ...


class PageMapping(Protocol):
    """How one page maps into its canonical page; vLLM's ``CanonicalPageMapping`` is one."""

    @property
    def canonical_page_size_bytes(self) -> int:
        """Bytes of the canonical page."""
        ...

    @property
    def runs(self) -> Sequence[CopyRun]:
        """What goes where."""
        ...


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """The boxes of a head range cut into tiles.

    Attributes:
        table: ``[tiles, 8]`` int64 on the device: address in block 0 and block stride; offset in the
            blob; first lane of the tile and, in the upper half, end lane of its box; distance of two
            fragments locally and in the blob; distance of two groups, likewise. Bytes.
        count: tiles of one block.
        lane_bytes: 16, 8, 4, 2 or 1; smaller than the alignment of all runs where a range of heads is.
        fragment_lanes: lanes of one fragment.
        fragments: of one group.
        tile_lanes: lanes of a full tile.
    """

    table: torch.Tensor
    count: int
    lane_bytes: int
    fragment_lanes: int
    fragments: int
    tile_lanes: int


class HeadRuns:
    """All runs of one KV cache group on one rank.

    Ownership:
        Keeps the tensors alive: addresses in the tables stay valid.

    Threads:
        Any number at once.

    Attributes:
        runs: as they were built.
        tensors: the cache.
        num_blocks: blocks in the cache.
        block_bytes: a block's share of a canonical blob, all heads of the model, in bytes.
        total_heads: of the model; None if the runs do not say which head they are of.
        alignment: the largest word, of 16, 8, 4, 2 or 1 bytes, that all runs together are made of. A
            block's share of a blob must begin at a multiple of it.
        device: where the cache and the tables live.
    """

    __slots__ = (
        "_tiles", "alignment", "block_bytes", "device", "num_blocks", "runs", "tensors", "total_heads",
    )  # fmt: skip

    __reduce_ex__ = refuse_copy

    def __init__(
        self,
        runs: Iterable[HeadRun],
        tensors: tuple[torch.Tensor, ...],
        *,
        num_blocks: int,
        block_bytes: int,
        total_heads: int | None,
    ) -> None:
        """Keep *runs*; the class methods build them."""
        self.runs = tuple(runs)
        self.tensors = tensors
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.total_heads = total_heads
        self.device = tensors[0].device
        # folded, because what is contiguous on both sides is as good as one long fragment
        self.alignment = _alignment(fold(self.runs), block_bytes)
        self._tiles: dict[tuple[int, int, int], HeadTiles] = {}

    @classmethod
    def from_rows(
        cls, rows: RowLayout, *, total_heads: int | None = None, head_first: int = 0
    ) -> "HeadRuns":
        """Build the runs of blobs in the order ``[segment][head][token][dim]``.

        Args:
            rows: the cache of this rank; each of its parts is a segment.
            total_heads: KV heads of the model; this rank's if None.
            head_first: the first head of the model that this rank holds.

        Raises:
            ValueError: the rank's heads lie outside the model's.
        """
        total, _ = check_head_share(rows, total_heads, head_first)
        starts, block_bytes = [], 0
        for part in rows.parts:
            starts.append(block_bytes)
            heads = total if total is not None and part.name != "latent" else 1
            block_bytes += heads * rows.block_size * part.shape[-1] * part.dtype.itemsize
        runs = []
        for span in head_spans(rows):
            is_latent = span.part.name == "latent"
            place = 0 if is_latent else head_first + span.head
            runs.append(
                HeadRun(
                    base_address=span.base_address,
                    block_stride=span.block_stride,
                    blob_offset=starts[span.segment] + place * rows.block_size * span.nbytes,
                    fragment_bytes=span.nbytes,
                    num_fragments=rows.block_size,
                    local_stride=span.token_stride,
                    blob_stride=span.nbytes,
                    head=EVERY_HEAD if is_latent else place,
                )
            )
        return cls(
            runs,
            rows.tensors,
            num_blocks=rows.num_blocks,
            block_bytes=block_bytes,
            total_heads=total,
        )

    @classmethod
    def from_copy_runs(cls, layout: BlockLayout, mappings: Sequence[PageMapping]) -> "HeadRuns":
        """Build the runs that an engine's own tables say; canonical pages lie one after the other.

        Args:
            layout: the pages of this rank, one segment per mapping.
            mappings: of each page, in the order of the segments.

        Raises:
            ValueError: a run leaves its page or its canonical page; the message names the mapping.
        """
        if len(mappings) != len(layout.segments):
            raise ValueError(
                f"mappings must be {len(layout.segments)}, one for each segment; got {len(mappings)}"
            )
        runs, start = [], 0
        for index, (segment, mapping) in enumerate(zip(layout.segments, mappings, strict=True)):
            for run in mapping.runs:
                _check_copy_run(index, run, segment.nbytes, mapping.canonical_page_size_bytes)
                runs.append(
                    HeadRun(
                        base_address=segment.base_address + run.local_offset,
                        block_stride=segment.block_stride,
                        blob_offset=start + run.canonical_offset,
                        fragment_bytes=run.fragment_size,
                        num_fragments=run.num_fragments,
                        local_stride=run.local_stride,
                        blob_stride=run.canonical_stride,
                    )
                )
            start += mapping.canonical_page_size_bytes
        return cls(
            runs,
            layout.tensors,
            num_blocks=layout.num_blocks,
            block_bytes=start,
            total_heads=None,
        )

    def check_heads(self, head_first: int, head_count: int | None) -> tuple[int, int]:
        """Return the head range as two numbers; all heads of the model are ``(0, -1)``.

        Args:
            head_first: the first head of the model to move.
            head_count: how many; None for all from *head_first* on. Heads that this rank does not
                hold are not moved.

        Raises:
            ValueError: there are no such heads, or the runs do not say which head they are of.
        """
        if head_count is None and head_first == 0:
            return 0, -1
        if self.total_heads is None:
            raise ValueError(
                "heads must be left out where runs do not name them; "
                f"got {head_count} heads from {head_first}"
            )
        count = self.total_heads - head_first if head_count is None else head_count
        if head_first < 0 or count < 0 or head_first + count > self.total_heads:
            given = "all" if head_count is None else head_count
            raise ValueError(
                f"heads must be in 0..{self.total_heads - 1}; got {given} heads from {head_first}"
            )
        return head_first, count

    def within(self, head_first: int = 0, head_count: int | None = None) -> list[HeadRun]:
        """Return the runs of a head range; see :meth:`check_heads`."""
        first, count = self.check_heads(head_first, head_count)
        return [
            run
            for run in self.runs
            if count < 0 or run.head == EVERY_HEAD or first <= run.head < first + count
        ]

    def tiles(
        self, tile_lanes: int, head_first: int = 0, head_count: int | None = None
    ) -> HeadTiles:
        """Return the tiles of a head range; made at the first call, then kept.

        Raises:
            ValueError: as of :meth:`check_heads`.
        """
        key = tile_lanes, *self.check_heads(head_first, head_count)
        found = self._tiles.get(key)
        if found is None:
            made = _cut(fold(self.within(head_first, head_count)), self, tile_lanes)
            found = self._tiles.setdefault(key, made)
        return found


def _cut(boxes: list[Box], runs: HeadRuns, tile_lanes: int) -> HeadTiles:
    lane = _alignment(boxes, runs.alignment)
    rows = []
    for box in boxes:
        run = box.run
        end = box.groups * run.num_fragments * run.fragment_bytes // lane
        rows += [
            (
                run.base_address, run.block_stride, run.blob_offset, first | end << 32,
                run.local_stride, run.blob_stride, box.local_stride, box.blob_stride,
            )
            for first in range(0, end, tile_lanes)
        ]  # fmt: skip
    return HeadTiles(
        table=torch.tensor(rows, dtype=torch.int64, device=runs.device).reshape(-1, 8),
        count=len(rows),
        lane_bytes=lane,
        fragment_lanes=boxes[0].run.fragment_bytes // lane if boxes else 1,
        fragments=boxes[0].run.num_fragments if boxes else 1,
        tile_lanes=tile_lanes,
    )


def _alignment(boxes: list[Box], limit: int) -> int:
    """Return the largest word, of at most 16 bytes, that boxes and a number *limit* are made of."""
    numbers = [MAX_WORD_BYTES, limit]
    for box in boxes:
        run = box.run
        numbers += (run.base_address, run.block_stride, run.blob_offset, run.fragment_bytes)
        if run.num_fragments > 1:
            numbers += (run.local_stride, run.blob_stride)
        if box.groups > 1:
            numbers += (box.local_stride, box.blob_stride)
    return math.gcd(*numbers)


def _check_copy_run(index: int, run: CopyRun, page_bytes: int, canonical_bytes: int) -> None:
    """Raise unless every fragment lies inside its page, on both sides."""
    if run.fragment_size < 1 or run.num_fragments < 1:
        raise ValueError(
            f"mappings[{index}] must have runs of at least one byte; "
            f"got {run.num_fragments} fragments of {run.fragment_size}"
        )
    for side, offset, stride, limit in (
        ("page", run.local_offset, run.local_stride, page_bytes),
        ("canonical page", run.canonical_offset, run.canonical_stride, canonical_bytes),
    ):
        last = offset + (run.num_fragments - 1) * stride
        if min(offset, last) < 0 or max(offset, last) + run.fragment_size > limit:
            raise ValueError(
                f"mappings[{index}] must stay within its {side} of {limit} bytes; "
                f"got a run from {offset} to {max(offset, last) + run.fragment_size}"
            )
