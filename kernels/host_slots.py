"""Move tokens in host memory: rows by slot mapping <-> pages of a CPU cache.

Pieces of one size at equal distances form a slab, an array of items as large as a piece: one index
assignment moves a slab of many tokens. The same meaning as ``slots.py`` on a device.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .host_runs import host_memory
from .rows import RowLayout, RowPiece
from .table import HOLE, Int64s

SPACE_BYTES = 512 << 10
"""A gather goes through a temporary of this size at most, which stays in a core's own cache."""

Items = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class _Slab:
    """Pieces of one size at equal distances, in the cache and in a row.

    Attributes:
        items: ``[NB, BS, count]`` items of ``nbytes``, strided; the memory belongs to the layout.
        row_offset: of the first piece in a row, in bytes.
        row_step: between two of its pieces in a row, in bytes.
    """

    items: Items
    row_offset: int
    row_step: int

    def of_rows(self, address: int, count: int, stride: int) -> Items:
        """View the slab's items of rows at *address*, ``[count, pieces]``."""
        pieces, nbytes = self.items.shape[2], self.items.itemsize
        start = address + self.row_offset
        extent = (count - 1) * stride + (pieces - 1) * self.row_step + nbytes
        memory = host_memory(start, extent)
        strides = stride, self.row_step
        return np.ndarray((count, pieces), self.items.dtype, memory, 0, strides)


class HostSlots:
    """Gathers tokens into rows and scatters them back, for one group of a CPU cache.

    Threads:
        Any number at once, as long as no two touch the same bytes.

    Ownership:
        Keeps the layout, and so the cache, alive.
    """

    def __init__(self, rows: RowLayout) -> None:
        """Fold the pieces of *rows* into slabs."""
        self.rows = rows
        self._slabs = [_slab(rows, pieces) for pieces in _alike(rows.pieces)]

    def move(self, slots: Int64s, address: int, stride: int, *, is_load: bool) -> None:
        """Gather, or scatter if *is_load*. Arguments are trusted.

        Args:
            slots: ``[T]`` int64; ``HOLE`` moves nothing.
            address: of the row of ``slots[0]``.
            stride: between two rows, in bytes.
            is_load: whether the cache is written.

        Units:
            Moves ``2 * row_bytes`` bytes for each token that is not a hole.

        Source:
            Meaning ``kernels/reference_heads.py::gather_slots`` and ``scatter_slots``.
        """
        kept = np.flatnonzero(slots != HOLE)
        if not kept.size:
            return
        is_whole = kept.size == slots.size
        blocks, tokens = np.divmod(slots if is_whole else slots[kept], self.rows.block_size)
        for slab in self._slabs:
            items, there = slab.items, slab.of_rows(address, slots.size, stride)
            if is_load:
                items[blocks, tokens] = there if is_whole else there[kept]
                continue
            step = max(1, SPACE_BYTES // (items.itemsize * items.shape[2]))
            for first in range(0, kept.size, step):
                part = slice(first, first + step)
                there[part if is_whole else kept[part]] = items[blocks[part], tokens[part]]


def _alike(pieces: tuple[RowPiece, ...]) -> list[list[RowPiece]]:
    """Split pieces into runs of one shape at equal distances."""
    runs: list[list[RowPiece]] = []
    for piece in pieces:
        if runs and _continues(runs[-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _continues(run: list[RowPiece], piece: RowPiece) -> bool:
    shapes = {(p.block_stride, p.token_stride, p.nbytes) for p in (run[-1], piece)}
    last = [*run[-2:], piece]
    steps = {
        (b.base_address - a.base_address, b.row_offset - a.row_offset) for a, b in pairwise(last)
    }
    return len(shapes) == 1 and len(steps) == 1 and min(min(steps)) > 0


def _slab(rows: RowLayout, pieces: list[RowPiece]) -> _Slab:
    one, count = pieces[0], len(pieces)
    step, row_step = one.nbytes, one.nbytes
    if count > 1:
        step = pieces[1].base_address - one.base_address
        row_step = pieces[1].row_offset - one.row_offset
    strides = one.block_stride, one.token_stride, step
    shape = rows.num_blocks, rows.block_size, count
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + one.nbytes
    memory = host_memory(one.base_address, extent)
    items: Items = np.ndarray(shape, np.dtype((np.void, one.nbytes)), memory, 0, strides)
    return _Slab(items, one.row_offset, row_step)
