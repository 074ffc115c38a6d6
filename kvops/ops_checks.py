"""Checks of the operators' arguments: everything is looked at before a byte moves.

One shape of message: *argument must be X; got Y*.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.checksum import VECTOR_BYTES
from kvferry.kernels.table import HOLE, MAX_BLOB_ID, MAX_PLACE, Int64s

from .registered import Memory, RegisteredLayout, first_overlap

MAX_SMS = 1024
"""Streaming multiprocessors; more than any device has."""

MIN_BYTES_IN_FLIGHT, MAX_BYTES_IN_FLIGHT = 1 << 10, 1 << 26
"""Bytes of one launch that are on their way at once."""

Bools = npt.NDArray[np.bool_]

_INT64 = np.dtype(np.int64)


class Blocks(NamedTuple):
    """The checked entries of one block transfer.

    Attributes:
        ids: ``[N]`` int64, ``HOLE`` moves nothing.
        counts: entries of each group, groups one after the other.
        addresses: ``[N]`` int64, where each block's own bytes are in the blobs.
        blob_ids: ``[N]`` int64, or None.
        places: ``[N]`` int64, or None.
    """

    ids: Int64s
    counts: Sequence[int]
    addresses: Int64s
    blob_ids: Int64s | None
    places: Int64s | None


def describe(value: object) -> str:
    """Say what *value* is, for the second half of a message."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout is not torch.strided:
        return f"{value.dtype} {list(value.shape)}, {value.layout}"
    return f"{value.dtype} {list(value.shape)} of strides {list(value.stride())} on {value.device}"


def is_near(tensor: torch.Tensor, device: torch.device) -> bool:
    """Say whether *device* can reach the bytes: its own memory, or pinned host memory."""
    if tensor.device == device:
        return True
    return device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()


