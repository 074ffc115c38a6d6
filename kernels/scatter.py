"""Scatter: one run of bytes per block → blocks of a paged cache, all layers and groups in one launch.

The kernel is `block_copy.py`'s; here is what a scatter means and what it takes.
"""

from collections.abc import Sequence

import torch

from .block_copy import copy_blocks
from .budget import BYTES_IN_FLIGHT, MAX_SMS
from .table import LayoutTable


def scatter_blocks(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    *,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
    checksums: torch.Tensor | None = None,
    mismatch: torch.Tensor | None = None,
    done: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Copy blocks of all groups into the paged cache.

    The inverse of :func:`.gather.gather_blocks`; arguments as there, except the following. Which of two
    entries of one block wins is not defined. The blocks are written whatever the checksums say: who
    reads *mismatch* must not use those of a blob that does not match.

    Args:
        table: of the cache.
        entries: ``[N, 2]`` int64 on the device.
        counts: entries of each group.
        max_sms: programs at most.
        bytes_in_flight: budget of the launch.
        checksums: what a gather of the same places wrote, ``[B]`` int64, any stride. Given together
            with *mismatch*.
        mismatch: gets 1 for each blob whose bytes have another checksum, ``[B]`` int32, any stride,
            device or pinned memory; otherwise untouched.
        done: gets 1 for each blob after its last byte and its mismatch.
        workspace: ``[B, 2]`` int64 zeros on the device, or None.

    Units:
        Moves ``2 * N * block_bytes`` bytes (each byte read once, written once).

    Raises:
        ValueError: checksums of a table without whole vectors, or aligned to less than 4.

    Source:
        Meaning ``kernels/reference.py::scatter_blocks``; measured by ``perf/bench_scatter.py``.
    """
    copy_blocks(
        table,
        entries,
        counts,
        to_blob=False,
        max_sms=max_sms,
        bytes_in_flight=bytes_in_flight,
        checksums=checksums,
        mismatch=mismatch,
        done=done,
        workspace=workspace,
    )
