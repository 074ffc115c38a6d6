"""Who is where: jobs and transfers, and the one lock around them. Calls nobody, moves nothing.

Every change of a transfer's state goes through here and through the table in states.py.
"""

import threading
import time
from collections import deque
from collections.abc import Collection

from .jobs import Counters, Finished, Job, Transfer
from .states import Event, State, advance, is_awaited, is_unread


class Ledger:
    """Jobs under way, in order; loads go first.

    Attributes:
        counters: what has ended so far.
        inflight_bytes: payload of the transfers that have not ended, in bytes, both directions.
        changed: notified whenever a transfer lets go of its pages or a job ends; its lock guards all.

    Threads: any.
    """

    def __init__(self, max_store_bytes: int) -> None:
        self.counters = Counters()
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self._max_store_bytes = max_store_bytes
        self._store_bytes = 0
        self._load_bytes = 0
        self._jobs: dict[int, Job] = {}
        self._loads: deque[Transfer] = deque()
        self._stores: deque[Transfer] = deque()
        self._finished: list[Finished] = []
        self._is_closed = False

    @property
    def inflight_bytes(self) -> int:
        """Payload of the transfers that have not ended, in bytes."""
        return self._store_bytes + self._load_bytes

    @property
    def is_idle(self) -> bool:
        """No job is under way."""
        return not self._jobs

    @property
    def awaits_load(self) -> bool:
        """A load is under way, and no job has ended that nobody has taken."""
        return not self._finished and any(job.is_load for job in self._jobs.values())

    def add(self, job: Job) -> list[Transfer]:
        """Accept a job, whole or not at all; return what has failed at once and wants settling.

        Raises:
            ValueError: a job of this number is under way.
        """
        with self._lock:
            if job.job_id in self._jobs:
                raise ValueError(f"job {job.job_id} is under way; its number cannot be used again")
            self._jobs[job.job_id] = job
            num_bytes = sum([transfer.num_bytes for transfer in job.transfers])
            if job.is_load:
                self._load_bytes += num_bytes
                refused = self._is_closed
            else:
                over = self._store_bytes + num_bytes > self._max_store_bytes
                self._store_bytes += num_bytes
                refused = self._is_closed or over
                if over:
                    self.counters.skipped_stores += len(job.transfers)
            if not job.transfers:
                self._end_job(job)
                return []
            cancelled = self._cancel([t for t in job.transfers if refused or t.header < 0])
            waiting = self._loads if job.is_load else self._stores
            waiting.extend([t for t in job.transfers if t.state is State.QUEUED])
            return cancelled

    def claim(self) -> Transfer | None:
        """Take the next transfer, or None."""
        with self._lock:
            for waiting in (self._loads, self._stores):
                while waiting:
                    transfer = waiting.popleft()
                    # one that was cancelled in the queue has been settled by whoever did it
                    if transfer.state is State.QUEUED:
                        self._advance(transfer, Event.CLAIM)
                        if transfer.job.claimed_s < 0:
                            transfer.job.claimed_s = time.monotonic()
                        return transfer
        return None

    def start(self, transfer: Transfer) -> bool:
        """Allow the pages to be touched from now on; False: it was cancelled meanwhile."""
        with self._lock:
            if transfer.state is not State.CLAIMED:
                return False
            self._advance(transfer, Event.START)
            return True

    def passed(self, transfer: Transfer) -> bool:
        """Note that the pages are no longer touched; False: it was given up meanwhile."""
        with self._lock:
            self._advance(transfer, Event.PASS)
            return transfer.state is State.MOVED

    def fail(self, transfer: Transfer) -> None:
        """Note that it cannot go on, and touches no page any more. Again is no change."""
        with self._lock:
            if transfer.state is not State.FAILED:
                self._advance(transfer, Event.FAIL)

    def release(self, transfer: Transfer) -> None:
        """Close the books on a transfer whose frame has been told; ends its job after the last."""
        with self._lock:
            job, counters = transfer.job, self.counters
            if transfer.state is State.MOVED:
                self._advance(transfer, Event.FINISH)
                job.moved_bytes += transfer.num_bytes
                if job.is_load:
                    counters.loaded_chunks += 1
                    counters.loaded_bytes += transfer.num_bytes
                else:
                    counters.stored_chunks += 1
                    counters.stored_bytes += transfer.num_bytes
            else:
                job.failed.append(transfer.index)
                if job.is_load:
                    counters.failed_loads += 1
                else:
                    counters.failed_stores += 1
            self._advance(transfer, Event.RELEASE)
            if job.is_load:
                self._load_bytes -= transfer.num_bytes
            else:
                self._store_bytes -= transfer.num_bytes
            job.num_open -= 1
            if not job.num_open:
                self._end_job(job)

    def count_error(self) -> None:
        """Count an exception that was caught."""
        with self._lock:
            self.counters.errors += 1

    def take_finished(self) -> list[Finished]:
        """Return the jobs that ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def cancel_stores(self, job_ids: Collection[int]) -> list[Transfer]:
        """Cancel stores that have read nothing; return those that want settling by the caller."""
        with self._lock:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
            stores = [t for job in jobs if not job.is_load for t in job.transfers]
            return self._cancel(stores, count=True)

    def cancel_all(self, job_ids: Collection[int]) -> list[Transfer]:
        """Cancel these jobs, and give up stores that are being read; return as above."""
        with self._lock:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
            cancelled = self._cancel([t for job in jobs for t in job.transfers], count=True)
            for job in jobs:
                for transfer in job.transfers:
                    if transfer.state is State.MOVING and not job.is_load:
                        self._advance(transfer, Event.CANCEL)
            return cancelled

    def close(self) -> list[Transfer]:
        """Refuse jobs from now on and cancel all that has not begun; return as above."""
        with self._lock:
            self._is_closed = True
            transfers = [t for job in self._jobs.values() for t in job.transfers]
            return self._cancel(transfers, count=True)

    def busy(self, job_ids: Collection[int]) -> list[int]:
        """Return those of the jobs whose pages are not free yet. The caller holds the lock.

        A store's are free when it has been read, or nobody will publish what is read now; a load's
        when it has ended, so that its failures are known as well.
        """
        jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
        return [job.job_id for job in jobs if job.is_load or job.num_awaited]

    def _cancel(self, transfers: list[Transfer], count: bool = False) -> list[Transfer]:
        """Cancel what has not begun. A claimed one is settled by its lane, the rest by the caller."""
        unclaimed = []
        for transfer in transfers:
            if not is_unread(transfer.state):
                continue
            if transfer.state is State.QUEUED:
                unclaimed.append(transfer)
            self._advance(transfer, Event.CANCEL)
            transfer.is_cancelled = True
            if transfer.job.is_load:
                self.counters.cancelled_loads += count
            else:
                self.counters.cancelled_stores += count
        return unclaimed

    def _advance(self, transfer: Transfer, event: Event) -> None:
        before = transfer.state
        transfer.state = after = advance(before, event)
        if is_awaited(before) and not is_awaited(after):
            transfer.job.num_awaited -= 1
            if not transfer.job.num_awaited:
                self.changed.notify_all()

    def _end_job(self, job: Job) -> None:
        del self._jobs[job.job_id]
        self._finished.append(job.end(time.monotonic()))
        # a job and its transfers know each other; what has ended must not wait for the collector
        job.transfers = []
        self.changed.notify_all()
