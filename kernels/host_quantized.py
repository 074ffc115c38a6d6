"""Quantise and bring back KV blocks in host memory: bf16 or fp16 pages <-> e4m3 codes and scales.

The same meaning as ``quantized.py`` on a device, bit for bit. Rows of numbers at equal distances form a
grid, which torch converts at once; its own conversion to e4m3 rounds to the nearest even code, and the
numbers that it gets are exact: a scale is a power of two.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from .host_runs import even_runs, host_memory
from .quantized_rows import SCALE_BYTES, QuantizedRows
from .table import Int64s

E4M3 = torch.float8_e4m3fn

NAN_CODE = 0x7F
"""Without its sign."""

LARGEST_POWER = 9
"""Two to this is the first power of two above the largest code, 448 = 0.875 * 2 ** 9."""

_LIMITS = {torch.bfloat16: (-124, 120, 0x7F80, 0x7FC0), torch.float16: (-15, 8, 0x7C00, 0x7E00)}
"""Type -> exponent of its smallest scale; of the scale at which codes above 240 would come back as
infinities; the bits of infinity; the bits of the NaN that comes back."""

TOP_CODE = 240.0
"""The largest code at the largest scale."""


SPACE_NUMBERS = 512 << 10
"""Numbers converted at once, at least a block's: fewer spread a call's price over less, more leave the
processor's caches; perf/bench_quantized.py."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """Rows of numbers at equal distances, on all three sides.

    Attributes:
        place: of the first row: address in block 0; offsets of its codes and its scales in a blob.
        block_stride: between two blocks of the cache, in bytes.
        shape: outer, inner; a token follows.
        steps: on each side, bytes from one row to the next along outer, inner and token.
    """

    place: tuple[int, int, int]
    block_stride: int
    shape: tuple[int, int]
    steps: tuple[tuple[int, int, int], ...]


class HostQuantized:
    """Quantises blocks into blobs and brings them back, for one group of a CPU cache.

    Threads:
        Any number at once, as long as no two touch the same bytes.

    Ownership:
        Keeps the rows, and so the cache, alive.
    """

    def __init__(self, rows: QuantizedRows) -> None:
        """Fold the table of *rows* into grids."""
        self.rows = rows
        self._page = rows.block_size * rows.width
        self._grids = _fold(rows)
        self._caches = {grid: self._cache(grid) for grid in self._grids}

    def move(self, block_ids: Int64s, addresses: Int64s, *, is_load: bool) -> None:
        """Quantise, or bring back if *is_load*. Arguments are trusted.

        Args:
            block_ids: ``[N]`` int64; ``HOLE`` moves nothing.
            addresses: ``[N]`` int64, where each block's share of a blob is.
            is_load: whether the cache is written.

        Units:
            Reads ``2 * width`` bytes a row and writes ``width + 4``; the other way round in a load.

        Source:
            Meaning ``kernels/reference_quantized.py::gather_quantized`` and ``scatter_dequantized``.
        """
        space = None
        for grid in self._grids:
            numbers = grid.shape[0] * grid.shape[1] * self._page
            most = max(1, SPACE_NUMBERS // numbers)
            for ids, address, step in even_runs(block_ids, addresses, most):
                if space is None or space.size < ids.size * numbers:
                    space = _Space(ids.size * numbers, self.rows.dtype)
                codes, scales = self._blobs(grid, ids.size, address, step)
                cache, blocks = self._caches[grid], torch.from_numpy(ids)
                values = space.values[: ids.size * numbers].view(codes.shape)
                if is_load:
                    cache.index_copy_(0, blocks, dequantize(codes, scales, values, space))
                else:
                    torch.index_select(cache, 0, blocks, out=values)
                    quantize(values, codes, scales, space)

    def _cache(self, grid: _Grid) -> torch.Tensor:
        """View a grid's numbers in all blocks, ``[NB, outer, inner, BS, width]``."""
        rows = self.rows
        shape = rows.num_blocks, *grid.shape, rows.block_size, rows.width
        strides = grid.block_stride, *grid.steps[0], rows.dtype.itemsize
        return _view(grid.place[0], shape, strides, rows.dtype)

    def _blobs(
        self, grid: _Grid, count: int, address: int, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """View a grid's codes ``[count, outer, inner, BS, width]`` and scales in shares of blobs."""
        _, codes, scales = grid.place
        shape = count, *grid.shape, self.rows.block_size
        # of a single share the step is not used, and need not be one of whole floats
        step = step if count > 1 else SCALE_BYTES
        return (
            _view(
                address + codes, (*shape, self.rows.width), (step, *grid.steps[1], 1), torch.uint8
            ),
            _view(address + scales, shape, (step, *grid.steps[2]), torch.float32),
        )


class _Space:
    """Memory for the steps of a conversion, made once a call: fresh pages cost as much as the sums.

    Attributes:
        size: numbers that fit.
        values: of the cache's type.
        bits: int16.
        floats: float32.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size = size
        self.values = torch.empty(size, dtype=dtype)
        self.bits = torch.empty(size, dtype=torch.int16)
        self.floats = torch.empty(size, dtype=torch.float32)


def quantize(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, space: _Space
) -> None:
    """Quantise rows of numbers; a row is the last axis.

    Args:
        values: ``[..., D]`` bfloat16 or float16, contiguous.
        codes: gets ``[..., D]`` uint8, any strides.
        scales: gets ``[...]`` float32, any strides.
        space: for as many numbers.
    """
    lowest, top, infinity, _ = _LIMITS[values.dtype]
    size, shape = values.numel(), values.shape
    raw = values.view(torch.int16)
    bits = torch.bitwise_and(raw, 0x7FFF, out=space.bits[:size].view(shape))
    largest = bits.amax(-1, keepdim=True)
    has_others = int(largest.max()) >= infinity
    if has_others:
        largest = bits.masked_fill(bits >= infinity, 0).amax(-1, keepdim=True)
    mantissa, power = torch.frexp(largest.view(values.dtype).float())
    power = power - LARGEST_POWER + (mantissa > 0.875).int()
    power = torch.where(mantissa > 0, power, lowest).clamp(min=lowest)
    scaled = space.floats[:size].view(shape).copy_(values).mul_(_power_of_two(-power))
    if int(power.max()) >= top:
        scaled = torch.where(power >= top, scaled.clamp(-TOP_CODE, TOP_CODE), scaled)
    codes.view(E4M3).copy_(scaled)
    if has_others:
        # torch has no one answer for an infinity
        with_sign = torch.where(raw < 0, NAN_CODE + 0x80, NAN_CODE).to(torch.uint8)
        codes.copy_(torch.where(bits >= infinity, with_sign, codes))
    scales.copy_(_power_of_two(power).squeeze(-1))


def _power_of_two(power: torch.Tensor) -> torch.Tensor:
    """Return float32 two to the *power*, -126 to 127, from its bits: exact whatever the library."""
    return ((power + 127) << 23).view(torch.float32)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, space: _Space
) -> torch.Tensor:
    """Bring back numbers: the inverse of :func:`quantize` but for what rounding took.

    Args:
        codes: ``[..., D]`` uint8.
        scales: ``[...]`` float32.
        values: gets ``[..., D]`` bfloat16 or float16, contiguous.
        space: for as many numbers.

    Returns:
        *values*.
    """
    size, dtype = values.numel(), values.dtype
    index = codes.reshape(-1).to(torch.int32)
    # a look-up is three times as fast as torch's conversion from e4m3
    flat = torch.index_select(_numbers(), 0, index, out=space.floats[:size])
    values.copy_(flat.view(values.shape).mul_(scales[..., None]))
    if int((codes & NAN_CODE).max()) == NAN_CODE:
        quiet = _LIMITS[dtype][3]
        with_sign = torch.where(codes >= 0x80, quiet - 0x8000, quiet).to(torch.int16)
        is_nan = (codes & NAN_CODE) == NAN_CODE
        values.copy_(torch.where(is_nan, with_sign.view(dtype), values))
    return values


@lru_cache(maxsize=1)
def _numbers() -> torch.Tensor:
    """Return the number of every code, ``[256]`` float32; only read."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3).float()


def _view(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """View host memory; nothing keeps it alive. Strides are in bytes and not negative."""
    size = dtype.itemsize
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + size
    memory = host_memory(address, extent)
    flat = torch.frombuffer(memory, dtype=dtype, count=extent // size)
    return flat.as_strided(shape, [stride // size for stride in strides])


def _fold(rows: QuantizedRows) -> list[_Grid]:
    """Fold the pieces twice: heads at equal distances, then parts at equal distances."""
    table = rows.table.cpu().numpy()
    token = rows.width, SCALE_BYTES
    grids: list[_Grid] = []
    for first, count, steps in _progressions(table):
        base, block_stride, token_stride, codes, scales = table[first].tolist()
        sides = tuple(
            (0, step, after) for step, after in zip(steps, (token_stride, *token), strict=True)
        )
        grids.append(_Grid((base, codes, scales), block_stride, (1, count), sides))
    return _stack(grids)


def _progressions(table: Int64s) -> list[tuple[int, int, tuple[int, int, int]]]:
    """Return first row, number of rows and steps of runs of rows at equal distances."""
    found: list[tuple[int, int, tuple[int, int, int]]] = []
    first, size = 0, table.shape[0]
    columns = [0, 3, 4]
    while first < size:
        last, step = first + 1, np.zeros(3, np.int64)
        if last < size:
            step = table[last, columns] - table[first, columns]
        while (
            last < size
            and step.min() >= 0
            and (table[last, columns] - table[last - 1, columns] == step).all()
            and (table[last, 1:3] == table[first, 1:3]).all()
        ):
            last += 1
        steps = step.tolist() if last - first > 1 else [0, 0, 0]
        found.append((first, last - first, (steps[0], steps[1], steps[2])))
        first = last
    return found


def _stack(grids: list[_Grid]) -> list[_Grid]:
    """Join neighbours of one shape at equal distances into one grid."""
    joined: list[_Grid] = []
    for grid in grids:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.shape[1] == grid.shape[1]
            and last.block_stride == grid.block_stride
            and [s[1:] for s in last.steps] == [s[1:] for s in grid.steps]
        ):
            count = last.shape[0]
            apart = [b - a for a, b in zip(last.place, grid.place, strict=True)]
            steps = [gap // count for gap in apart]
            even = all(gap == step * count for gap, step in zip(apart, steps, strict=True))
            known = count == 1 or [s[0] for s in last.steps] == steps
            if even and known and min(steps) > 0:
                sides = tuple(
                    (step, *side[1:]) for step, side in zip(steps, last.steps, strict=True)
                )
                joined[-1] = _Grid(last.place, last.block_stride, (count + 1, last.shape[1]), sides)
                continue
        joined.append(grid)
    return joined
