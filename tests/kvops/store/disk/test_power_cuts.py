"""The power goes at the k-th change of the disk: saves, evictions, segments that change hands, journals rewritten.

What the tier says after that, for each sync policy: nothing wrong is ever hit; with "always" all is there whose save was
answered; with the others all that was there when it was last synced. Usage stays below the quota, nothing unfinished
is left, and the tier goes on.
"""

import random
import shutil

import pytest

from kvferry.kvops.store.disk import journal
from kvferry.kvops.store.disk.admission import Policy
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.jobs import Status
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.io_faults import FaultyIo, PowerCut
from kvferry.kvops.store.io_threads import ThreadIo
from kvferry.kvops.store.store import Lookup

from ..chunks import ARENA_BYTES, MIB, blob, drain, keys, put, read  # noqa: TID252
from .blobs import disk_bytes

QUOTA = 8 * MIB
LARGE, HUGE = 900_000, 1_300_000
"""The quota has room for eight or for five of them."""

WANTED = keys(24)
DEADLINE_S = 30.0
DONE = Status.DONE


def size_of(key):
    return HUGE if WANTED.index(key) in range(13, 19) else LARGE


class Life:
    """From opening the folder until the power goes, if it does.

    Attributes:
        done: chunks whose save was answered. synced: those that were there when all was last synced.
        there: those that memory said were there at the end.
    """

    def __init__(self, folder, store, sync, seed):
        self.folder, self.store, self.sync = folder, store, sync
        self.io = FaultyIo(ThreadIo(threads=1), seed=seed, power_cuts=True)
        self.tier = None
        self.done, self.synced, self.there = set(), set(), set()

    def run(self, cut):
        """Live until change *cut*; return whether the power went. 0: it does not."""
        if cut:
            self.io.cut_after(cut)
        try:
            files = BlobFiles.open(self.folder, self.io, quota_bytes=QUOTA, sync=self.sync)
            self.tier = DiskTier(self.store, files, self.io, Policy(hold_s=0.0))
            self.work()
            assert self.tier.close(DEADLINE_S)
        except PowerCut:
            self.note_there()
        was_cut = self.io._is_cut
        if self.tier is not None:
            # it met the cut, and ended
            self.tier._driver.close(DEADLINE_S)
            assert not self.tier._driver._thread.is_alive()
        self.io.crash_image()
        assert self.io.close(DEADLINE_S)
        return was_cut

    def work(self):
        # small ones, then more than there is room for, then others of another size, then the first ones again
        for begin, end in ((0, 3), (3, 8), (8, 13), (13, 16), (16, 19), (19, 24), (0, 3)):
            self.save(WANTED[begin:end])
            if begin in (3, 13):
                self.sync_all()
            self.load(WANTED[begin])

    def save(self, wanted):
        for key in wanted:
            put(self.store, [key], size_of(key))
        handle = self.tier.save(wanted, wait=True, timeout_s=DEADLINE_S)
        assert handle.is_done
        self.store.delete(wanted)
        answers = zip(wanted, handle.statuses, strict=True)
        self.done |= {key for key, status in answers if status is DONE}
        self.note_there()
        if self.io._is_cut:
            raise PowerCut
        assert set(handle.statuses) <= {DONE, Status.EXISTS}

    def sync_all(self):
        if self.tier.flush(DEADLINE_S):
            self.tier._files.sync_now()
            self.note_there()
            self.synced = set(self.there)

    def load(self, key):
        self.tier.load([key], wait=True, timeout_s=DEADLINE_S)
        self.store.delete([key])

    def note_there(self):
        if self.tier is not None:
            self.there = {key for key in WANTED if self.tier.contains(key)}

    @property
    def promised(self):
        """What must be there once the power is back."""
        return (self.done if self.sync == "always" else self.synced) & self.there


def check(folder, store, life):
    """Open what the power cut left."""
    io = ThreadIo(threads=1)
    files = BlobFiles.open(folder, io, quota_bytes=QUOTA, sync=life.sync)
    stats = files.stats()
    assert disk_bytes(folder) <= QUOTA
    assert not list(folder.rglob("*.tmp"))
    if life.sync != "never":
        # a segment has its name only when it is whole
        assert stats["quarantined_files"] == stats["unusable_files"] == 0
    tier = DiskTier(store, files, io, Policy(hold_s=0.0))
    found = {}
    for key in WANTED:
        (found[key],) = tier.load([key], wait=True).statuses
        assert found[key] in (DONE, Status.MISSING, Status.CORRUPT)
        assert (store.lookup([key]) == [Lookup.HIT]) == (found[key] is DONE)
        expected = blob(key, size_of(key)) if found[key] is DONE else None
        assert read(store, [key], size_of(key)) == [expected]
        tier.poll()
        store.delete([key])
    lost = {WANTED.index(key) for key in life.promised if found[key] is not DONE}
    assert not lost, f"{lost} of {len(life.promised)}"
    # one by one: what was loaded just now outlives what was only saved
    for key in keys(3, first=500):
        put(store, [key], LARGE)
        assert tier.save([key], wait=True).statuses == [DONE]
        store.delete([key])
        assert tier.load([key], wait=True).statuses == [DONE]
        assert read(store, [key], LARGE) == [blob(key, LARGE)]
        tier.poll()
        store.delete([key])
    assert disk_bytes(folder) <= QUOTA
    assert tier.close(DEADLINE_S)


@pytest.fixture
def live(shm, open_store, monkeypatch):
    """Live once on an empty folder, cut, and look at what is left; return whether it was cut, and changes in all."""
    # rewrites again and again, with the few records that there are
    monkeypatch.setattr(journal, "SLACK_RECORDS", 5)
    folder = shm / "disk"
    store, _ = open_store(arena_bytes=ARENA_BYTES)
    arenas = [store]

    def once(sync, cut, seed):
        shutil.rmtree(folder, ignore_errors=True)
        life = Life(folder, arenas[-1], sync, seed)
        was_cut = life.run(cut)
        if arenas[-1]._pins:
            # of a driver that is no more
            arenas[-1].arena.close()
            arenas.append(open_store(arena_bytes=ARENA_BYTES)[0])
        drain(arenas[-1])
        try:
            check(folder, arenas[-1], life)
        except AssertionError:
            print(f"sync {sync}, cut {cut}, seed {seed}")
            raise
        drain(arenas[-1])
        return was_cut, life.io.changes

    return once


@pytest.mark.parametrize("sync", ["always", "batch", "never"])
def test_whatever_is_left_is_right(live, sync):
    was_cut, changes = live(sync, 0, seed=1)
    assert not was_cut
    assert changes > 40
    chance = random.Random(f"{sync} cuts")
    for cut in sorted(chance.sample(range(1, changes), 24)):
        live(sync, cut, seed=cut)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sync", ["always", "batch", "never"])
def test_whatever_is_left_is_right_after_each_change(live, sync, seed):
    cut, was_cut = 0, True
    while was_cut:
        cut += 1
        was_cut, _ = live(sync, cut, seed=1000 * seed + cut)
    assert cut > 40
