"""What the scheduler's half tells the worker's half: which frames a job fills or reads.

A message travels pickled with vLLM's step metadata, so it holds numbers only. Row ``i`` of ``refs`` is the frame of the
job's ``i``-th chunk, ``(header offset, blob offset, generation)``; chunks come group by group, in token order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec

GONE = (-1, -1, -1)
"""Reference to a frame that went away between lookup and load; its chunk fails without touching the arena."""

Refs = npt.NDArray[np.int64]


@dataclass
class FrameLoadStoreSpec(LoadStoreSpec):
    """The frames of one job.

    Attributes:
        refs: ``[N, 3]`` int64, see above.
        group_frames: how many of the N rows belong to each offloaded KV cache group, in group order.
    """

    refs: Refs
    group_frames: tuple[int, ...]

    @classmethod
    def from_rows(
        cls, rows: Sequence[tuple[int, int, int]], group_frames: Sequence[int]
    ) -> "FrameLoadStoreSpec":
        """Pack *rows*, which are in group order."""
        return cls(np.array(rows, dtype=np.int64).reshape(-1, 3), tuple(group_frames))


@dataclass
class WorkerGeometry(KVConnectorHandshakeMetadata):
    """What one rank found in the tensors it was given.

    Attributes:
        part_bytes: bytes of this rank's share of one chunk, for each offloaded KV cache group.
    """

    part_bytes: tuple[int, ...]
