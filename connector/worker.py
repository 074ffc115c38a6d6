"""The worker's half: moves blocks of one rank between the engine's cache and frames. Worker process.

vLLM's hooks, in call order: submit_store and wait (before a step overwrites blocks), submit_load, get_finished. All but
the copies themselves, which run on the transfer queue's threads, happen on the model runner's thread.

vLLM asserts that a job never fails, so none does: what could not be stored is marked in its frame's header, where the
scheduler's half looks before it publishes; what could not be loaded is kept here until the connector reports it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvferry.kvops.metrics import Metrics
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.transfer.queue import Copy, TransferQueue

from .geometry import Geometry
from .messages import FrameLoadStoreSpec
from .stats import Tally

logger = logging.getLogger("vllm.kvferry")

WAIT_TIMEOUT_S = 60.0
"""Longest wait for pages that are being read or written, seconds. Copies take milliseconds; this is a hang."""

GIVE_WAY_S = 0.002
"""Longest rest of a step that computes nothing while loads are under way, seconds; a new request waits no longer."""

BlockIds = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Load:
    """A load in flight: the blocks of each copy, and those for which there was no frame."""

    blocks: list[BlockIds] = field(default_factory=list)
    lost_blocks: list[int] = field(default_factory=list)


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

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Queue the chunks of a store. Never waits, never fails."""
        assert isinstance(dst_spec, FrameLoadStoreSpec), "the manager makes no other"
        copies: list[Copy] = []
        block_at = row_at = 0
        groups = zip(
            src_spec.group_sizes, src_spec.block_indices, dst_spec.group_frames, strict=True
        )
        for group, (num_blocks, first_block, num_frames) in enumerate(groups):
            ids = src_spec.block_ids[block_at : block_at + num_blocks].astype(np.int64)
            refs = dst_spec.refs[row_at : row_at + num_frames]
            block_at, row_at = block_at + num_blocks, row_at + num_frames
            copies += self._store_copies(group, ids, refs.tolist(), first_block)
        self._queue.submit_store(job_id, copies)
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
            yield Copy(group, 0, blocks, header, generation)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Queue the chunks of a load. Never waits, never fails; loads go before stores in any case."""
        assert isinstance(src_spec, FrameLoadStoreSpec), "the manager makes no other"
        copies: list[Copy] = []
        load = _Load()
        block_at = row_at = 0
        size = self._geometry.blocks_per_chunk
        groups = zip(
            dst_spec.group_sizes, dst_spec.block_indices, src_spec.group_frames, strict=True
        )
        for group, (num_blocks, first_block, num_frames) in enumerate(groups):
            ids = dst_spec.block_ids[block_at : block_at + num_blocks].astype(np.int64)
            rows = src_spec.refs[row_at : row_at + num_frames].tolist()
            block_at, row_at = block_at + num_blocks, row_at + num_frames
            first, start = first_block % size, 0
            for header, _, generation in rows:
                # a frame that is gone has a negative header, and the queue fails its copy
                blocks = ids[start : start + size - first]
                copies.append(Copy(group, first, blocks, header, generation))
                load.blocks.append(blocks)
                start, first = start + size - first, 0
            if start < num_blocks:
                # blocks without a frame: nothing will be written there
                load.lost_blocks += ids[start:].tolist()
        self._loads[job_id] = load
        self._queue.submit_load(job_id, copies)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, all as successes."""
        self._poll()
        ended, self._ended = self._ended, []
        return ended

    def give_way(self) -> None:
        """Let loads go on, in a step that computes nothing: until one has ended, 2 ms at the most."""
        self._queue.give_way(GIVE_WAY_S)

    def wait(self, job_ids: set[int]) -> None:
        """Return when the blocks of these jobs may be overwritten, or, for loads, read."""
        self._queue.wait(job_ids, WAIT_TIMEOUT_S)
        if not self._loads.keys().isdisjoint(job_ids):
            # a load that the step waits for must be known to have failed before the step's results go out
            self._poll()

    def shutdown(self) -> None:
        """Stop the queue and let go of the arena. May be called twice."""
        ended = self._queue.close()
        on_shutdown, self._on_shutdown = self._on_shutdown, lambda: None
        if ended:
            on_shutdown()
        else:
            # unmapping under a thread that still copies would take the process down
            logger.error("the arena stays mapped: a transfer thread still runs")

    # --- failures and numbers ----------------------------------------------------------------------------------

    def is_loading(self, job_id: int) -> bool:
        """Return whether this load has been submitted and has not been reported."""
        return job_id in self._loads

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
        tally, frames, moved = self.tally, self._frames, self._queue.counters
        tally.follow(Metrics.VERIFIED_BLOBS, frames.verified_blobs)
        tally.follow(Metrics.STORED_BYTES, moved.stored_bytes)
        tally.follow(Metrics.LOADED_BYTES, moved.loaded_bytes)
        tally.follow(Metrics.LOADED_CHUNKS, moved.loaded_chunks)
        mismatches = frames.checksum_mismatches
        errors = min(moved.errors, moved.failed_loads - mismatches)
        tally.follow(Metrics.LOAD_FAILURES, mismatches, "checksum")
        tally.follow(Metrics.LOAD_FAILURES, errors, "error")
        tally.follow(Metrics.LOAD_FAILURES, moved.failed_loads - mismatches - errors, "gone")
        return self.tally.report()

    def _poll(self) -> None:
        for ended in self._queue.poll():
            direction = "load" if ended.is_load else "store"
            self.tally.observe(Metrics.QUEUE_WAIT_SECONDS, ended.queue_seconds, direction)
            self.tally.observe(
                Metrics.TRANSFER_SECONDS, ended.seconds - ended.queue_seconds, direction
            )
            if ended.is_load:
                self._note_failures(ended.job_id, ended.failed)
            self._ended.append(TransferResult(ended.job_id, True, ended.bytes, ended.seconds))

    def _note_failures(self, job_id: int, failed: Sequence[int]) -> None:
        load = self._loads.pop(job_id)
        blocks = load.lost_blocks + [block for at in failed for block in load.blocks[at].tolist()]
        if blocks:
            self._failed_blocks.update(blocks)
            self._failed_jobs.add(job_id)
            logger.warning(
                "load %d: %d of %d chunks could not be loaded; the engine is told that %d blocks are missing",
                job_id, len(failed), len(load.blocks), len(blocks),
            )  # fmt: skip
