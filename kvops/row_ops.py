"""Run the operators that know tokens and heads: check, then move on the host or launch on the device.

``kvops/ops_rows.py`` has the functions to call; their docstrings say what each argument means.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvferry.kernels.budget import MAX_SMS
from kvferry.kernels.table import BLOCK_MASK, HOLE, Int64s

from .op_schemas import define
from .ops_checks import check_apart, check_once, check_one_group, check_sms
from .registered_rows import HEADS, QUANTIZED, ROWS
from .span_checks import check_rows, check_slots


def gather_slots(
    layout: int,
    caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    max_sms: int = MAX_SMS,
) -> None:
    """Implement ``torch.ops.kvferry.gather_slots``."""
    _move_slots(layout, caches, slot_mapping, rows, max_sms, is_load=False)


def scatter_slots(
    layout: int,
    caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    max_sms: int = MAX_SMS,
) -> None:
    """Implement ``torch.ops.kvferry.scatter_slots``."""
    _move_slots(layout, caches, slot_mapping, rows, max_sms, is_load=True)


def _move_slots(
    layout: int,
    caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    max_sms: int,
    *,
    is_load: bool,
) -> None:
    registered = ROWS.get(layout).on(caches)
    device, known = registered.memory.device, registered.rows
    check_sms(max_sms)
    check_slots("slot_mapping", slot_mapping, known.num_slots, device)
    check_rows("rows", rows, slot_mapping.shape[0], known.row_bytes, device)
    check_apart("rows", rows, registered.memory)
    if not slot_mapping.shape[0]:
        return
    if registered.mover is not None:
        slots = slot_mapping.numpy()
        if is_load:
            check_once("slot_mapping", slots[slots != HOLE])
        registered.mover.move(slots, rows.data_ptr(), rows.stride(0), is_load=is_load)
        return
    from kvferry.kernels import slots as kernels

    launch = kernels.scatter_slots if is_load else kernels.gather_slots
    launch(known, slot_mapping, rows, max_sms=max_sms)


def gather_heads(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    head_first: int = 0,
    head_count: int | None = None,
    max_sms: int = MAX_SMS,
) -> None:
    """Implement ``torch.ops.kvferry.gather_heads``."""
    heads = head_first, head_count
    _move_heads(layout, caches, block_ids, blobs, offsets, heads, max_sms, is_load=False)


def scatter_heads(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    head_first: int = 0,
    head_count: int | None = None,
    max_sms: int = MAX_SMS,
) -> None:
    """Implement ``torch.ops.kvferry.scatter_heads``."""
    heads = head_first, head_count
    _move_heads(layout, caches, block_ids, blobs, offsets, heads, max_sms, is_load=True)


def _move_heads(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    heads: tuple[int, int | None],
    max_sms: int,
    *,
    is_load: bool,
) -> None:
    registered = HEADS.get(layout).on(caches)
    runs = registered.runs
    check_sms(max_sms)
    runs.check_heads(*heads)
    ids, addresses = check_one_group(
        registered.memory, runs.num_blocks, runs.block_bytes, runs.alignment,
        block_ids, blobs, offsets, is_load=is_load,
    )  # fmt: skip
    if not ids.size:
        return
    if registered.mover is not None:
        registered.mover.move(ids, addresses, *heads, is_load=is_load)
        return
    from kvferry.kernels import heads as kernels

    launch = kernels.scatter_heads if is_load else kernels.gather_heads
    entries = _entries(ids, addresses, runs.device)
    launch(runs, entries, head_first=heads[0], head_count=heads[1], max_sms=max_sms)


def gather_quantized(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    max_sms: int = MAX_SMS,
) -> None:
    """Implement ``torch.ops.kvferry.gather_quantized``."""
    _move_quantized(layout, caches, block_ids, blobs, offsets, max_sms, is_load=False)


def scatter_dequantized(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    max_sms: int = MAX_SMS,
) -> None:
    """Implement ``torch.ops.kvferry.scatter_dequantized``."""
    _move_quantized(layout, caches, block_ids, blobs, offsets, max_sms, is_load=True)


def _move_quantized(
    layout: int,
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    blobs: torch.Tensor,
    offsets: torch.Tensor,
    max_sms: int,
    *,
    is_load: bool,
) -> None:
    registered = QUANTIZED.get(layout).on(caches)
    rows = registered.rows
    check_sms(max_sms)
    ids, addresses = check_one_group(
        registered.memory, rows.num_blocks, rows.block_bytes, rows.alignment,
        block_ids, blobs, offsets, is_load=is_load,
    )  # fmt: skip
    if not ids.size:
        return
    if registered.mover is not None:
        registered.mover.move(ids, addresses, is_load=is_load)
        return
    from kvferry.kernels import quantized as kernels

    launch = kernels.scatter_dequantized if is_load else kernels.gather_quantized
    launch(rows, _entries(ids, addresses, rows.device), max_sms=max_sms)


def _entries(ids: Int64s, addresses: Int64s, device: torch.device) -> torch.Tensor:
    """Return ``[N, 2]`` int64 on *device*: 16 bytes per block, ordered on its current stream."""
    packed = torch.from_numpy(np.stack((ids & BLOCK_MASK, addresses), axis=1))
    return packed.to(device, non_blocking=True)


GATHER_SLOTS = define("gather_slots", gather_slots)
SCATTER_SLOTS = define("scatter_slots", scatter_slots)
GATHER_HEADS = define("gather_heads", gather_heads)
SCATTER_HEADS = define("scatter_heads", scatter_heads)
GATHER_QUANTIZED = define("gather_quantized", gather_quantized)
SCATTER_DEQUANTIZED = define("scatter_dequantized", scatter_dequantized)
