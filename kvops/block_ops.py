"""Run the block operators: check, then move on the host or launch on the device.

``kvops/ops.py`` has the functions to call; their docstrings say what each argument means.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvferry.kernels.budget import BYTES_IN_FLIGHT, MAX_SMS
from kvferry.kernels.host_blocks import move_blocks
from kvferry.kernels.host_checksum import BlobSums, checksum_spans
from kvferry.kernels.table import HOLE, Int64s, pack_entries

from .op_schemas import define
from .ops_checks import Blocks, check_blocks, check_budget
from .registered import LAYOUTS, RegisteredLayout
from .span_checks import check_spans


def gather_blocks(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    counts: Sequence[int] = (),
    blob_ids: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    checksums: torch.Tensor | None = None,
    done: torch.Tensor | None = None,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
) -> None:
    """Implement ``torch.ops.kvferry.gather_blocks``."""
    registered = LAYOUTS.get(layout).on(caches)
    check_budget(max_sms, bytes_in_flight)
    results = [("checksums", checksums, torch.int64), ("done", done, torch.int32)]
    blocks = check_blocks(
        registered, block_ids, blobs, offsets, counts, blob_ids, places, results, is_load=False
    )
    if not blocks.ids.size:
        return
    packed = pack(registered, blocks)
    if registered.movers:
        blobs_moved, sums = _move_on_host(
            registered, blocks, is_load=False, needs_sums=checksums is not None
        )
        if checksums is not None:
            checksums.numpy()[blobs_moved] = sums
        if done is not None:
            done.numpy()[blobs_moved] = 1
        return
    from kvferry.kernels import gather

    device = registered.table.device
    gather.gather_blocks(
        registered.table, torch.from_numpy(packed).to(device, non_blocking=True), blocks.counts,
        max_sms=max_sms, bytes_in_flight=bytes_in_flight, checksums=checksums, done=done,
        workspace=_workspace(blocks, device, checksums, done),
    )  # fmt: skip


def scatter_blocks(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    counts: Sequence[int] = (),
    blob_ids: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    checksums: torch.Tensor | None = None,
    mismatch: torch.Tensor | None = None,
    done: torch.Tensor | None = None,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
) -> None:
    """Implement ``torch.ops.kvferry.scatter_blocks``."""
    registered = LAYOUTS.get(layout).on(caches)
    check_budget(max_sms, bytes_in_flight)
    if (checksums is None) != (mismatch is None):
        raise ValueError("checksums and mismatch must be given together; got one of them")
    results = [
        ("checksums", checksums, torch.int64),
        ("mismatch", mismatch, torch.int32),
        ("done", done, torch.int32),
    ]
    blocks = check_blocks(
        registered, block_ids, blobs, offsets, counts, blob_ids, places, results, is_load=True
    )
    if not blocks.ids.size:
        return
    packed = pack(registered, blocks)
    if registered.movers:
        blobs_moved, sums = _move_on_host(
            registered, blocks, is_load=True, needs_sums=checksums is not None
        )
        if checksums is not None and mismatch is not None:
            mismatch.numpy()[blobs_moved[checksums.numpy()[blobs_moved] != sums]] = 1
        if done is not None:
            done.numpy()[blobs_moved] = 1
        return
    from kvferry.kernels import scatter

    device = registered.table.device
    scatter.scatter_blocks(
        registered.table, torch.from_numpy(packed).to(device, non_blocking=True), blocks.counts,
        max_sms=max_sms, bytes_in_flight=bytes_in_flight, checksums=checksums, mismatch=mismatch,
        done=done, workspace=_workspace(blocks, device, checksums, done),
    )  # fmt: skip


def checksum_blocks(
    blobs: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, checksums: torch.Tensor
) -> None:
    """Implement ``torch.ops.kvferry.checksum_blocks``."""
    starts, spans = check_spans(blobs, offsets, sizes, checksums)
    if not starts.size:
        return
    sums = checksum_spans(blobs, starts, spans)
    with torch.inference_mode():
        checksums[: starts.size].copy_(sums, non_blocking=True)


def pack(registered: RegisteredLayout, blocks: Blocks) -> Int64s:
    """Pack a checked transfer: 16 bytes per block, ``[N, 2]`` int64, all that a launch is sent.

    Raises:
        ValueError: a blob has too many blocks, or blocks of two groups.
    """
    return pack_entries(
        registered.table, blocks.ids, blocks.addresses, blocks.counts, blocks.blob_ids,
        blocks.places,
    )  # fmt: skip


def _move_on_host(
    registered: RegisteredLayout, blocks: Blocks, *, is_load: bool, needs_sums: bool
) -> tuple[Int64s, Int64s]:
    """Move, and return the blobs of which a block moved and, if needed, their checksums.

    As arrays: torch would refuse to write a result that was made in inference mode, with all bytes moved.
    """
    chunks, places = blocks.blob_ids, blocks.places
    sums = None
    if needs_sums and chunks is not None and places is not None:
        sums = BlobSums(blocks.ids, chunks, places)
    move_blocks(
        registered.movers, blocks.ids, blocks.addresses, blocks.counts, sums, is_load=is_load
    )
    if sums is not None:
        return sums.result()
    none = np.empty(0, np.int64)
    return none if chunks is None else np.unique(chunks[blocks.ids != HOLE]), none


def _workspace(
    blocks: Blocks,
    device: torch.device,
    checksums: torch.Tensor | None,
    done: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return what a launch counts down in, of its own: launches may run at the same time."""
    if blocks.blob_ids is None or (checksums is None and done is None):
        return None
    return torch.zeros((int(blocks.blob_ids.max()) + 1, 2), dtype=torch.int64, device=device)


GATHER_BLOCKS = define("gather_blocks", gather_blocks)
SCATTER_BLOCKS = define("scatter_blocks", scatter_blocks)
CHECKSUM_BLOCKS = define("checksum_blocks", checksum_blocks)
