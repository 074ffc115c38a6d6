"""The worker's half: moves blocks of one rank between the engine's cache and frames. Worker process.

vLLM's hooks, in call order: submit_store and wait (before a step overwrites blocks), submit_load, get_finished. All but
the copies themselves, which run on the transfer queue's threads, happen on the model runner's thread.

vLLM asserts that a job never fails, so none does: what could not be stored is marked in its frame's header, where the
scheduler's half looks before it publishes; what could not be loaded is kept here until the connector reports it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvferry.kvops.metrics import Metrics
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.transfer.queue import Copy, TransferQueue

from .geometry import Geometry
from .messages import GONE, FrameLoadStoreSpec
from .stats import Tally

logger = logging.getLogger("vllm.kvferry")

WAIT_TIMEOUT_S = 60.0
"""Longest wait for pages that are being read or written, seconds. Copies take milliseconds; this is a hang."""

BlockIds = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Load:
    """A load in flight: which blocks belong to each copy, and which are known to have failed."""

    blocks: list[BlockIds]
    failed_blocks: list[int] = field(default_factory=list)


class KVFerryWorker(OffloadingWorker):
    """Stores and loads of one rank.

    Args:
        queue: moves the bytes.
        frames: the frames of this rank; to fail parts that are never queued.
        geometry: the KV cache groups.
        on_shutdown: called once, when the queue's threads have been joined.

    Threads: the model runner's one thread.
    Ownership: owns *queue*.
    """

    def __init__(
        self,
        queue: TransferQueue,
        frames: Frames,
        geometry: Geometry,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._frames = frames
        self._geometry = geometry
        self._on_shutdown = on_shutdown
        self._loads: dict[int, _Load] = {}
        self._ended: list[TransferResult] = []
        self._failed_blocks: set[int] = set()
        self._failed_jobs: set[int] = set()
        self.tally = Tally()

    # --- jobs --------------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: FrameLoadStoreSpec) -> bool:
        """Queue the chunks of a store. Never waits, never fails."""
        copies: list[Copy] = []
        block_at = row_at = 0
        groups = zip(src_spec.group_sizes, src_spec.block_indices, dst_spec.group_frames, strict=True)
        for group, (num_blocks, first_block, num_frames) in enumerate(groups):
            ids = src_spec.block_ids[block_at : block_at + num_blocks].astype(np.int64)
            refs = dst_spec.refs[row_at : row_at + num_frames]
            block_at, row_at = block_at + num_blocks, row_at + num_frames
            copies += self._store_copies(group, ids, refs.tolist(), first_block)
        if copies:
            self._queue.submit_store(job_id, copies)
        else:
            self._ended.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def _store_copies(
        self, group: int, ids: BlockIds, rows: list[list[int]], first_block: int
    ) -> Iterable[Copy]:
        """Cut the blocks of one group into chunks. Only whole chunks are stored; the others' parts fail.

        vLLM leaves out blocks that a sliding window has passed, and doesn't say which. If just as many are missing as
        lie before the first block in its chunk, it is these, and the other chunks are whole; else nothing is certain.
        """
        size = self._geometry.blocks_per_chunk
        missing = len(rows) * size - len(ids)
        if missing:
            lead = first_block % size
            certain = 1 if missing == lead else len(rows)
            for header, _, generation in rows[:certain]:
                self._frames.fail_write(header, generation)
            self.tally.count(Metrics.SKIPPED_STORES, certain, "partial")
            rows, ids = rows[certain:], ids[size - lead :]
        for at, (header, _, generation) in enumerate(rows):
            blocks = ids[at * size : (at + 1) * size]
            yield Copy(group=group, first=0, block_ids=blocks, header=header, generation=generation)

    def submit_load(
        self, job_id: int, src_spec: FrameLoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Queue the chunks of a load. Never waits, never fails; loads go before stores in any case."""
        copies: list[Copy] = []
        load = _Load([])
        block_at = row_at = 0
        size = self._geometry.blocks_per_chunk
        groups = zip(dst_spec.group_sizes, dst_spec.block_indices, src_spec.group_frames, strict=True)
        for group, (num_blocks, first_block, num_frames) in enumerate(groups):
            ids = dst_spec.block_ids[block_at : block_at + num_blocks].astype(np.int64)
            rows = src_spec.refs[row_at : row_at + num_frames].tolist()
            block_at, row_at = block_at + num_blocks, row_at + num_frames
            first, start = first_block % size, 0
            for header, _, generation in rows:
                blocks = ids[start : start + size - first]
                if header == GONE[0]:
                    load.failed_blocks += blocks.tolist()
                    self.tally.count(Metrics.LOAD_FAILURES, 1, "gone")
                else:
                    copies.append(
                        Copy(group=group, first=first, block_ids=blocks, header=header, generation=generation)
                    )
                    load.blocks.append(blocks)
                start, first = start + size - first, 0
            if start < num_blocks:
                # blocks without a frame: nothing will be written there
                load.failed_blocks += ids[start:].tolist()
        self._loads[job_id] = load
        if copies:
            self._queue.submit_load(job_id, copies)
        else:
            self._end_load(job_id, (), 0, 0.0)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, all as successes."""
        self._poll()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return when the blocks of these jobs may be overwritten, or, for loads, read."""
        self._queue.wait(job_ids, WAIT_TIMEOUT_S)
        if not self._loads.keys().isdisjoint(job_ids):
            # a load that the step waits for must be known to have failed before the step's results go out
            self._poll()

    def shutdown(self) -> None:
        """Stop the queue and let go of the arena. May be called twice."""
        self._queue.close()
        on_shutdown, self._on_shutdown = self._on_shutdown, lambda: None
        on_shutdown()

    # --- failures and numbers ----------------------------------------------------------------------------------

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of failed loads that ended since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_jobs(self) -> set[int]:
        """Return the loads that ended since the last call and of which a chunk failed."""
        failed, self._failed_jobs = self._failed_jobs, set()
        return failed

    def report(self) -> Any:
        """Return what was counted since the last call as vLLM's statistics, or None."""
        self.tally.follow(Metrics.VERIFIED_BLOBS, self._frames.verified_blobs)
        return self.tally.report()

    def _poll(self) -> None:
        for ended in self._queue.poll():
            direction = "load" if ended.is_load else "store"
            self.tally.observe(Metrics.TRANSFER_SECONDS, ended.seconds, direction)
            if ended.is_load:
                self._end_load(ended.job_id, ended.failed, ended.bytes, ended.seconds)
            else:
                self.tally.count(Metrics.STORED_BYTES, ended.bytes)
                self._ended.append(TransferResult(ended.job_id, True, ended.bytes, ended.seconds))

    def _end_load(self, job_id: int, failed: Iterable[int], num_bytes: int, seconds: float) -> None:
        load = self._loads.pop(job_id)
        failed = list(failed)
        for at in failed:
            load.failed_blocks += load.blocks[at].tolist()
        self.tally.count(Metrics.LOADED_BYTES, num_bytes)
        self.tally.count(Metrics.LOADED_CHUNKS, len(load.blocks) - len(failed))
        if load.failed_blocks:
            self._failed_blocks.update(load.failed_blocks)
            self._failed_jobs.add(job_id)
            logger.warning(
                "load %d: %d blocks could not be loaded and will be computed again",
                job_id, len(load.failed_blocks),
            )  # fmt: skip
        self._ended.append(TransferResult(job_id, True, num_bytes, seconds))
