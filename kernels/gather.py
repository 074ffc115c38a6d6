"""Gather: blocks of a paged cache → one run of bytes per block, all layers and groups in one launch.

The kernel is `block_copy.py`'s; here is what a gather means and what it takes.
"""

from collections.abc import Sequence

import torch

from .block_copy import copy_blocks
from .budget import BYTES_IN_FLIGHT, MAX_SMS
from .table import LayoutTable


def gather_blocks(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    *,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
    checksums: torch.Tensor | None = None,
    done: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Copy blocks of all groups out of the paged cache.

    Each entry's block goes to its address. The copy is enqueued on the current stream. Arguments are
    trusted: `kvops/ops.py` checks them.

    Args:
        table: of the cache.
        entries: ``[N, 2]`` int64 on the device, made by :func:`.table.pack_entries`; a hole moves
            nothing. Addresses are reachable by the device and multiples of ``table.alignment``.
        counts: entries of each group.
        max_sms: programs at most, and so streaming multiprocessors.
        bytes_in_flight: budget of the launch.
        checksums: gets the checksum of each blob's moved blocks, ``[B]`` int64, any stride, device or
            pinned memory. A blob of holes alone gets none. Needs a table that
            ``has_whole_vectors`` and an alignment of 4 or more.
        done: gets 1 for each blob after its last byte and its checksum, ``[B]`` int32, any stride,
            device or pinned memory, ordered for readers of the whole system.
        workspace: ``[B, 2]`` int64 zeros on the device, for *checksums* and *done*; zeros again when the
            copy is done. Launches that may run at the same time need their own. None: made here.

    Units:
        Moves ``2 * N * block_bytes`` bytes (each byte read once, written once).

    Raises:
        ValueError: checksums of a table without whole vectors, or aligned to less than 4.

    Source:
        Meaning ``kernels/reference.py::gather_blocks``; measured by ``perf/bench_gather.py``.
    """
    copy_blocks(
        table,
        entries,
        counts,
        to_blob=True,
        max_sms=max_sms,
        bytes_in_flight=bytes_in_flight,
        checksums=checksums,
        mismatch=None,
        done=done,
        workspace=workspace,
    )
