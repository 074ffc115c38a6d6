"""The disk tier as vLLM's scheduler sees it: a chunk on the disk is one to come back for, until a deadline.

Scheduler process. Nothing here waits for a drive: a lookup starts a read and is answered RETRY, the steps after it take
in what has arrived.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from kvferry.kvops.metrics import Metrics
from kvferry.kvops.store.disk.jobs import Status
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.frame import Frame
from kvferry.kvops.store.store import Store

from .stats import Labels, Tally

GIVE_WAY_S = 0.002
"""Longest rest of a step that computes nothing, seconds."""

STARTS_PER_STEP = 128
"""Reads that are begun in one step; one costs about 20 us, and the rest comes in the steps after it."""

_ON_ITS_WAY = {Status.WAITING, Status.PENDING}
_STATS = ("avg", "p50", "p99")


class Disk:
    """Threads: the scheduler's one thread. Ownership: owns *tier*."""

    def __init__(self, tier: DiskTier, store: Store) -> None:
        self._tier = tier
        self._store = store
        self._step = -1
        self._starts = 0
        self.is_loading = tier.is_loading
        self.stored = tier.stored
        self.poll = tier.poll

    def has(self, key: bytes) -> bool:
        """Return whether *key* is on the disk or on its way from there."""
        return self._tier.is_loading(key) or self._tier.contains(key)

    def fetch(self, key: bytes, tokens: int) -> LookupResult:
        """Have *key* read, from the end of the step on, or look whether it has come; HIT holds until the end of the step."""
        store, tier = self._store, self._tier
        if self._step != store.step:
            self._step, self._starts = store.step, 0
            tier.poll()
        frame = store.frames.get(key)
        if frame is not None and frame.is_ready:
            frame.step = store.step
            return LookupResult.HIT
        if tier.is_loading(key):
            return LookupResult.HIT_PENDING
        if self._starts >= STARTS_PER_STEP:
            return LookupResult.RETRY
        (status,) = tier.load([key], tokens=tokens, start=False).statuses
        if status is Status.BUSY:
            # nor is there room for another one in this step
            self._starts = STARTS_PER_STEP
            return LookupResult.RETRY
        self._starts += 1
        return LookupResult.HIT_PENDING if status in _ON_ITS_WAY else LookupResult.MISS

    def used(self, frames: Sequence[Frame]) -> frozenset[bytes]:
        """Note that a load reads *frames*: they are reused, and held by its lease. Return the keys that came from the disk."""
        fresh = frozenset(frame.key for frame in frames if self._tier.is_fresh(frame))
        self._tier.claimed(frames)
        self._tier.used(frames)
        return fresh

    def give_way(self) -> None:
        """If something is on its way up, wait a moment for it: the engine would step without end."""
        self._tier.give_way(GIVE_WAY_S)

    def close(self) -> bool:
        """Finish what is under way; False if a drive still holds memory of the arena."""
        return self._tier.close()

    # --- numbers -----------------------------------------------------------------------------------------------

    def count(self, tally: Tally) -> None:
        """Bring the counters of *tally* up to date."""
        counts = self._tier.stats()
        for direction, done in (("save", "saved"), ("load", "loaded")):
            tally.follow(Metrics.DISK_CHUNKS, counts[done], direction)
            tally.follow(Metrics.DISK_BYTES, counts[f"{done}_bytes"], direction)
        for reason in ("error", "timeout", "corrupt"):
            tally.follow(Metrics.DISK_FAILURES, counts[f"load_{reason}"], "load", reason)
        for reason in ("error", "timeout"):
            tally.follow(Metrics.DISK_FAILURES, counts[f"save_{reason}"], "save", reason)
        tally.follow(Metrics.DISK_EVICTED, counts["evicted"])
        tally.follow(Metrics.DISK_SKIPPED, counts["not_admitted"], "admission")
        for reason in ("busy", "off", "no_room"):
            tally.follow(Metrics.DISK_SKIPPED, counts[f"skipped_{reason}"], reason)

    def gauges(self) -> Iterator[tuple[Any, Labels, float]]:
        """Yield what holds now."""
        stats = self._tier.stats()
        yield Metrics.DISK_USED_BYTES, (), stats["used_bytes"]
        yield Metrics.DISK_BLOBS, (), stats["blobs"]
        yield (
            Metrics.DISK_QUARANTINED,
            (),
            stats["quarantined_slots"] + stats["quarantined_files"],
        )
        for direction in ("save", "load"):
            yield Metrics.DISK_OFF, (direction,), stats[f"{direction}s_off"]
        for stage, figures in self._tier.stages().items():
            for stat in _STATS:
                yield Metrics.DISK_STAGE_SECONDS, (stage, stat), figures[f"{stat}_s"]
