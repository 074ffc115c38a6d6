"""A store with the disk tier below it, whose time stands still until a test moves it."""

import os
import threading
import time

from kvferry.kvops.store.disk.admission import Policy
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.jobs import Status
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.io_faults import FaultyIo
from kvferry.kvops.store.store import Lookup

from ..chunks import ARENA_BYTES, MIB, audit, blob, drain, keys, put, read  # noqa: TID252

SIZE, COLD_SIZE, HOT_SIZE = 20_000, 9_000, 30_000
COUNT = 4
OLD, NEW, COLD, HOT, AFTER, LAST = (keys(COUNT, first=first) for first in range(0, 60, 10))
SIZES = {**dict.fromkeys(COLD, COLD_SIZE), **dict.fromkeys(HOT, HOT_SIZE)}
ROOMY = 64 * MIB
TIGHT = 36 * MIB
"""Room for two segments and not for a quarter of a third one: the next slot size takes the coldest one over."""

TIMEOUT_S = 5.0
DEADLINE_S = 30.0

DONE, ERROR, TIMEOUT, CORRUPT = Status.DONE, Status.ERROR, Status.TIMEOUT, Status.CORRUPT


class Clock:
    """Monotonic seconds, as the test wants them."""

    now = 1000.0

    def __call__(self):
        return self.now


class World:
    """A store, a tier below it, an engine with faults between the tier and the disk, and a clock for all three."""

    def __init__(self, folder, open_store, engine, sync):
        self.folder = folder
        self.clock = Clock()
        self._open_store = open_store
        self._engine = engine
        self._sync = sync
        self.tier = None
        self.store = None

    def open_io(self):
        return FaultyIo(self._engine(), seed=3, clock=self.clock)

    def open(self, quota_bytes, io=None):
        """Open everything with a cold arena."""
        if self.store is not None and not self.store.arena.is_closed:
            # of a tier that a test closed itself
            self.store.close()
            self.store.arena.close()
        self.store, _ = self._open_store()
        self.io = io or self.open_io()
        self.files = BlobFiles.open(self.folder, self.io, quota_bytes=quota_bytes, sync=self._sync)
        policy = Policy(timeout_s=TIMEOUT_S, hold_s=0.0)
        self.tier = DiskTier(self.store, self.files, self.io, policy, self.clock)
        return self.tier

    def close(self):
        if self.tier is not None:
            tier, self.tier = self.tier, None
            assert tier.close(DEADLINE_S)
            drain(self.store)
            self.store.close()
            self.store.arena.close()

    def reopen(self, quota_bytes):
        self.close()
        return self.open(quota_bytes)

    def wait_for(self, condition):
        """Poll until *condition* holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.tier.stats()
            self.tier._driver.changed.wait(0.01)
            self.tier.poll()

    def let_time_pass(self, seconds):
        self.clock.now += seconds
        self.io.wake()

    def put(self, wanted):
        for key in wanted:
            put(self.store, [key], size_of(key))

    def save(self, wanted):
        """Save without a fault, from memory."""
        self.put(wanted)
        assert self.tier.save(wanted, wait=True).statuses == [DONE] * len(wanted)

    def fill(self, first):
        """Have every frame that nobody holds reused; return whose they are."""
        wanted = keys(ARENA_BYTES // SIZE, first=first)
        put(self.store, wanted, SIZE)
        return wanted

    def check_bytes(self, wanted):
        """Whatever the store has of them is right; return what it has."""
        there = [key for key in wanted if self.store.lookup([key]) == [Lookup.HIT]]
        for key in there:
            assert read(self.store, [key], size_of(key)) == [blob(key, size_of(key))]
        return there

    def check_nothing_is_held(self):
        self.tier.poll()
        assert self.tier.stats()["inflight_bytes"] == 0
        assert self.files.stats()["held_slots"] == 0
        stats = self.store.stats()
        assert (stats["writing_frames"], stats["leases"], stats["orphaned_frames"]) == (0, 0, 0)
        assert not self.store._pins
        assert not [path for path in self.folder.rglob("*") if path.suffix == ".tmp"]
        audit(self.store)

    def check_works(self, wanted=AFTER):
        """Some minutes later, whatever pause the faults were worth is over."""
        self.let_time_pass(600.0)
        self.save(wanted)
        self.store.delete(wanted)
        assert self.tier.load(wanted, wait=True).statuses == [DONE] * COUNT
        assert self.check_bytes(wanted) == wanted
        self.check_nothing_is_held()

    def check_disk(self, wanted, may_miss=()):
        """Load from the disk, with a cold arena: all is there but what may be missing, and right."""
        for key in wanted:
            (status,) = self.tier.load([key], wait=True).statuses
            allowed = {DONE, Status.MISSING, CORRUPT} if key in may_miss else {DONE}
            assert status in allowed, key.hex()
            assert self.check_bytes([key]) == [key] * (status is DONE)


def size_of(key):
    return SIZES.get(key, SIZE)


def open_things():
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()
