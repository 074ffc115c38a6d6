"""The disk tier as vLLM's scheduler sees it: a chunk on the disk is one to come back for, until a deadline.

Scheduler process. Nothing here waits for a drive: a lookup starts a read and is answered RETRY, the steps after it take
in what has arrived.
"""

from collections.abc import Iterable, Iterator
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

_WORTH_WAITING = {Status.WAITING, Status.PENDING, Status.BUSY}
_STATS = ("avg", "p50", "p99")


class Disk:
    """Threads: the scheduler's one thread. Ownership: owns *tier*."""

    def __init__(self, tier: DiskTier, store: Store) -> None:
        self._tier = tier
        self._store = store
        self._polled_step = -1
        self.is_loading = tier.is_loading
        self.is_fresh = tier.is_fresh
        self.stored = tier.stored
        self.poll = tier.poll

    def has(self, key: bytes) -> bool:
        """Return whether *key* is on the disk or on its way from there."""
        return self._tier.is_loading(key) or self._tier.contains(key)

    def fetch(self, key: bytes, tokens: int) -> LookupResult:
        """Have *key* read, from the end of the step on, or look whether it has come; HIT holds until the end of the step."""
        store = self._store
        if self._polled_step != store.step:
            self._polled_step = store.step
            self._tier.poll()
        frame = store.frames.get(key)
        if frame is not None and frame.is_ready:
            frame.step = store.step
            return LookupResult.HIT
        (status,) = self._tier.load([key], tokens=tokens, start=False).statuses
        return LookupResult.RETRY if status in _WORTH_WAITING else LookupResult.MISS

    def used(self, frames: Iterable[Frame]) -> None:
        """Note that a load reads *frames*: they are reused, and held by its lease."""
        self._tier.claimed(frames)
        self._tier.used(frames)

    def give_way(self) -> None:
        """If something is on its way up, wait a moment for it: the engine would step without end."""
        if self._tier.is_loading_any:
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
