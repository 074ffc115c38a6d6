"""Ten times the quota through the tier: what it takes on the disk, looked at from outside at every step."""

import random

import pytest

from kvferry.kvops.store.disk.admission import Policy
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.jobs import Status
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.io_choice import open_io

from ..chunks import KIB, MIB, blob, keys, put, read  # noqa: TID252
from .blobs import disk_bytes

QUOTA = 10 * MIB
SIZES = (60 * KIB, 200_000, MIB, 100)
TOGETHER = 6
DEADLINE_S = 30.0


@pytest.mark.parametrize("engine", ["threads", "aio"])
def test_ten_times_the_quota(shm, tmp_path, open_store, engine):
    folder = (tmp_path if engine == "aio" else shm) / "disk"
    store, _ = open_store()
    try:
        io = open_io(engine, folder.parent, depth=8, max_inflight_bytes=8 * MIB)
    except OSError as error:
        pytest.skip(f"no {engine} here: {error}")
    files = BlobFiles.open(folder, io, quota_bytes=QUOTA, sync="batch")
    tier = DiskTier(store, files, io, Policy(hold_s=0.0, timeout_s=DEADLINE_S))
    chance = random.Random(3)
    first = seen = most = 0
    try:
        while tier.counts["saved_bytes"] < 10 * QUOTA:
            # a long while of one size, as a model makes them, then another one
            size = SIZES[tier.counts["saved_bytes"] // (2 * QUOTA) % 3]
            if chance.random() < 0.1:
                size = chance.choice(SIZES)
            wanted = keys(TOGETHER, first=first)
            first += TOGETHER
            put(store, wanted, size)
            handle = tier.save(wanted)
            done = False
            while not done:
                tier.poll()
                used = disk_bytes(folder)
                assert used <= QUOTA, tier.stats()
                most = max(most, used)
                seen += 1
                done = handle.is_done
                if not done:
                    tier._driver.changed.wait(0.1)
            # of a size whose only segment is in use there may be no room at the moment
            assert set(handle.statuses) <= {Status.DONE, Status.NO_ROOM}
            store.delete(wanted)
            if chance.random() < 0.2 and handle.statuses[-1] is Status.DONE:
                assert tier.load(wanted[-1:], wait=True).statuses == [Status.DONE]
                assert read(store, wanted[-1:], size) == [blob(wanted[-1], size)]
                tier.poll()
                store.delete(wanted[-1:])
        assert seen > 100
        assert most > QUOTA * 0.7
        assert files.stats()["evicted"] > 100
        assert files.stats()["handed_over_segments"] > 1
    finally:
        assert tier.close(DEADLINE_S)
    assert disk_bytes(folder) <= QUOTA
