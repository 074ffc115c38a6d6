"""Checks of rows, slots and spans, for the operators that take them; more in ``ops_checks.py``."""

import numpy as np
import torch

from kvferry.kernels.table import HOLE, Int64s

from .ops_checks import check_bytes, check_elements, describe, host_int64s, is_near
from .registered import first_overlap


def check_spans(
    blobs: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, checksums: torch.Tensor
) -> tuple[Int64s, Int64s]:
    """Check spans of *blobs*, each of which gets a checksum.

    Returns:
        Offsets and sizes, ``[N]`` int64 each.

    Raises:
        ValueError: an argument is not what it must be.
    """
    check_bytes("blobs", blobs, blobs.device)
    starts = host_int64s("offsets", offsets)
    spans = host_int64s("sizes", sizes, starts.size)
    check_elements("checksums", checksums, torch.int64, blobs.device, starts.size)
    if not starts.size:
        return starts, spans
    wrong = (spans < 0) | (spans > blobs.numel())
    if wrong.any():
        raise ValueError(f"sizes must be in 0..{blobs.numel()}; got {spans[wrong][0]}")
    wrong = (starts < 0) | (starts > blobs.numel() - spans)
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"offsets must leave room for {spans[at]} bytes in blobs of {blobs.numel()} bytes; "
            f"got {starts[at]}"
        )
    words = checksums.data_ptr() + 8 * checksums.stride(0) * np.arange(starts.size)
    # spans may overlap each other: they are only read
    for start, size in {*zip(starts.tolist(), spans.tolist(), strict=True)}:
        address = start + blobs.data_ptr()
        if ((words < address + size) & (words + 8 > address)).any():
            raise ValueError(
                f"checksums must not lie in the bytes that they are of; got {describe(checksums)}"
            )
    if first_overlap(words, words + 8) is not None:
        raise ValueError(f"checksums must be apart; got {describe(checksums)}")
    return starts, spans


def check_rows(
    name: str, tensor: torch.Tensor, num_rows: int, row_bytes: int, device: torch.device
) -> None:
    """Raise unless *tensor* holds rows that *device* can reach and that do not overlap."""
    if (
        tensor.dtype is not torch.uint8
        or tensor.layout is not torch.strided
        or tuple(tensor.shape) != (num_rows, row_bytes)
        or (row_bytes > 1 and tensor.stride(1) != 1)
        or (num_rows > 1 and tensor.stride(0) < row_bytes)
        or not is_near(tensor, device)
    ):
        near = device if device.type == "cpu" else f"{device} or pinned"
        raise ValueError(
            f"{name} must be torch.uint8 [{num_rows}, {row_bytes}], bytes of a row adjacent, rows "
            f"apart, on {near}; got {describe(tensor)}"
        )


def check_slots(name: str, tensor: torch.Tensor, num_slots: int, device: torch.device) -> None:
    """Raise unless *tensor* is int64 ``[T]`` on *device*; on a host, of existing slots or holes."""
    if (
        tensor.dtype is not torch.int64
        or tensor.layout is not torch.strided
        or tensor.dim() != 1
        or tensor.device != device
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{name} must be torch.int64 [T], contiguous, on {device}; got {describe(tensor)}"
        )
    if device.type == "cpu" and tensor.shape[0]:
        slots = tensor.numpy()
        wrong = (slots < HOLE) | (slots >= num_slots)
        if wrong.any():
            raise ValueError(
                f"{name} must be {HOLE} (a hole) or in 0..{num_slots - 1}; got {slots[wrong][0]}"
            )
