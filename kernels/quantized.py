"""Halve what is kept: bf16 or fp16 rows of paged blocks <-> fp8 codes and scales in a blob.

A row is the D values of one (token, head). It becomes D codes of e4m3 (fn: no infinity, largest
448) and one fp32 scale, the smallest power of two at which the row fits. With such a scale every
step is integer arithmetic, so compute capability 8.0 needs no fp8 type, the interpreter and the
device agree bit for bit, what comes back is exact in the cache's type, and a row that went through
once goes through again unchanged.

One program takes a tile of rows at a time, of any piece and token of one block. Rows are read once
and written once; the cache and the blobs may be in device memory or in pinned host memory.
"""

import torch
import triton
import triton.language as tl

from .budget import MAX_SMS
from .current_device import made_current
from .quantized_rows import QuantizedRows

TILE_VALUES = 4096
"""Values of one tile: 8 KiB of the cache in flight per program. The static report has registers."""

NUM_WARPS = 8
"""Of one program: 16 values a thread, a 16-byte store of codes."""

MAX_REGISTERS = 128
"""Of a thread that quantises. It needs 72 to 99; left alone, ptxas aims at 80 and spills."""

BLOCK_MASK = tl.constexpr((1 << 28) - 1)
"""The bits of an entry's first word that hold the block id; all set: a hole."""


# one variant whatever the numbers are: nothing is compiled in the middle of serving
@triton.jit(do_not_specialize=["num_units", "tiles_per_block", "rows_per_block"])
def _gather_quantized_kernel(
    # [P, 5] int64: address in block 0, block stride, token stride, offsets of codes and scales
    pieces_ptr,
    # [N, 2] int64: block id, address of the block's bytes in its blob
    entries_ptr,
    num_units,
    tiles_per_block,
    rows_per_block,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_BF16: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    MIN_FIELD: tl.constexpr,
    MAX_FIELD: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    column = tl.arange(0, COLUMNS)[None, :]
    for unit in range(program, num_units, num_programs):
        entry = entries_ptr + (unit // tiles_per_block) * 2
        block = tl.load(entry) & BLOCK_MASK
        blob = tl.load(entry + 1)
        row = (unit % tiles_per_block) * ROWS + tl.arange(0, ROWS)[:, None]
        is_row = (row < rows_per_block) & (block != BLOCK_MASK)
        token = row % BLOCK_SIZE
        piece = pieces_ptr + (row // BLOCK_SIZE) * 5
        address = tl.load(piece, mask=is_row, other=0)
        address += block * tl.load(piece + 1, mask=is_row, other=0)
        address += token * tl.load(piece + 2, mask=is_row, other=0)
        codes = blob + tl.load(piece + 3, mask=is_row, other=0) + token * WIDTH
        scales = blob + tl.load(piece + 4, mask=is_row, other=0) + token * 4
        # promises go on pointers: on an integer address they are lost
        source = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), [VALUE_ALIGN, VALUE_ALIGN])
        target = tl.multiple_of(codes.to(tl.pointer_type(tl.int8)), [CODE_ALIGN, CODE_ALIGN])
        is_value = is_row & (column < WIDTH)
        bits = tl.load(source + column, mask=is_value, other=0, eviction_policy="evict_first")
        if IS_BF16:
            magnitude = (bits.to(tl.int32) & 0x7FFF) << 16
        else:
            single = bits.to(tl.float16, bitcast=True).to(tl.float32)
            magnitude = single.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        is_finite = magnitude < 0x7F800000
        largest = tl.reduce(
            tl.where(is_finite, magnitude, 0), 1, tl.standard._elementwise_max, keep_dims=True
        )
        # exponent field of the smallest power of two >= largest / 448: one more above 1.75 * 2^k
        field = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, MIN_FIELD)
        exponent = magnitude >> 23
        significand = magnitude
        if IS_BF16:
            # a number below 2^-126 is a count of 2^-133: as a float, the count has a leading one
            counted = (bits.to(tl.int32) & 0x7F).to(tl.float32).to(tl.int32, bitcast=True)
            significand = tl.where(exponent > 0, magnitude, counted)
            exponent = tl.where(exponent > 0, exponent, (counted >> 23) - 133)
        # of a zero the exponent is so small that the leading one, too, is shifted out
        significand = (significand & 0x7FFFFF) | 0x800000
        power = exponent - field
        code_power = tl.maximum(power, -6)
        # below 2^-6 the step of a code stays, so more bits go; after 25 nothing is left to round
        shift = tl.minimum(20 + code_power - power, 25)
        whole = significand >> shift
        steps = (significand + ((1 << (shift - 1)) - 1) + (whole & 1)) >> shift
        limit = tl.where(field == MAX_FIELD, 0x77, 0x7E)
        code = tl.minimum((code_power + 6) * 8 + steps, limit)
        sign = ((bits >> 8) & 0x80).to(tl.int8)
        code = tl.where(is_finite, code, 0x7F).to(tl.int8) | sign
        tl.store(target + column, code, mask=is_value, cache_modifier=".cs")
        tl.store(scales.to(tl.pointer_type(tl.int32)), field << 23, mask=is_row)


