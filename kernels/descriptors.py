"""Turn block ids and frame addresses into copy descriptors, without a Python step per descriptor.

    entry (block 7, frame address A)  x  runs of a block (base, stride, bytes, offset)
        -> cache address   base + 7 * stride
        -> frame address   A + offset
        -> bytes

Segments that touch in the cache *and* in the blob are one run: found once, at registration. Blocks that
touch in both as well (a cache whose layers lie side by side in a block, neighbouring ids) are merged
per transfer. No descriptor leaves a storage, or crosses a place where two pieces of registered host
memory meet: the driver refuses a copy that does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .layout import BlockLayout
from .table import HOLE, LayoutTable

Int64s = npt.NDArray[np.int64]

Direction = Literal["d2h", "h2d"]
"""``"d2h"``: out of the cache, into frames (stores). ``"h2d"``: the reverse (loads)."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """A list of copies, as the driver takes it. Copies of one list must not depend on each other.

    Attributes:
        destinations: ``[count]`` int64, contiguous, addresses.
        sources: ``[count]`` int64, contiguous, addresses.
        sizes: ``[count]`` int64, contiguous, bytes, none of them 0.
    """

    destinations: Int64s
    sources: Int64s
    sizes: Int64s

    def __post_init__(self) -> None:
        shape = self.sizes.shape
        for name in ("destinations", "sources", "sizes"):
            array = getattr(self, name)
            if array.dtype != np.int64 or array.ndim != 1 or array.shape != shape:
                raise ValueError(
                    f"{name} must be int64 [{shape[0] if shape else 'count'}]; "
                    f"got {array.dtype} {list(array.shape)}"
                )
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} must be contiguous; got strides {array.strides}")

    def check_values(self) -> None:
        """Check what :meth:`BlockRuns.describe` ensures: addresses and sizes are positive.

        Raises:
            ValueError: one is not.
        """
        for name in ("destinations", "sources", "sizes"):
            array = getattr(self, name)
            if array.size and array.min() <= 0:
                raise ValueError(f"{name} must be positive; got {array.min()}")

    @property
    def count(self) -> int:
        """How many copies."""
        return self.sizes.size

    @property
    def nbytes(self) -> int:
        """Bytes copied by all of them."""
        return int(self.sizes.sum())

    def merged(self, cuts: Int64s) -> "Descriptors":
        """Return the same copies with each run of neighbours as one.

        Two copies in a row are merged when the second starts where the first ends, at its source and
        at its destination, and neither place is one of *cuts*.

        Args:
            cuts: ``[C]`` int64, addresses that no copy may cross.
        """
        ends_s, ends_d = (
            self.sources[:-1] + self.sizes[:-1],
            self.destinations[:-1] + self.sizes[:-1],
        )
        joined = (self.sources[1:] == ends_s) & (self.destinations[1:] == ends_d)
        for ends in (ends_s, ends_d):
            joined &= ~np.isin(ends, cuts)
        return self if not joined.any() else _merge(self, joined)


def _merge(copies: Descriptors, joined: npt.NDArray[np.bool_]) -> Descriptors:
    """Merge copy ``i + 1`` into the one before it wherever ``joined[i]``."""
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return Descriptors(
        copies.destinations[starts],
        copies.sources[starts],
        np.add.reduceat(copies.sizes, starts),
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of one group's block, ``[R]`` each, in blob order."""

    bases: Int64s
    strides: Int64s
    sizes: Int64s
    offsets: Int64s
    # whether the first run of a block may continue the last run of another: same storage
    is_one_storage: bool


