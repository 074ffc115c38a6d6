"""What goes into a transfer queue, what comes out, and the records in between."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.kernels.layout import BlockIds

from .device import Event, Mover
from .states import State


class FramesLike(Protocol):
    """Frames of an arena, as a transfer needs them. Any thread.

    Each store ends with exactly one ``finish_write`` or ``fail_write``, begun or not; each load with
    exactly one ``finish_read``, begun or not.
    """

    @property
    def address(self) -> int:
        """Where the arena is mapped; offsets below count from it."""
        ...

    def begin_write(self, header: int, generation: int) -> tuple[int, int] | None:
        """Return (offset, bytes) of our part of the frame; None: the frame is gone."""
        ...

    def finish_write(self, header: int, generation: int) -> bool:
        """Mark the part ready; False: the frame is gone."""
        ...

    def fail_write(self, header: int, generation: int) -> None:
        """Mark the part failed."""
        ...

    def begin_read(self, header: int, generation: int) -> tuple[int, int] | None:
        """Return (offset, bytes) of our part; None: the frame is gone or its bytes are wrong."""
        ...

    def finish_read(self, header: int, generation: int, *, ok: bool) -> None:
        """Count the read as done; *ok* False: nobody may read the frame any more."""
        ...


class Copy(NamedTuple):
    """One chunk of a job.

    Attributes:
        group: index of its KV cache group.
        first: place of the first block inside the chunk.
        block_ids: ``[N]`` blocks, in order of their place; copied by the queue.
        header: the frame's header, an offset in the arena; negative: there is no frame, so it fails.
        generation: of the frame.
    """

    group: int
    first: int
    block_ids: BlockIds
    header: int
    generation: int


class Finished(NamedTuple):
    """A job that has ended.

    Attributes:
        job_id: as submitted.
        is_load: direction.
        bytes: payload that was moved and not failed, in bytes.
        seconds: from submission to end.
        failed: indices of the copies that failed, ascending.
        queue_seconds: from submission until its first copy was taken up, or it ended without.
    """

    job_id: int
    is_load: bool
    bytes: int
    seconds: float
    failed: list[int]
    queue_seconds: float


@dataclass(slots=True)
class Counters:
    """What a queue has done so far. Counts of chunks, unless the name says bytes.

    Attributes:
        failed_stores, failed_loads: all that did not succeed, the following included.
        cancelled_stores, cancelled_loads: pages were wanted back, or the queue closed.
        skipped_stores: of jobs over the bound.
        errors: exceptions that were caught.
    """

    stored_chunks: int = 0
    stored_bytes: int = 0
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    cancelled_stores: int = 0
    cancelled_loads: int = 0
    skipped_stores: int = 0
    errors: int = 0


class Job:
    """A job under way. Guarded by its ledger's lock."""

    __slots__ = (
        "claimed_s", "failed", "fence", "is_load", "job_id", "moved_bytes", "num_awaited",
        "num_open", "submitted_s", "transfers",
    )  # fmt: skip

    def __init__(self, job_id: int, is_load: bool, fence: Event | None, now_s: float) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.fence = fence
        self.submitted_s = now_s
        self.claimed_s = -1.0
        self.transfers: list[Transfer] = []
        self.num_open = 0
        self.num_awaited = 0
        self.moved_bytes = 0
        self.failed: list[int] = []

    def add(self, transfers: "Iterable[Transfer]") -> None:
        """Take the copies of the job, once."""
        self.transfers = list(transfers)
        self.num_open = self.num_awaited = len(self.transfers)

    def end(self, now_s: float) -> Finished:
        """Sum up the job."""
        claimed_s = self.claimed_s if self.claimed_s >= 0 else now_s
        return Finished(
            self.job_id,
            self.is_load,
            self.moved_bytes,
            now_s - self.submitted_s,
            sorted(self.failed),
            claimed_s - self.submitted_s,
        )


class Transfer:
    """One chunk under way. Its state is guarded by its ledger's lock; the rest does not change."""

    __slots__ = (
        "block_ids", "first", "generation", "header", "index", "is_cancelled", "job", "mover",
        "num_bytes", "state",
    )  # fmt: skip

    def __init__(
        self, job: Job, index: int, mover: Mover, copy: Copy, block_ids: npt.NDArray[np.int64]
    ) -> None:
        self.job = job
        self.index = index
        self.mover = mover
        self.block_ids = block_ids
        self.first = copy.first
        self.header = copy.header
        self.generation = copy.generation
        self.num_bytes = len(block_ids) * mover.layout.block_bytes
        self.state = State.QUEUED
        self.is_cancelled = False
