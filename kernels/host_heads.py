"""Move heads in host memory: canonical blobs <-> pages of a CPU cache.

Runs are folded into boxes, as for a device. A fragment is one item of an array, so that many blocks of a
box are one index assignment. The same meaning as ``heads.py`` on a device.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .head_boxes import Box, fold
from .head_runs import HeadRuns
from .host_runs import even_runs, host_memory
from .table import Int64s

SPACE_BYTES = 512 << 10
"""A gather goes through a temporary of about this size, which stays in a core's own cache."""

Items = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class _Crate:
    """A box, and its fragments in all blocks of the cache.

    Attributes:
        box: what goes where.
        pages: ``[NB, groups, fragments]`` items of a fragment, strided; the cache's memory.
    """

    box: Box
    pages: Items

    @classmethod
    def of(cls, box: Box, num_blocks: int) -> "_Crate":
        run = box.run
        strides = run.block_stride, box.local_stride, run.local_stride
        return cls(box, _view(box, run.base_address, num_blocks, strides))

    def of_blobs(self, address: int, count: int, step: int) -> Items:
        """View its fragments in *count* shares of blobs, the first at *address*, *step* apart."""
        strides = step, self.box.blob_stride, self.box.run.blob_stride
        return _view(self.box, address + self.box.run.blob_offset, count, strides)


class HostHeads:
    """Gathers heads into canonical blobs and scatters them back, for one group of a CPU cache.

    Threads:
        Any number at once, as long as no two touch the same bytes.

    Ownership:
        Keeps the runs, and so the cache, alive.
    """

    def __init__(self, runs: HeadRuns) -> None:
        """Keep *runs*; a head range is folded when it is first moved."""
        self.runs = runs
        self._crates: dict[tuple[int, int], list[_Crate]] = {}

    def move(
        self,
        block_ids: Int64s,
        addresses: Int64s,
        head_first: int,
        head_count: int | None,
        *,
        is_load: bool,
    ) -> None:
        """Gather, or scatter if *is_load*. Arguments are trusted.

        Args:
            block_ids: ``[N]`` int64; ``HOLE`` moves nothing.
            addresses: ``[N]`` int64, where each block's share of a blob is.
            head_first: the first head of the model to move.
            head_count: how many; None for all from *head_first* on.
            is_load: whether the cache is written.

        Units:
            Moves ``2 * block_bytes`` bytes for each block at most.

        Source:
            Meaning ``kernels/reference_heads.py::gather_heads`` and ``scatter_heads``.
        """
        crates = self._within(head_first, head_count)
        for ids, address, step in even_runs(block_ids, addresses, block_ids.size):
            for crate in crates:
                pages, blobs = crate.pages, crate.of_blobs(address, ids.size, step)
                if is_load:
                    pages[ids] = blobs
                    continue
                few = max(1, SPACE_BYTES // max(1, blobs[0].nbytes))
                for first in range(0, ids.size, few):
                    blobs[first : first + few] = pages[ids[first : first + few]]

    def _within(self, head_first: int, head_count: int | None) -> list[_Crate]:
        key = self.runs.check_heads(head_first, head_count)
        found = self._crates.get(key)
        if found is None:
            boxes = fold(self.runs.within(head_first, head_count))
            made = [_Crate.of(box, self.runs.num_blocks) for box in boxes]
            # two threads that come first together fold the same boxes; either list may stay
            found = self._crates.setdefault(key, made)
        return found


def _view(box: Box, address: int, count: int, strides: tuple[int, int, int]) -> Items:
    """View a box's fragments on one side, ``[count, groups, fragments]``."""
    shape, nbytes = (count, box.groups, box.run.num_fragments), box.run.fragment_bytes
    # numpy wants the whole extent, which begins before the address where a stride is negative
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    before = -sum(step for step in reach if step < 0)
    extent = before + sum(step for step in reach if step > 0) + nbytes
    memory = host_memory(address - before, extent)
    return np.ndarray(shape, np.dtype((np.void, nbytes)), memory, before, strides)