class BlockRuns:
    """What descriptors are made from: the runs of every group of a cache, made once at registration.

    Ownership:
        Keeps the table, and so the cache, alive.

    Threads:
        Any number at once.

    Attributes:
        table: of the cache.
        runs_per_block: per group, descriptors that one block needs when nothing merges.
    """

    __slots__ = ("_cuts", "_groups", "runs_per_block", "table")

    def __init__(self, table: LayoutTable, frame_cuts: Sequence[int] = ()) -> None:
        """Merge the segments of each group.

        Args:
            table: of the cache.
            frame_cuts: addresses at which two registrations of frame memory meet
                (:attr:`.pinning.Registration.cuts`).
        """
        self.table = table
        self._cuts = np.array(sorted(frame_cuts), np.int64)
        self._groups = tuple(_runs_of(layout) for layout in table.layouts)
        self.runs_per_block = tuple(group.bases.size for group in self._groups)

    def describe(
        self,
        block_ids: Int64s,
        addresses: Int64s,
        counts: Sequence[int],
        direction: Direction,
    ) -> Descriptors:
        """Return the copies of one transfer, merged, in the order of their frames.

        Args:
            block_ids: ``[N]`` int64, groups one after the other; ``HOLE`` moves nothing.
            addresses: ``[N]`` int64, where each block's own bytes are in its frame, as in
                :func:`.table.pack_entries`. Frames of one transfer must not overlap.
            counts: entries of each group; they sum to N.
            direction: where to.

        Raises:
            ValueError: an argument is out of range; the message says which.
        """
        if direction not in ("d2h", "h2d"):
            raise ValueError(f"direction must be 'd2h' or 'h2d'; got {direction!r}")
        for name, array in (("block_ids", block_ids), ("addresses", addresses)):
            if array.dtype != np.int64 or array.shape != (sum(counts),):
                raise ValueError(
                    f"{name} must be int64 [{sum(counts)}], one for each entry that counts names; "
                    f"got {array.dtype} {list(array.shape)}"
                )
        if len(counts) != len(self._groups) or min(counts) < 0:
            raise ValueError(
                f"counts must be {len(self._groups)} numbers, one for each group; got {list(counts)}"
            )
        total = sum(n * r for n, r in zip(counts, self.runs_per_block, strict=True))
        caches, frames, sizes = (np.empty(total, np.int64) for _ in range(3))
        joined = np.zeros(max(total - 1, 0), np.bool_)
        entry = filled = 0
        for layout, runs, count in zip(self.table.layouts, self._groups, counts, strict=True):
            ids, places = block_ids[entry : entry + count], addresses[entry : entry + count]
            entry += count
            if (ids == HOLE).any():
                places, ids = places[ids != HOLE], ids[ids != HOLE]
            layout.check_range(ids)
            if places.size and places.min() <= 0:
                raise ValueError(f"addresses must be positive; got {places.min()}")
            if ids.size and (places[1:] < places[:-1]).any():
                order = np.argsort(places, kind="stable")
                ids, places = ids[order], places[order]
            end = filled + ids.size * runs.bases.size
            grid = (ids.size, runs.bases.size)
            cache = caches[filled:end].reshape(grid)
            frame = frames[filled:end].reshape(grid)
            np.multiply(ids[:, None], runs.strides, out=cache)
            cache += runs.bases
            np.add(places[:, None], runs.offsets, out=frame)
            sizes[filled:end].reshape(grid)[:] = runs.sizes
            if runs.is_one_storage and ids.size > 1:
                self._join(joined[filled : end - 1], cache, frame, runs)
            filled = end
        if direction == "d2h":
            copies = Descriptors(frames[:filled], caches[:filled], sizes[:filled])
        else:
            copies = Descriptors(caches[:filled], frames[:filled], sizes[:filled])
        joined = joined[: max(filled - 1, 0)]
        return _merge(copies, joined) if joined.any() else copies

    def _join(
        self, joined: npt.NDArray[np.bool_], cache: Int64s, frame: Int64s, runs: _Runs
    ) -> None:
        """Mark where the first run of a block continues the last run of the block before."""
        last = runs.sizes[-1]
        touching = (cache[1:, 0] == cache[:-1, -1] + last) & (frame[1:, 0] == frame[:-1, -1] + last)
        if self._cuts.size and touching.any():
            touching &= ~np.isin(frame[1:, 0], self._cuts)
        joined[runs.bases.size - 1 :: runs.bases.size] = touching


def _runs_of(layout: BlockLayout) -> _Runs:
    """Return the segments of *layout* in blob order, those that touch for every block as one."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layout.tensors
    }
    starts = np.array(sorted(storages), np.int64)
    rows: list[list[int]] = []
    homes: list[int] = []
    for segment in sorted(layout.segments, key=lambda s: s.blob_offset):
        home = int(np.searchsorted(starts, segment.base_address, side="right"))
        if rows and homes[-1] == home:
            base, stride, nbytes, offset = rows[-1]
            touches = segment.base_address == base + nbytes
            if (
                touches
                and segment.block_stride == stride
                and segment.blob_offset == offset + nbytes
            ):
                rows[-1][2] += segment.nbytes
                continue
        rows.append(
            [segment.base_address, segment.block_stride, segment.nbytes, segment.blob_offset]
        )
        homes.append(home)
    table = np.array(rows, np.int64)
    return _Runs(
        bases=table[:, 0].copy(),
        strides=table[:, 1].copy(),
        sizes=table[:, 2].copy(),
        offsets=table[:, 3].copy(),
        is_one_storage=homes[0] == homes[-1],
    )
