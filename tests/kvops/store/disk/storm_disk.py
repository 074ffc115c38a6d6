"""Kill the owner of a folder at random moments, at a random line of the disk tier, or when it has written and not yet
published, and check what the next one finds.

Nothing wrong is ever loaded, what was answered as saved and was not given up is there, the quota holds at every moment,
nothing is left behind that nobody knows, and the numbers add up. Two kinds of life: in a roomy folder nothing is given
up; in a tight one something is all the time, segments change hands and the journal is rewritten.

    python tests/kvops/store/disk/storm_disk.py --runs 200
"""

import json
import logging
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from chunks import ARENA_BYTES, MIB, NAMESPACE, audit, blob, keys, put, read
from crashing import arguments, die_at_line, end, fork

from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.disk import journal as journal_module
from kvferry.kvops.store.disk.admission import Policy
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.format import blob_tag
from kvferry.kvops.store.disk.jobs import Status
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.io_aio import AioIo
from kvferry.kvops.store.io_threads import ThreadIo
from kvferry.kvops.store.store import Store

DISK_FOLDER = str(Path(journal_module.__file__).parent)
TIGHT, ROOMY = 8 * MIB, 96 * MIB
SIZES = (300_000, 450_000, 700_000)
WANTED = keys(90)
"""Of each size, more than there is room for in a tight folder."""
TOGETHER = 4

# what the killed process knew of each chunk
NOTHING, BEGUN, SAVED = range(3)
MOMENT, LINE, PUBLISH = "at a moment", "at a line", "at a publish"
READY = len(WANTED)


def size_of(number):
    return SIZES[number % 3]