def check_bytes(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless *tensor* is a flat run of bytes that *device* can reach."""
    if (
        tensor.dtype is not torch.uint8
        or tensor.layout is not torch.strided
        or tensor.dim() != 1
        or not tensor.is_contiguous()
        or not is_near(tensor, device)
    ):
        near = device if device.type == "cpu" else f"{device} or pinned"
        raise ValueError(
            f"{name} must be torch.uint8 [bytes], contiguous, on {near}; got {describe(tensor)}"
        )


def host_int64s(name: str, tensor: torch.Tensor, size: int | None = None) -> Int64s:
    """Return an index argument as an array of its own.

    A copy: an argument may lie in memory that the operator writes, and what has been checked must be
    what is used.

    Raises:
        ValueError: it is not int64 ``[size]`` (any length if None) in host memory.
    """
    wanted = "N" if size is None else size
    try:
        # cheaper than to ask for the device, the layout and the rest one by one
        array = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be torch.int64 [{wanted}] on cpu; got {describe(tensor)}"
        ) from error
    if array.dtype != _INT64 or array.ndim != 1 or (size is not None and size != array.size):
        raise ValueError(f"{name} must be torch.int64 [{wanted}] on cpu; got {describe(tensor)}")
    return array.copy()


def check_elements(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, count: int
) -> None:
    """Raise unless *tensor* is a strided vector with room for *count* blobs."""
    if (
        tensor.dtype is not dtype
        or tensor.layout is not torch.strided
        or tensor.dim() != 1
        or tensor.shape[0] < count
        or (tensor.shape[0] > 1 and tensor.stride(0) < 1)
        or not is_near(tensor, device)
    ):
        near = device if device.type == "cpu" else f"{device} or pinned"
        raise ValueError(
            f"{name} must be {dtype} [{count} or more], on {near}; got {describe(tensor)}"
        )


def check_sms(max_sms: int) -> None:
    """Raise unless a launch can keep to it."""
    if not 1 <= max_sms <= MAX_SMS:
        raise ValueError(f"max_sms must be in 1..{MAX_SMS}; got {max_sms}")


def check_budget(max_sms: int, bytes_in_flight: int) -> None:
    """Raise unless a launch can keep to these."""
    check_sms(max_sms)
    if not MIN_BYTES_IN_FLIGHT <= bytes_in_flight <= MAX_BYTES_IN_FLIGHT:
        raise ValueError(
            f"bytes_in_flight must be in {MIN_BYTES_IN_FLIGHT}..{MAX_BYTES_IN_FLIGHT}; "
            f"got {bytes_in_flight}"
        )


def check_counts(counts: Sequence[int], groups: int, size: int) -> Sequence[int]:
    """Return how many entries each group has; one group has them all if nothing is said."""
    if not counts and groups == 1:
        return (size,)
    if len(counts) != groups or min(counts) < 0 or sum(counts) != size:
        raise ValueError(
            f"counts must be {groups} numbers of entries, one for each group, that sum to {size}; "
            f"got {list(counts)}"
        )
    return counts


def check_blocks(
    layout: RegisteredLayout,
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    counts: Sequence[int],
    blob_ids: torch.Tensor | None,
    places: torch.Tensor | None,
    results: Sequence[tuple[str, torch.Tensor | None, torch.dtype]],
    *,
    is_load: bool,
) -> Blocks:
    """Check everything that both directions of a block transfer have in common.

    Args:
        layout: on the memory that is going to be moved.
        block_ids: as the operator got it; so are the others.
        blobs: the other side.
        offsets: where each block is in *blobs*.
        counts: of each group.
        blob_ids: of each entry.
        places: of each entry.
        results: name, tensor and dtype of the vectors with one element per blob.
        is_load: whether the cache is written, and not the blobs.

    Raises:
        ValueError: an argument is not what it must be.
    """
    device = layout.memory.device
    ids = host_int64s("block_ids", block_ids)
    check_bytes("blobs", blobs, device)
    starts = host_int64s("offsets", offsets, ids.size)
    counts = check_counts(counts, len(layout.layouts), ids.size)
    check_apart("blobs", blobs, layout.memory)
    chunk, place = _check_blobs(blob_ids, places, ids.size)
    alignment, num_blobs = layout.table.alignment, 0
    if chunk is not None and chunk.size:
        num_blobs = int(chunk.max()) + 1
    for name, tensor, dtype in results:
        if tensor is None:
            continue
        if chunk is None:
            raise ValueError(f"blob_ids must be given with {name}; got None")
        if name == "checksums" and alignment < VECTOR_BYTES:
            raise ValueError(
                f"checksums must be left out unless the layout is aligned to {VECTOR_BYTES} bytes; "
                f"got {alignment}"
            )
        check_elements(name, tensor, dtype, device, num_blobs)
    if not ids.size:
        return Blocks(ids, counts, starts, chunk, place)
    several = len(counts) > 1
    groups = np.repeat(np.arange(len(counts)), counts) if several else np.zeros(ids.size, np.int64)
    is_hole = ids == HOLE
    _check_ids(layout.num_blocks, ids, groups)
    sizes = layout.block_bytes[groups]
    _check_offsets(alignment, blobs, starts, sizes, is_hole)
    if is_hole.any():
        moved = ~is_hole
        kept, kept_starts, kept_sizes, kept_groups = (
            column[moved] for column in (ids, starts, sizes, groups)
        )
    else:
        kept, kept_starts, kept_sizes, kept_groups = ids, starts, sizes, groups
    if is_load:
        twice = layout.repeated_block(kept, kept_groups)
        if twice is not None:
            raise ValueError(
                f"block_ids must not name bytes of the cache twice in a scatter; got {twice} again"
            )
    else:
        _check_places(kept_starts, kept_starts + kept_sizes)
    address = blobs.data_ptr()
    _check_results(results, num_blobs, kept_starts + address, kept_sizes, layout.memory)
    return Blocks(ids, counts, starts + address, chunk, place)


def check_one_group(
    memory: Memory,
    num_blocks: int,
    block_bytes: int,
    alignment: int,
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    *,
    is_load: bool,
) -> tuple[Int64s, Int64s]:
    """Check the blocks and places of a transfer of one group.

    Returns:
        Block ids, holes among them, and addresses of their shares of blobs, ``[N]`` int64 each.

    Raises:
        ValueError: an argument is not what it must be.
    """
    ids = host_int64s("block_ids", block_ids)
    check_bytes("blobs", blobs, memory.device)
    starts = host_int64s("offsets", offsets, ids.size)
    check_apart("blobs", blobs, memory)
    if not ids.size:
        return ids, starts
    groups, sizes = np.zeros(ids.size, np.int64), np.full(ids.size, block_bytes)
    is_hole = ids == HOLE
    _check_ids(np.array([num_blocks]), ids, groups)
    _check_offsets(alignment, blobs, starts, sizes, is_hole)
    if is_load:
        check_once("block_ids", ids[~is_hole])
    else:
        kept = starts[~is_hole]
        _check_places(kept, kept + block_bytes)
    return ids, starts + blobs.data_ptr()


def check_once(name: str, values: Int64s) -> None:
    """Raise if a number comes twice in what a scatter writes."""
    ordered = np.sort(values)
    twice = ordered[1:][np.diff(ordered) == 0]
    if twice.size:
        raise ValueError(
            f"{name} must not name bytes of the cache twice in a scatter; got {twice[0]} again"
        )


def _check_places(starts: Int64s, ends: Int64s) -> None:
    at = first_overlap(starts, ends)
    if at is not None:
        raise ValueError(
            f"offsets must keep the blocks apart in blobs; got {starts[at]} inside another block"
        )


def _check_ids(num_blocks: Int64s, ids: Int64s, groups: Int64s) -> None:
    wrong = (ids < HOLE) | (ids >= num_blocks[groups])
    if wrong.any():
        at = int(wrong.argmax())
        limit = num_blocks[groups[at]]
        raise ValueError(
            f"block_ids must be {HOLE} (a hole) or in 0..{limit - 1} in group {groups[at]}; "
            f"got {ids[at]}"
        )


def _check_offsets(
    alignment: int, blobs: torch.Tensor, starts: Int64s, sizes: Int64s, is_hole: Bools
) -> None:
    # compared without a sum: an offset near the largest number must not wrap around
    wrong = ((starts < 0) | (starts > blobs.numel() - sizes)) & ~is_hole
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"offsets must leave room for a block of {sizes[at]} bytes in blobs of "
            f"{blobs.numel()} bytes; got {starts[at]}"
        )
    wrong = ((starts + blobs.data_ptr()) % alignment != 0) & ~is_hole
    if wrong.any():
        raise ValueError(
            f"offsets must lead to addresses that are multiples of {alignment}; "
            f"got {starts[int(wrong.argmax())]} in blobs at {blobs.data_ptr():#x}"
        )


def _check_blobs(
    blob_ids: torch.Tensor | None, places: torch.Tensor | None, size: int
) -> tuple[Int64s | None, Int64s | None]:
    if blob_ids is None and places is None:
        return None, None
    if blob_ids is None or places is None:
        raise ValueError("blob_ids and places must be given together; got one of them")
    found = []
    pairs = ("blob_ids", blob_ids, MAX_BLOB_ID), ("places", places, MAX_PLACE)
    for name, tensor, largest in pairs:
        values = host_int64s(name, tensor, size)
        wrong = (values < 0) | (values > largest)
        if wrong.any():
            raise ValueError(f"{name} must be in 0..{largest}; got {values[wrong][0]}")
        found.append(values)
    return found[0], found[1]


def check_apart(name: str, tensor: torch.Tensor, memory: Memory) -> None:
    """Raise if *tensor* reaches into the bytes that a layout uses."""
    start = tensor.data_ptr()
    end = start + _extent(tensor)
    if end > start and memory.is_used(start, end):
        raise ValueError(f"{name} must not overlap the cache; got {describe(tensor)} inside it")


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last; strides are not negative."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _check_results(
    results: Sequence[tuple[str, torch.Tensor | None, torch.dtype]],
    num_blobs: int,
    starts: Int64s,
    sizes: Int64s,
    memory: Memory,
) -> None:
    """Raise if an element of a per-blob vector lies in a block, in the cache, or in another vector."""
    begins, ends = [starts], [starts + sizes]
    names = []
    for name, tensor, _ in results:
        if tensor is None or not num_blobs:
            continue
        check_apart(name, tensor, memory)
        width = tensor.element_size()
        first = tensor.data_ptr() + np.arange(num_blobs) * (tensor.stride(0) * width)
        begins.append(first)
        ends.append(first + width)
        names.append(name)
    if not names:
        return
    if first_overlap(np.concatenate(begins), np.concatenate(ends)) is not None:
        raise ValueError(
            f"{' and '.join(names)} must not overlap the blocks in blobs, nor each other; "
            "got elements that do"
        )
