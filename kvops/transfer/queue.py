"""Stores and loads of chunks: submitted without waiting, carried by a device, reported once.

::

    submit ──> ledger (jobs, states) <── lane.step <── device (threads, or a test)
                                              │
                         endpoint (frames) <──┘

Loads go before stores; each direction is first in, first out. A chunk fails or succeeds alone.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic

import numpy as np
import numpy.typing as npt

from kvferry.kernels.layout import BlockLayout, as_block_ids

from .device import Device
from .endpoint import Endpoint
from .host_device import HostDevice
from .jobs import Copy, Counters, Finished, FramesLike, Job, Transfer
from .lane import Lane
from .ledger import Ledger

__all__ = ["Copy", "Finished", "TransferQueue"]

logger = logging.getLogger(__name__)

MIN_REPEAT_S = 1.0
"""Shortest time between two log lines of one wait, seconds."""


class TransferQueue:
    """Moves chunks between the engine's pages and frames.

    Threads:
        Any may call anything; a wait holds up nobody else.

    Ownership:
        Keeps the layouts, hence the cache, alive, and owns the device. The arena must stay mapped
        until :meth:`close` has returned.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        frames: FramesLike,
        device: Device,
        *,
        max_inflight_bytes: int,
    ) -> None:
        """Start the device's lanes.

        Args:
            layouts: one per KV cache group.
            frames: where the parts are.
            device: where the pages are, and what moves them.
            max_inflight_bytes: bytes of stores that may be under way; a job that would exceed it is
                refused. Loads are not bounded: their pages and frames exist already.

        Raises:
            ValueError: a group's pages are not on the device, or the bound is not positive.
        """
        if max_inflight_bytes < 1:
            raise ValueError(f"max_inflight_bytes must be at least 1; got {max_inflight_bytes}")
        self._device = device
        self._movers = [device.make_mover(layout) for layout in layouts]
        self._ledger = Ledger(max_inflight_bytes)
        self._endpoint = Endpoint(self._ledger, frames)
        lanes = [
            Lane(self._ledger, self._endpoint, device.open_stream(lane), device.depth)
            for lane in range(device.num_lanes)
        ]
        device.start([lane.step for lane in lanes])

    @classmethod
    def on_host(
        cls,
        layouts: Sequence[BlockLayout],
        frames: FramesLike,
        *,
        max_inflight_bytes: int,
        threads: int = 1,
    ) -> "TransferQueue":
        """Make a queue whose pages are in host memory, moved by worker threads."""
        return cls(layouts, frames, HostDevice(threads), max_inflight_bytes=max_inflight_bytes)

    @property
    def counters(self) -> Counters:
        """What has ended so far; it goes on counting."""
        return self._ledger.counters

    @property
    def inflight_bytes(self) -> int:
        """Payload of what has not ended, in bytes, both directions."""
        return self._ledger.inflight_bytes

    def submit_store(self, job_id: int, copies: Sequence[Copy]) -> None:
        """Queue chunks to be copied from the engine's pages into their frames. Never waits.

        A job over the bound, or after :meth:`close`, is reported with all copies failed.

        Raises:
            ValueError: a block, place or group does not exist, or the job's number is in use; then
                the job is not accepted, no frame is told, and nothing will be reported.
        """
        self._submit(job_id, copies, is_load=False)

    def submit_load(self, job_id: int, copies: Sequence[Copy]) -> None:
        """Queue chunks to be copied from their frames into the engine's pages. Never waits.

        Raises:
            ValueError: as for :meth:`submit_store`.
        """
        self._submit(job_id, copies, is_load=True)

    def poll(self) -> list[Finished]:
        """Return the jobs that ended since the last call; each job comes once."""
        return self._ledger.take_finished()

    def wait(self, job_ids: Collection[int], timeout_s: float) -> None:
        """Return when the pages of these jobs are free. Jobs that have ended are passed over.

        A store that has read nothing is cancelled; of the others, the pages have been read, though
        checksum and commit may be to come. A load has ended, so that :meth:`poll` has it.

        After *timeout_s* seconds what is waited for is logged, every load that has written nothing
        is cancelled, and stores that are still being read are given up: they end failed, whatever
        they read. Loads whose pages are being written are waited for, with a line each time.
        """
        ledger = self._ledger
        self._end(ledger.cancel_stores(job_ids))
        while not self._block(lambda: not ledger.busy(job_ids), timeout_s):
            with ledger.changed:
                busy = ledger.busy(job_ids)
            logger.error("waited %.1f s for the pages of jobs %s", timeout_s, sorted(busy))
            self._end(ledger.cancel_all(job_ids))
            timeout_s = max(timeout_s, MIN_REPEAT_S)

    def give_way(self, timeout_s: float) -> None:
        """Let the worker threads have the interpreter until a job has ended, *timeout_s* seconds at the most.

        Returns at once when no load is under way. For a caller that would only ask again and again: each of its rounds
        keeps the threads from the interpreter lock, which they need between two copies, for up to 5 ms.
        """
        self._block(lambda: not self._ledger.awaits_load, timeout_s)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is under way, and say whether that came true in time."""
        return self._block(lambda: self._ledger.is_idle, timeout_s)

    def close(self) -> bool:
        """Cancel what has not begun, let the rest end, and stop the device. May be called twice.

        Results can still be polled.

        Returns:
            Whether all copying has stopped. If not, frames and pages must stay mapped.
        """
        self._end(self._ledger.close())
        return self._device.close()

    def _submit(self, job_id: int, copies: Sequence[Copy], *, is_load: bool) -> None:
        ids = self._check(copies)
        job = Job(job_id, is_load, self._device.fence(), monotonic())
        movers = self._movers
        job.add(
            [
                Transfer(job, index, movers[copy.group], copy, ids[index])
                for index, copy in enumerate(copies)
            ]
        )
        self._end(self._ledger.add(job))
        self._device.wake()

    def _check(self, copies: Sequence[Copy]) -> list[npt.NDArray[np.int64]]:
        """Return each copy's block ids, copied, after checking all of them at once."""
        groups: dict[int, list[npt.NDArray[np.int64]]] = {}
        ends: dict[int, int] = {}
        places: list[tuple[int, int, int]] = []
        for copy in copies:
            group, size = copy.group, len(copy.block_ids)
            if not 0 <= group < len(self._movers):
                raise ValueError(f"group must be in 0..{len(self._movers) - 1}; got {group}")
            blocks_per_chunk = self._movers[group].layout.blocks_per_chunk
            if copy.first < 0 or copy.first + size > blocks_per_chunk:
                raise ValueError(
                    f"blocks must lie in places 0..{blocks_per_chunk - 1} of the chunk; "
                    f"got {size} blocks from place {copy.first}"
                )
            groups.setdefault(group, []).append(as_block_ids(copy.block_ids))
            start = ends.get(group, 0)
            ends[group] = start + size
            places.append((group, start, start + size))
        whole = {group: np.concatenate(ids) for group, ids in groups.items()}
        for group, ids in whole.items():
            self._movers[group].layout.check_range(ids)
        return [whole[group][start:end] for group, start, end in places]

    def _end(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._endpoint.end(transfer)

    def _block(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._ledger.changed:
            return self._device.block(self._ledger.changed, done, timeout_s)
