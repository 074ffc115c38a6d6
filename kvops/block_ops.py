"""Run the block operators: check, then move on the host or launch on the device.

``kvops/ops.py`` has the functions to call; their docstrings say what each argument means.
"""

from collections.abc import Sequence

import torch

from kvferry.kernels.host_blocks import move_blocks
from kvferry.kernels.table import pack_entries

from .op_schemas import BYTES_IN_FLIGHT, MAX_SMS, define
from .ops_checks import Blocks, check_blocks, check_budget
from .registered import LAYOUTS, RegisteredLayout


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
    if registered.movers:
        move_blocks(registered.movers, blocks.ids, blocks.addresses, blocks.counts, is_load=False)
        return
    from kvferry.kernels import gather

    gather.gather_blocks(
        registered.table, entries_of(registered, blocks), blocks.counts,
        max_sms=max_sms, bytes_in_flight=bytes_in_flight, checksums=checksums, done=done,
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
    if registered.movers:
        move_blocks(registered.movers, blocks.ids, blocks.addresses, blocks.counts, is_load=True)
        return
    from kvferry.kernels import scatter

    scatter.scatter_blocks(
        registered.table, entries_of(registered, blocks), blocks.counts,
        max_sms=max_sms, bytes_in_flight=bytes_in_flight,
        checksums=checksums, mismatch=mismatch, done=done,
    )  # fmt: skip


def entries_of(registered: RegisteredLayout, blocks: Blocks) -> torch.Tensor:
    """Pack a checked transfer and send it to the device: 16 bytes per block.

    Returns:
        ``[N, 2]`` int64 on the layout's device, ordered on its current stream.
    """
    packed = pack_entries(
        registered.table, blocks.ids, blocks.addresses, blocks.counts, blocks.blob_ids,
        blocks.places,
    )  # fmt: skip
    return torch.from_numpy(packed).to(registered.table.device, non_blocking=True)


GATHER_BLOCKS = define("gather_blocks", gather_blocks)
SCATTER_BLOCKS = define("scatter_blocks", scatter_blocks)