# one variant whatever the numbers are: nothing is compiled in the middle of serving
@triton.jit(do_not_specialize=["num_units", "tiles_per_block", "rows_per_block"])
def _scatter_dequantized_kernel(
    # [P, 5] int64: address in block 0, block stride, token stride, offsets of codes and scales
    pieces_ptr,
    # [N, 2] int64: block id, address of the block's bytes in its blob
    entries_ptr,
    num_units,
    tiles_per_block,
    rows_per_block,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_BF16: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    column = tl.arange(0, COLUMNS)[None, :]
    for unit in range(program, num_units, num_programs):
        entry = entries_ptr + (unit // tiles_per_block) * 2
        block = tl.load(entry) & BLOCK_MASK
        blob = tl.load(entry + 1)
        row = (unit % tiles_per_block) * ROWS + tl.arange(0, ROWS)[:, None]
        is_row = (row < rows_per_block) & (block != BLOCK_MASK)
        token = row % BLOCK_SIZE
        piece = pieces_ptr + (row // BLOCK_SIZE) * 5
        address = tl.load(piece, mask=is_row, other=0)
        address += block * tl.load(piece + 1, mask=is_row, other=0)
        address += token * tl.load(piece + 2, mask=is_row, other=0)
        codes = blob + tl.load(piece + 3, mask=is_row, other=0) + token * WIDTH
        scales = blob + tl.load(piece + 4, mask=is_row, other=0) + token * 4
        target = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), [VALUE_ALIGN, VALUE_ALIGN])
        source = tl.multiple_of(codes.to(tl.pointer_type(tl.int8)), [CODE_ALIGN, CODE_ALIGN])
        is_value = is_row & (column < WIDTH)
        code = tl.load(source + column, mask=is_value, other=0, eviction_policy="evict_first")
        code = code.to(tl.int32)
        scale = tl.load(scales.to(tl.pointer_type(tl.int32)), mask=is_row, other=0)
        # the code is steps * 2^(exponent - 10), and steps, up to 15, is exact as a float
        exponent = (code >> 3) & 15
        is_nan = (code & 0x7F) == 0x7F
        steps = tl.where(is_nan, 0, (code & 7) + tl.where(exponent > 0, 8, 0))
        exponent = tl.maximum(exponent, 1) + (scale >> 23)
        single = steps.to(tl.float32).to(tl.int32, bitcast=True)
        field = (single >> 23) + exponent - 137
        normal = tl.where(steps > 0, (field << 23) | (single & 0x7FFFFF), 0)
        if IS_BF16:
            # below 2^-126 bf16 counts in units of 2^-133, and so do codes at the smallest scale
            units = steps << tl.minimum(tl.maximum(exponent - 4, 0), 7)
            value = tl.where(field > 0, normal >> 16, units)
            value = tl.where(is_nan, 0x7FC0, value)
        else:
            half = normal.to(tl.float32, bitcast=True).to(tl.float16)
            value = half.to(tl.int16, bitcast=True).to(tl.int32)
            value = tl.where(is_nan, 0x7E00, value)
        value |= (code & 0x80) << 8
        tl.store(target + column, value.to(tl.int16), mask=is_value, cache_modifier=".cs")


def gather_quantized(rows: QuantizedRows, entries: torch.Tensor, *, max_sms: int = MAX_SMS) -> None:
    """Quantise KV blocks of the paged cache into blobs of fp8 codes and fp32 scales.

    What comes back (:func:`scatter_dequantized`) differs from x by half a step at most:

        ``scale * 2 ** (max(floor(log2(abs(x) / scale)), -6) - 4)``

    but by a step where x would round to an infinity of the cache's type. Zeros keep their sign; NaN and
    infinities come back as NaN. The copy is enqueued on the current stream.

    Args:
        rows: where numbers, codes and scales are.
        entries: ``[N, 2]`` int64 on the device of *rows*: the block id in the low 28 bits of word 0
            (all set: a hole, which moves nothing), and the address of the block's
            ``rows.block_bytes`` bytes in word 1, a multiple of ``rows.alignment``.
        max_sms: programs at most, and so streaming multiprocessors.

    Units:
        Reads ``2 * D`` bytes a row and writes ``D + 4``.

    Source:
        Meaning ``kernels/reference_quantized.py::gather_quantized``.
    """
    if entries.shape[0] and rows.num_pieces:
        smallest, largest = _FIELDS[rows.dtype]
        grid, arguments, options = _plan(rows, entries, max_sms)
        with made_current(rows.device):
            _gather_quantized_kernel[grid](
                *arguments,
                **options,
                MIN_FIELD=smallest,
                MAX_FIELD=largest,
                num_warps=NUM_WARPS,
                maxnreg=MAX_REGISTERS,
            )


def scatter_dequantized(
    rows: QuantizedRows, entries: torch.Tensor, *, max_sms: int = MAX_SMS
) -> None:
    """Bring blobs of fp8 codes and fp32 scales back into KV blocks of the paged cache.

    The inverse of :func:`gather_quantized` but for what rounding took: arguments as there. Scales must
    be of its making, powers of two: every product is then a number of the cache's type. A block must
    not be named twice: which of its two blobs wins is not defined.

    Source:
        Meaning ``kernels/reference_quantized.py::scatter_dequantized``.
    """
    if entries.shape[0] and rows.num_pieces:
        grid, arguments, options = _plan(rows, entries, max_sms)
        with made_current(rows.device):
            _scatter_dequantized_kernel[grid](*arguments, **options, num_warps=NUM_WARPS)


_FIELDS = {torch.bfloat16: (3, 247), torch.float16: (112, 135)}
"""Type -> exponent fields of fp32: of the smallest scale, whose smallest code is the type's smallest
number (2 ** -133, 2 ** -24); and of the scale at which codes above 240 would be infinities."""


def _plan(
    rows: QuantizedRows, entries: torch.Tensor, max_sms: int
) -> tuple[tuple[int], tuple[torch.Tensor | int, ...], dict[str, int | bool]]:
    """Return the grid, the arguments and the constants that both kernels share."""
    columns = 1 << (rows.width - 1).bit_length()
    tile_rows = TILE_VALUES // columns
    rows_per_block = rows.num_pieces * rows.block_size
    tiles = -(-rows_per_block // tile_rows)
    num_units = entries.shape[0] * tiles
    options = {
        "BLOCK_SIZE": rows.block_size,
        "WIDTH": rows.width,
        "COLUMNS": columns,
        "ROWS": tile_rows,
        "IS_BF16": rows.dtype == torch.bfloat16,
        "VALUE_ALIGN": rows.value_alignment,
        "CODE_ALIGN": rows.code_alignment,
    }
    arguments = rows.table, entries, num_units, tiles, rows_per_block
    return (min(num_units, max_sms),), arguments, options
