"""Pure-torch twins of the quantising moves, by table and in exact arithmetic; each is a definition.

A row of numbers has one scale, a power of two. Its codes are e4m3 (fn): sign, four bits of exponent,
three of mantissa, largest 448, no infinity.

    scale       the smallest power of two >= largest finite magnitude / 448, and at least so large that
                the smallest code times the scale is the smallest number of the type
    code        of the nearest value times scale; of two equally near, the even code
    no code     that would come back as an infinity: the largest that does not is taken
    NaN, Inf    become the code of NaN, with their sign; the scale ignores them
    zero        keeps its sign
"""

import torch

from .quantized_rows import QuantizedRows
from .reference_memory import bytes_of

NAN_CODE = 0x7F
"""Without its sign. Every other code is a finite number."""

LARGEST_CODE = 448.0


def code_values() -> torch.Tensor:
    """Return the magnitudes of codes 0 to 126, ``[127]`` float64, ascending."""
    parts = (divmod(code, 8) for code in range(NAN_CODE))
    values = [
        (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        for exponent, mantissa in parts
    ]
    return torch.tensor(values, dtype=torch.float64)


def smallest_scale(dtype: torch.dtype) -> float:
    """Return the scale at which the smallest code is the smallest positive number of *dtype*."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps / 2.0**-9


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows of numbers.

    Args:
        values: ``[..., D]`` bfloat16 or float16; a row is the last axis.

    Returns:
        ``[..., D]`` uint8 codes and ``[...]`` float32 scales.
    """
    exact = values.to(torch.float64)
    is_finite = exact.isfinite()
    magnitude = exact.abs().where(is_finite, 0.0)
    smallest = smallest_scale(values.dtype)
    fit = (magnitude.amax(-1, keepdim=True) / LARGEST_CODE).clamp(min=smallest)
    mantissa, _ = torch.frexp(fit)
    # frexp's mantissa is in [0.5, 1): the power of two above is exact, and 0.5 is one itself
    scale = torch.where(mantissa == 0.5, fit, fit / mantissa)

    table = code_values().to(values.device)
    limits = table * scale <= torch.finfo(values.dtype).max
    largest = limits.sum(-1, keepdim=True) - 1
    midpoints = (table[1:] + table[:-1]) / 2
    wanted = (magnitude / scale).contiguous()
    code = torch.searchsorted(midpoints, wanted)
    is_midpoint = wanted == midpoints[code.clamp(max=len(midpoints) - 1)]
    code = torch.minimum(code + (is_midpoint & (code % 2 == 1)).long(), largest)
    code = torch.where(is_finite, code, NAN_CODE) + 128 * torch.signbit(values).long()
    return code.to(torch.uint8), scale.squeeze(-1).to(torch.float32)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of *codes*; the inverse of :func:`quantize` but for what rounding took.

    Args:
        codes: ``[..., D]`` uint8.
        scales: ``[...]`` float32, as :func:`quantize` makes them.
        dtype: bfloat16 or float16. Every product is a number of this type: nothing is rounded.
    """
    code = codes.long()
    magnitude = code_values().to(codes.device)[(code % 128).clamp(max=NAN_CODE - 1)]
    exact = magnitude * scales.to(torch.float64)[..., None]
    sign = torch.where(code >= 128, -1.0, 1.0).to(torch.float64)
    values = torch.copysign(exact, sign).to(dtype)
    # the one NaN that comes back: quiet, without payload, with the sign of its code
    quiet = 0x7FC0 if dtype == torch.bfloat16 else 0x7E00
    bits = torch.where(code >= 128, quiet - 0x8000, quiet).to(torch.int16)
    return torch.where(code % 128 == NAN_CODE, bits.view(dtype), values)


def gather_quantized(rows: QuantizedRows, block_ids: list[int], blobs: torch.Tensor) -> None:
    """Quantise block ``block_ids[i]`` into ``blobs[i]``, ``[N, block_bytes]`` uint8."""
    for block, blob in zip(block_ids, blobs, strict=True):
        for values, codes, scale in _rows(rows, block, blob):
            code, one = quantize(values.view(rows.dtype))
            codes.copy_(code)
            scale.copy_(one.reshape(1).view(torch.uint8))


def scatter_dequantized(rows: QuantizedRows, block_ids: list[int], blobs: torch.Tensor) -> None:
    """Bring ``blobs[i]`` back into block ``block_ids[i]``, in order."""
    for block, blob in zip(block_ids, blobs, strict=True):
        for values, codes, scale in _rows(rows, block, blob):
            # a view of four bytes as a float needs an aligned start, which a slice need not have
            one = scale.clone().view(torch.float32)[0]
            values.copy_(dequantize(codes, one, rows.dtype).view(torch.uint8))


def _rows(
    rows: QuantizedRows, block: int, blob: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the bytes of each row of a block, of its codes and of its scale."""
    if block < 0:
        return []
    nbytes = rows.width * rows.dtype.itemsize
    found = []
    for base, block_stride, token_stride, codes, scales in rows.table.tolist():
        for token in range(rows.block_size):
            address = base + block * block_stride + token * token_stride
            found.append(
                (
                    bytes_of(rows.tensors, address, nbytes),
                    blob[codes + token * rows.width :][: rows.width],
                    blob[scales + token * 4 :][:4],
                )
            )
    return found
