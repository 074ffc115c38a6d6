"""The torch operators as functions: ``torch.ops.kvferry.*`` with names, defaults and arrays of any library.

Each operator checks all its arguments before a byte moves. In eager code these functions leave
``caches`` empty; in a compiled graph they pass the layout's storages, so that what is read and written
is in the graph.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvferry.kernels.budget import BYTES_IN_FLIGHT, MAX_SMS

from .arrays import as_tensor, caches_of, handle_of
from .block_ops import CHECKSUM_BLOCKS, GATHER_BLOCKS, SCATTER_BLOCKS
from .ops_rows import (
    gather_heads,
    gather_quantized,
    gather_slots,
    scatter_dequantized,
    scatter_heads,
    scatter_slots,
)
from .registered import RegisteredLayout, register_layout
from .registered_rows import register_heads, register_quantized, register_rows

__all__ = [
    "as_tensor",
    "checksum_blocks",
    "gather_blocks",
    "gather_heads",
    "gather_quantized",
    "gather_slots",
    "register_heads",
    "register_layout",
    "register_quantized",
    "register_rows",
    "scatter_blocks",
    "scatter_dequantized",
    "scatter_heads",
    "scatter_slots",
]


def gather_blocks(
    layout: RegisteredLayout,
    block_ids: Any,
    blobs: Any,
    offsets: Any,
    *,
    counts: Sequence[int] = (),
    blob_ids: Any = None,
    places: Any = None,
    checksums: Any = None,
    done: Any = None,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
) -> None:
    """Copy KV blocks of all layers and groups out of the paged cache, into blobs.

    Block ``block_ids[i]`` goes to ``blobs[offsets[i]:]``, its segments in blob order
    (``kernels/layout.py``). On a device this is one launch, enqueued on the current stream: *blobs* may
    be read once that stream has passed. On the host it is done when the call returns.

    Args:
        layout: of ``register_layout``. Its cache is only read.
        block_ids: which blocks, ``[N]`` int64 on the host, groups one after the other, repeats allowed.
            ``-1`` is a hole: its bytes in *blobs* keep what they held.
        blobs: destination, ``[bytes]`` uint8, contiguous: on the device, pinned host memory, or, for a
            cache in host memory, any. Bytes that belong to no block keep what they held.
        offsets: where each block's own bytes start in *blobs*, ``[N]`` int64 on the host. Blocks must
            not overlap; addresses are multiples of the layout's alignment (at most 16).
        counts: entries of each group, summing to N; not needed for one group.
        blob_ids: number of each entry's blob in this transfer, ``[N]`` int64 on the host; each at most
            255 times, holes aside, and in one group.
        places: place of each entry's block in its blob, ``[N]`` int64 on the host; with *blob_ids*.
        checksums: gets the checksum of each blob's moved blocks, ``[blobs]`` int64, any stride (say,
            words of the frame headers). A blob of holes alone gets none. Needs *blob_ids*, and a
            layout aligned to 16 bytes.
        done: gets 1 for each blob when its last byte and its checksum are written, ``[blobs]`` int32,
            any stride; zeroed by the caller before. A blob of holes alone gets none. Needs *blob_ids*.
        max_sms: most streaming multiprocessors to take; a host ignores it.
        bytes_in_flight: bytes on their way at once; a host ignores it.

    Returns:
        Nothing; *blobs*, *checksums* and *done* are written in place.

    Raises:
        ValueError: an argument differs from the above, an id or an offset is out of range, or a
            destination overlaps another one or the cache. No byte has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Moves ``2 * block_bytes`` bytes for each block that is not a hole (each byte read once, written
        once), and 16 bytes of metadata per block to a device.

    Source:
        Kernel ``kernels/gather.py``; on the host ``kernels/host_blocks.py``; meaning
        ``kernels/reference.py::gather_blocks``; measured by ``perf/bench_gather.py``.

    Example:
        >>> cache = torch.zeros(8, 18432, dtype=torch.uint8)
        >>> layout = register_layout(BlockLayout.from_tensors([cache], [18432], 1))  # doctest: +SKIP
        >>> blobs = torch.empty(2 * 18432, dtype=torch.uint8)
        >>> gather_blocks(layout, torch.tensor([5, 1]), blobs, torch.tensor([0, 18432]))  # doctest: +SKIP
    """
    GATHER_BLOCKS(
        handle_of(layout), caches_of(layout), as_tensor("block_ids", block_ids),
        as_tensor("blobs", blobs), as_tensor("offsets", offsets), counts,
        _maybe("blob_ids", blob_ids), _maybe("places", places), _maybe("checksums", checksums),
        _maybe("done", done), max_sms, bytes_in_flight,
    )  # fmt: skip


def scatter_blocks(
    layout: RegisteredLayout,
    block_ids: Any,
    blobs: Any,
    offsets: Any,
    *,
    counts: Sequence[int] = (),
    blob_ids: Any = None,
    places: Any = None,
    checksums: Any = None,
    mismatch: Any = None,
    done: Any = None,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
) -> None:
    """Copy blobs into KV blocks of all layers and groups of the paged cache: the inverse of a gather.

    Block ``block_ids[i]`` receives ``blobs[offsets[i]:]``. On a device this is one launch, enqueued on
    the current stream: the blocks may be read once that stream has passed. On the host it is done when
    the call returns.

    Args:
        layout: of ``register_layout``. Bytes of its cache that belong to no named block keep what
            they held.
        block_ids: which blocks, ``[N]`` int64 on the host, groups one after the other. No block twice,
            nor two blocks of groups that share their bytes. ``-1`` is a hole: nothing is written.
        blobs: source, ``[bytes]`` uint8, contiguous: on the device, pinned host memory, or, for a
            cache in host memory, any. Only read.
        offsets: where each block's own bytes start in *blobs*, ``[N]`` int64 on the host; overlaps are
            allowed; addresses are multiples of the layout's alignment (at most 16).
        counts: entries of each group, summing to N; not needed for one group.
        blob_ids: number of each entry's blob in this transfer, ``[N]`` int64 on the host; each at most
            255 times, holes aside, and in one group.
        places: place of each entry's block in its blob, ``[N]`` int64 on the host; with *blob_ids*.
        checksums: what a gather of the same blocks and places wrote, ``[blobs]`` int64, any stride.
            Needs *blob_ids* and *mismatch*.
        mismatch: gets 1 for each blob whose bytes have another checksum, ``[blobs]`` int32, any stride;
            other elements keep what they held. The bytes are scattered all the same.
        done: gets 1 for each blob when its last byte is written, ``[blobs]`` int32, any stride; zeroed
            by the caller before. A blob of holes alone gets none. Needs *blob_ids*.
        max_sms: most streaming multiprocessors to take; a host ignores it.
        bytes_in_flight: bytes on their way at once; a host ignores it.

    Returns:
        Nothing; the cache, *mismatch* and *done* are written in place.

    Raises:
        ValueError: an argument differs from the above, an id or an offset is out of range, or a
            destination overlaps another one. No byte has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Moves ``2 * block_bytes`` bytes for each block that is not a hole (each byte read once, written
        once), and 16 bytes of metadata per block to a device.

    Source:
        Kernel ``kernels/scatter.py``; on the host ``kernels/host_blocks.py``; meaning
        ``kernels/reference.py::scatter_blocks``; measured by ``perf/bench_scatter.py``.

    Example:
        >>> cache = torch.zeros(8, 18432, dtype=torch.uint8)
        >>> layout = register_layout(BlockLayout.from_tensors([cache], [18432], 1))  # doctest: +SKIP
        >>> blobs = torch.ones(2 * 18432, dtype=torch.uint8)
        >>> scatter_blocks(layout, torch.tensor([5, 1]), blobs, torch.tensor([0, 18432]))  # doctest: +SKIP
    """
    SCATTER_BLOCKS(
        handle_of(layout), caches_of(layout), as_tensor("block_ids", block_ids),
        as_tensor("blobs", blobs), as_tensor("offsets", offsets), counts,
        _maybe("blob_ids", blob_ids), _maybe("places", places), _maybe("checksums", checksums),
        _maybe("mismatch", mismatch), _maybe("done", done), max_sms, bytes_in_flight,
    )  # fmt: skip


def checksum_blocks(blobs: Any, offsets: Any, sizes: Any, checksums: Any) -> None:
    """Compute the checksums of blobs that lie in memory: what a gather of the same bytes wrote.

    ``checksums[i]`` receives the checksum of ``blobs[offsets[i] : offsets[i] + sizes[i]]``, taken from
    its first byte: that of a whole blob whose blocks are in their places. On a device it is enqueued on
    the current stream. On the host it is done when the call returns.

    Args:
        blobs: ``[bytes]`` uint8, contiguous, on the host or a device. Only read.
        offsets: where each span starts in *blobs*, ``[N]`` int64 on the host; overlaps are allowed.
        sizes: bytes of each span, ``[N]`` int64 on the host.
        checksums: ``[N or more]`` int64, any stride, on the same device or in pinned host memory, not
            in the spans. Elements beyond N keep what they held.

    Returns:
        Nothing; *checksums* is written in place.

    Raises:
        ValueError: an argument differs from the above. Nothing has been written.

    Threads:
        Any number at once, as long as no two write the same elements.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Reads each span once; writes 8 bytes for each.

    Source:
        Meaning ``kernels/checksum.py::checksum_bytes``; on a device ``kernels/host_checksum.py``.

    Example:
        >>> sums = torch.zeros(1, dtype=torch.int64)
        >>> checksum_blocks(
        ...     torch.zeros(64, dtype=torch.uint8), torch.tensor([0]), torch.tensor([64]), sums
        ... )  # doctest: +SKIP
    """
    CHECKSUM_BLOCKS(
        as_tensor("blobs", blobs), as_tensor("offsets", offsets), as_tensor("sizes", sizes),
        as_tensor("checksums", checksums),
    )  # fmt: skip


def _maybe(name: str, array: Any) -> torch.Tensor | None:
    return None if array is None else as_tensor(name, array)
