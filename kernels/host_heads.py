"""Move heads in host memory: canonical blobs <-> pages of a CPU cache.

Runs are folded into boxes, as for a device; a box of one block is one strided assignment. The same
meaning as ``heads.py`` on a device.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from .head_boxes import Box, fold
from .head_runs import HeadRuns
from .table import HOLE, Int64s

Bytes = npt.NDArray[np.uint8]


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
        self._boxes: dict[tuple[int, int], list[Box]] = {}

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
        key = self.runs.check_heads(head_first, head_count)
        boxes = self._boxes.get(key)
        if boxes is None:
            # two threads that come first together fold the same boxes; either list may stay
            boxes = self._boxes.setdefault(key, fold(self.runs.within(head_first, head_count)))
        pairs = [
            pair
            for pair in zip(block_ids.tolist(), addresses.tolist(), strict=True)
            if pair[0] != HOLE
        ]
        for box in boxes:
            run = box.run
            for block, address in pairs:
                page = _view(
                    box, run.base_address + block * run.block_stride,
                    box.local_stride, run.local_stride,
                )  # fmt: skip
                blob = _view(box, address + run.blob_offset, box.blob_stride, run.blob_stride)
                if is_load:
                    page[:] = blob
                else:
                    blob[:] = page


def _view(box: Box, address: int, group_stride: int, fragment_stride: int) -> Bytes:
    """View one side of a box of one block, ``[groups, fragments, fragment bytes]``."""
    run = box.run
    shape = box.groups, run.num_fragments, run.fragment_bytes
    strides = group_stride, fragment_stride, 1
    # numpy wants the whole extent, which begins before the address where a stride is negative
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    before = -sum(step for step in reach if step < 0)
    extent = before + sum(step for step in reach if step > 0) + 1
    memory = memoryview((ctypes.c_ubyte * extent).from_address(address - before))
    return np.ndarray(shape, np.uint8, memory, before, strides)