def used_bytes(folder):
    """What all files in the folder take at this moment, while somebody may be working in there."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        total += status.st_blocks * 512 * path.is_file()
    return total


class Life:
    """One owner: arena, store, engine, files and tier."""

    def __init__(self, folder, quota_bytes, engine, sync, publishes=0):
        self.arena = Arena.open(None, ARENA_BYTES, session="storm", populate=False)
        self.store = Store.open(self.arena, namespace=NAMESPACE)
        self.io = AioIo(depth=8) if engine == "aio" else ThreadIo(depth=8, threads=4)
        self.files = BlobFiles.open(folder, self.io, quota_bytes=quota_bytes, sync=sync)
        if publishes:
            self.die_at_publish(publishes)
        policy = Policy(hold_s=0.0, timeout_s=60.0)
        self.tier = DiskTier(self.store, self.files, self.io, policy)

    def die_at_publish(self, number):
        """What was given up for room is still in the journal then, and something else lies there."""
        left, publish = number, self.files.end_save

        def end_save(saved):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            publish(saved)

        self.files.end_save = end_save

    def run(self, told, rng):
        """Save and load until somebody kills us. *told* is memory that the parent sees."""
        # of one size, blobs make room for each other; of several, segments do
        mine = range(rng.randrange(3), len(WANTED), rng.choice([1, 3, 3]))
        while True:
            numbers = rng.sample(mine, TOGETHER)
            if rng.random() < 0.7:
                self.save(told, numbers)
            elif rng.random() < 0.8:
                self.load(told, numbers)
            else:
                self.remove(told, numbers[:1])

    def save(self, told, numbers):
        for number in numbers:
            if not self.tier.contains(WANTED[number]):
                told[number] = BEGUN
            put(self.store, [WANTED[number]], size_of(number))
        handle = self.tier.save([WANTED[number] for number in numbers], wait=True)
        for number, status in zip(numbers, handle.statuses, strict=True):
            assert status in (Status.DONE, Status.EXISTS, Status.NO_ROOM), status
            told[number] = NOTHING if status is Status.NO_ROOM else SAVED
        self.store.delete([WANTED[number] for number in numbers])

    def load(self, told, numbers):
        for number in numbers:
            check_load(self, number)

    def remove(self, told, numbers):
        """So that there are dead records also where nothing is given up."""
        for number in numbers:
            told[number] = BEGUN
            self.files.remove([blob_tag(NAMESPACE, WANTED[number])])
            told[number] = NOTHING

    def close(self):
        assert self.tier.close()
        self.store.close()
        self.arena.close()


def check_load(life, number):
    """Load one chunk and compare every byte; return the answer."""
    key, size = WANTED[number], size_of(number)
    (status,) = life.tier.load([key], wait=True).statuses
    assert status in (Status.DONE, Status.EXISTS, Status.MISSING, Status.CORRUPT), status
    there = status in (Status.DONE, Status.EXISTS)
    assert read(life.store, [key], size) == [blob(key, size) if there else None], number
    life.tier.poll()
    life.store.delete([key])
    return status


def check_folder(life, folder, quota_bytes):
    """Nothing in there that nobody knows, and numbers that add up."""
    names = {path.name for path in folder.iterdir()}
    known = {f"seg-{number:08x}.blobs" for number in life.files._slots.segments}
    known |= {f"index-{life.files._account.book._journal.number}.log", "lock", "stats.json"}
    assert names <= known, f"left behind: {names - known}"
    stats = life.files.stats()
    assert stats["free_slots"] + stats["blobs"] + stats["quarantined_slots"] == stats["slots"]
    assert stats["blobs"] == sum(1 for entry in life.files.entries() if entry.is_ready)
    assert stats["held_slots"] == 0
    assert stats["used_bytes"] <= used_bytes(folder) <= quota_bytes
    assert life.tier.stats()["inflight_bytes"] == 0
    assert life.store.stats()["writing_frames"] == life.store.stats()["leases"] == 0
    audit(life.store)


def check(folder, told, quota_bytes, engine, sync):
    """Open what was left; return how many saves were under way, and how many of their slots are damaged."""
    under_way = sum(told[number] == BEGUN for number in range(len(WANTED)))
    life = Life(folder, quota_bytes, engine, sync)
    statuses = [check_load(life, number) for number in range(len(WANTED))]
    check_folder(life, folder, quota_bytes)
    corrupt = statuses.count(Status.CORRUPT)
    # of a blob whose slot was being used anew, and whose removal was not written down yet
    assert corrupt <= TOGETHER, corrupt
    for number, status in enumerate(statuses):
        if quota_bytes == ROOMY and told[number] == SAVED:
            assert status is Status.DONE, number
        told[number] = SAVED if status is Status.DONE else NOTHING
    assert not any(map(life.tier.contains, [k for n, k in enumerate(WANTED) if not told[n]]))
    life.close()
    return under_way, corrupt


def one_life(folder, told, rng, quota_bytes, death):
    """Let an owner live until it is killed, watching the quota; return what :func:`check` says."""
    seed, line, publishes = rng.randrange(1 << 32), rng.randrange(1, 12_000), rng.randrange(1, 20)
    engine, sync = rng.choice(["aio", "threads"]), rng.choice(["always", "batch", "never"])

    def live():
        # rewrites again and again, with the few records that there are
        journal_module.SLACK_RECORDS = 16
        if death == LINE:
            die_at_line(line, DISK_FOLDER)
        life = Life(folder, quota_bytes, engine, sync, publishes if death == PUBLISH else 0)
        told[READY] = 1
        life.run(told, random.Random(seed))

    told[READY] = 0
    pid = fork(live)
    try:
        if death != MOMENT:
            killed = end(pid)
        else:
            deadline = time.monotonic() + 60
            while not told[READY]:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            dies = time.monotonic() + rng.uniform(0, 0.2)
            while time.monotonic() < dies:
                assert used_bytes(folder) <= quota_bytes
                time.sleep(0.01)
            killed = end(pid, after_s=0)
        assert killed, "the child ended by itself"
        assert used_bytes(folder) <= quota_bytes
        return check(folder, told, quota_bytes, engine, sync)
    except AssertionError:
        where = {MOMENT: "", LINE: line, PUBLISH: publishes}[death]
        print(f"life seed {seed}, {engine}, {sync}, {quota_bytes}, {death} {where}")
        raise


def main():
    # of records that a killed owner left
    logging.disable(logging.WARNING)
    options, rng = arguments(__doc__, 100)
    told = {quota: mmap.mmap(-1, len(WANTED) + 1) for quota in (TIGHT, ROOMY)}
    total = {"kills": 0, MOMENT: 0, LINE: 0, PUBLISH: 0, "in_flight": 0, "damaged": 0}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        while total["kills"] < options.runs:
            quota_bytes = rng.choice([TIGHT, TIGHT, ROOMY])
            death = rng.choice([MOMENT, MOMENT, LINE, LINE, PUBLISH])
            folder = Path(root) / str(quota_bytes)
            under_way, damaged = one_life(folder, told[quota_bytes], rng, quota_bytes, death)
            total["kills"] += 1
            total[death] += 1
            total["in_flight"] += under_way > 0
            total["damaged"] += damaged
            if total["kills"] % 10 == 0:
                seconds = round(time.monotonic() - begun, 1)
                print(json.dumps({**total, "seconds": seconds}), flush=True)
    print(
        f"{total['kills']} owners killed, {total['in_flight']} of them while something was being saved or removed; "
        f"{total['damaged']} blobs given up at that moment were found out, 0 wrong bytes loaded"
    )
    if total["kills"] >= 20 and not total["in_flight"]:
        sys.exit("no owner was killed while something was being saved")


if __name__ == "__main__":
    main()
