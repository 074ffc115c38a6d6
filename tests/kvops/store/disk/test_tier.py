"""The tier on a real disk: what goes down, what comes up, in which order it is answered, and what is held meanwhile."""

import errno
import os

import pytest

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.disk.admission import Policy
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.jobs import Status
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.io_faults import FaultyIo
from kvferry.kvops.store.io_threads import ThreadIo
from kvferry.kvops.store.store import Lookup, Store

from ..chunks import KIB, MIB, NAMESPACE, OTHER, audit, blob, drain, fill, key, keys, put, read  # noqa: TID252

SIZE = 100_000
QUOTA = 64 * MIB
DONE, EXISTS, MISSING, PENDING = Status.DONE, Status.EXISTS, Status.MISSING, Status.PENDING


class World:
    """A store with a disk below it; `reopen` is a restart with a cold arena."""

    def __init__(self, folder, open_store):
        self.folder = folder
        self._open_store = open_store
        self.tier = None

    def open(self, *, policy=None, quota_bytes=QUOTA, ranks=1, sync="never", **store):
        self.store, self.workers = self._open_store(ranks=ranks, **store)
        self.io = FaultyIo(ThreadIo(threads=2))
        self.files = BlobFiles.open(self.folder, self.io, quota_bytes=quota_bytes, sync=sync)
        self.tier = DiskTier(self.store, self.files, self.io, policy or Policy(admission="all"))
        return self.tier

    def close(self):
        if self.tier is not None:
            tier, self.tier = self.tier, None
            assert tier.close()
            drain(self.store)
            self.store.close()

    def reopen(self, **kwargs):
        self.close()
        return self.open(**kwargs)


@pytest.fixture
def world(tmp_path, open_store):
    world = World(tmp_path / "disk", open_store)
    yield world
    world.close()


@pytest.fixture
def tier(world):
    return world.open()


def statuses(handle):
    assert handle.is_done, handle
    return handle.statuses


def saved(world, wanted, size=SIZE):
    put(world.store, wanted, size)
    assert statuses(world.tier.save(wanted, wait=True)) == [DONE] * len(wanted)


# --- round trips -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, 4096, SIZE, MIB])
def test_what_was_saved_comes_back_after_a_restart(world, tier, size):
    wanted = keys(5)
    saved(world, wanted, size)
    tier = world.reopen()
    assert [tier.contains(k) for k in wanted] == [True] * 5
    assert world.store.lookup(wanted) == [Lookup.MISS] * 5
    assert statuses(tier.load(wanted, wait=True)) == [DONE] * 5
    assert read(world.store, wanted, size) == [blob(k, size) for k in wanted]
    audit(world.store)


def test_every_part_of_every_rank_comes_back(world):
    tier = world.open(ranks=3)
    (frame,) = world.store.reserve([key(1)], 3 * 4100)
    for rank, worker in enumerate(world.workers):
        fill(worker, frame, rank)
    assert world.store.commit([frame]) == [True]
    expected = bytes(world.store.arena.buffer[frame.offset : frame.offset + 3 * 4100])
    assert statuses(tier.save([key(1)], wait=True)) == [DONE]
    tier = world.reopen(ranks=3)
    assert statuses(tier.load([key(1)], wait=True)) == [DONE]
    frame = world.store.frames[key(1)]
    assert bytes(world.store.arena.buffer[frame.offset : frame.offset + 3 * 4100]) == expected
    world.store.lease([frame])
    for worker in world.workers:
        assert worker.begin_read(frame.header, frame.generation) is not None
        worker.finish_read(frame.header, frame.generation, ok=True)
    world.store.release([frame])


def test_another_number_of_ranks_does_not_find_it(world, tier):
    saved(world, [key(1)], 6000)
    tier = world.reopen(ranks=2)
    assert statuses(tier.load([key(1)], wait=True)) == [MISSING]
    assert world.store.stats()["writing_frames"] == 0


def test_another_namespace_does_not_find_it(world, tier):
    saved(world, [key(1)])
    tier = world.reopen(namespace=OTHER)
    assert not tier.contains(key(1))
    assert statuses(tier.load([key(1)], wait=True)) == [MISSING]


@pytest.mark.parametrize("verify", ["off", "sampled"])
def test_without_checksums_in_memory_there_are_some_on_the_disk(world, verify):
    world.open(verify=verify)
    saved(world, keys(3))
    tier = world.reopen(verify="always")
    assert statuses(tier.load(keys(3), wait=True)) == [DONE] * 3
    assert read(world.store, keys(3), SIZE) == [blob(k, SIZE) for k in keys(3)]


# --- answers ---------------------------------------------------------------------------------------------------


def test_answers_are_in_request_order_whatever_is_left_out(world, tier):
    put(world.store, keys(4), SIZE)
    saved(world, [key(1)])
    wanted = [key(9), key(0), key(1), key(0), key(3)]
    assert statuses(tier.save(wanted, wait=True)) == [MISSING, DONE, EXISTS, PENDING, DONE]
    tier = world.reopen()
    put(world.store, [key(3)], SIZE)
    wanted = [key(9), key(3), key(0), key(1), key(0)]
    assert statuses(tier.load(wanted, wait=True)) == [MISSING, EXISTS, DONE, DONE, PENDING]


def test_what_is_there_is_not_written_again(world, tier):
    saved(world, keys(5))
    before = dict(world.io.counts)
    assert statuses(tier.save(keys(5), wait=True)) == [EXISTS] * 5
    assert world.io.counts["write"] == before["write"]
    assert world.io.counts["write_now"] == before["write_now"]


def test_save_without_waiting_returns_before_the_disk_does(world, tier):
    put(world.store, keys(3), SIZE)
    with world.io.fault("aio_write_timeout"):
        handle = tier.save(keys(3))
        tier.poll()
        assert not handle.is_done
        assert tier.stats()["inflight_bytes"] == 3 * SIZE
    assert tier.wait(handle, 10)
    assert handle.statuses == [DONE] * 3


def test_the_bound_on_bytes_in_flight(world):
    tier = world.open(policy=Policy(admission="all", max_inflight_bytes=2 * SIZE))
    put(world.store, keys(4), SIZE)
    with world.io.fault("aio_write_timeout"):
        handle = tier.save(keys(4))
        assert handle.statuses[2:] == [Status.BUSY] * 2
    assert tier.wait(handle, 10)
    assert handle.statuses == [DONE, DONE, Status.BUSY, Status.BUSY]
    assert tier.counts["skipped_busy"] == 2


def test_a_chunk_larger_than_the_bound_goes_alone(world):
    tier = world.open(policy=Policy(admission="all", max_inflight_bytes=4096))
    put(world.store, keys(2), SIZE)
    assert statuses(tier.save(keys(2), wait=True)) == [DONE, Status.BUSY]


# --- holding ---------------------------------------------------------------------------------------------------


def test_a_frame_that_is_being_saved_is_not_evicted(world, tier):
    put(world.store, [key(0)], MIB)
    with world.io.fault("aio_write_timeout"):
        handle = tier.save([key(0)])
        put(world.store, keys(60, first=1), MIB)
        assert read(world.store, [key(0)], MIB) == [blob(key(0), MIB)]
    assert tier.wait(handle, 10)
    put(world.store, keys(60, first=100), MIB)
    assert world.store.lookup([key(0)]) == [Lookup.MISS]
    tier = world.reopen()
    assert statuses(tier.load([key(0)], wait=True)) == [DONE]
    assert read(world.store, [key(0)], MIB) == [blob(key(0), MIB)]


def test_nothing_can_be_read_before_it_has_come_whole(world, tier):
    saved(world, [key(1)])
    tier = world.reopen()
    with world.io.fault("aio_read_timeout"):
        handle = tier.load([key(1)])
        assert tier.is_loading(key(1))
        assert world.store.lookup([key(1)]) == [Lookup.PENDING]
        assert read(world.store, [key(1)], SIZE) == [None]
    assert tier.wait(handle, 10)
    assert world.store.lookup([key(1)]) == [Lookup.HIT]


def test_what_came_up_stays_until_it_is_claimed_or_its_time_is_over(world, tier):
    saved(world, [key(1)], MIB)
    tier = world.reopen(policy=Policy(hold_s=1e9))
    assert statuses(tier.load([key(1)], wait=True)) == [DONE]
    assert tier.is_fresh(world.store.frames[key(1)])
    put(world.store, keys(60, first=100), MIB)
    frame = world.store.frames[key(1)]
    tier.claimed([frame])
    assert not tier.is_fresh(world.store.frames[key(1)])
    put(world.store, keys(60, first=200), MIB)
    assert world.store.lookup([key(1)]) == [Lookup.MISS]
    tier = world.reopen(policy=Policy(hold_s=0))
    assert statuses(tier.load([key(1)], wait=True)) == [DONE]
    tier.poll()
    assert not tier.is_fresh(world.store.frames[key(1)])


def test_what_waits_to_be_claimed_takes_half_of_the_arena_at_the_most(world, tier):
    for first in range(0, 24, 8):
        saved(world, keys(8, first=first), MIB)
    tier = world.reopen(policy=Policy(hold_s=1e9))
    handle = tier.load(keys(24))
    assert Status.BUSY in handle.statuses
    assert tier.wait(handle, 10)
    fresh = sum(tier.is_fresh(f) for f in world.store.frames.values())
    assert 0 < fresh * MIB <= world.store.arena.arena_bytes // 2
    assert put(world.store, [key(100)], MIB) == [True]


# --- resets ----------------------------------------------------------------------------------------------------


def test_a_reset_while_a_save_is_under_way(world, tier):
    put(world.store, [key(1)], SIZE)
    with world.io.fault("aio_write_timeout"):
        handle = tier.save([key(1)])
        world.store.new_epoch(OTHER)
        assert world.store.reap() == 1
    assert tier.wait(handle, 10)
    assert handle.statuses == [DONE]
    assert world.store.reap() == 0
    assert not tier.contains(key(1))


def test_a_reset_while_a_load_is_under_way_never_makes_it_readable(world, tier):
    saved(world, [key(1)])
    tier = world.reopen()
    with world.io.fault("aio_read_timeout"):
        handle = tier.load([key(1)])
        world.store.new_epoch(OTHER)
        # nobody works here, and still the frame is the drive's
        assert world.store.reap() == 1
        assert world.store.abandon() == 0
    assert tier.wait(handle, 10)
    assert handle.statuses == [MISSING]
    assert world.store.lookup([key(1)]) == [Lookup.MISS]
    assert world.store.reap() == 0
    assert world.store.stats()["orphaned_frames"] == 0


# --- what is worth a write -------------------------------------------------------------------------------------


def commit(world, wanted, size=SIZE):
    frames = world.store.reserve(wanted, size)
    for frame in frames:
        fill(world.workers[0], frame, 0)
    assert world.store.commit(frames) == [True] * len(wanted)
    return frames


def settle(world):
    assert world.tier.flush(10)
    return {k for k in keys(40) if world.tier.contains(k)}


def test_on_commit_all_goes_down_where_all_is_admitted(world, tier):
    tier.stored(commit(world, keys(3)))
    assert settle(world) == set(keys(3))


def test_what_came_once_is_not_written_what_is_hit_is(world):
    tier = world.open(policy=Policy(admission="reused"))
    frames = commit(world, keys(4))
    tier.stored(frames)
    assert settle(world) == set()
    assert tier.stats()["not_admitted"] == 4
    tier.used(frames[:2])
    assert settle(world) == set(keys(2))
    # stored anew after it was evicted: it came a second time
    world.store.delete([key(3)])
    tier.stored(commit(world, [key(3)]))
    assert settle(world) == {*keys(2), key(3)}
    writes = world.io.counts["write"]
    tier.used(frames[:2])
    settle(world)
    assert world.io.counts["write"] == writes


def test_under_pressure_what_would_go_next_is_saved_first(world):
    tier = world.open(policy=Policy(write="pressure", admission="all"))
    tier.stored(commit(world, keys(3), MIB))
    assert settle(world) == set()
    number = 3
    while world.store.free_share() >= 0.1:
        commit(world, [key(number)], MIB)
        number += 1
    tier.poll()
    on_disk = settle(world)
    assert set(keys(3)) <= on_disk


def test_the_price_of_a_hit_can_be_read(world, tier):
    saved(world, keys(4))
    counts = dict(tier.counts)
    assert (counts["saved"], counts["saved_bytes"]) == (4, 4 * SIZE)
    tier = world.reopen()
    tier.load(keys(2), wait=True)
    assert (tier.counts["loaded"], tier.counts["loaded_bytes"]) == (2, 2 * SIZE)


# --- damage ----------------------------------------------------------------------------------------------------


def segments(folder):
    return sorted(folder.glob("seg-*.blobs"))


@pytest.mark.parametrize("where", ["header", "first page", "last byte"])
def test_a_flipped_bit_is_a_miss_and_stays_out_of_use(world, tier, where):
    saved(world, [key(1)])
    place = next(iter(world.files.entries())).place
    offset = place.offset + {
        "header": 100, "first page": place.header_bytes, "last byte": place.header_bytes + SIZE - 1,
    }[where]  # fmt: skip
    world.close()
    (path,) = segments(world.folder)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    tier = world.open()
    assert statuses(tier.load([key(1)], wait=True)) == [Status.CORRUPT]
    assert tier.counts["load_corrupt"] == 1
    assert not tier.contains(key(1))
    assert statuses(tier.load([key(1)], wait=True)) == [MISSING]
    assert world.store.lookup([key(1)]) == [Lookup.MISS]
    assert world.files.stats()["quarantined_slots"] == 1
    put(world.store, [key(1)], SIZE)
    assert statuses(tier.save([key(1)], wait=True)) == [DONE]


def test_bytes_behind_the_blob_do_not_matter(world, tier):
    saved(world, [key(1)])
    place = next(iter(world.files.entries())).place
    world.close()
    (path,) = segments(world.folder)
    with path.open("r+b") as file:
        file.seek(place.offset + place.header_bytes + SIZE)
        file.write(b"?")
    tier = world.open()
    assert statuses(tier.load([key(1)], wait=True)) == [DONE]


def test_a_frame_that_was_damaged_in_memory_is_found_out_when_it_comes_back(world, tier):
    put(world.store, [key(1)], SIZE)
    frame = world.store.frames[key(1)]
    world.store.arena.buffer[frame.offset + 5] ^= 1
    assert statuses(tier.save([key(1)], wait=True)) == [DONE]
    tier = world.reopen()
    assert statuses(tier.load([key(1)], wait=True)) == [Status.CORRUPT]


# --- life ------------------------------------------------------------------------------------------------------


def test_no_room_for_a_load_is_said_and_nothing_is_held(world, tier):
    saved(world, [key(1)], MIB)
    tier = world.reopen()
    frames = []
    while not isinstance(
        frame := world.store.reserve([key(100 + len(frames))], MIB)[0], type(None)
    ):
        if not hasattr(frame, "slot"):
            break
        frames.append(frame)
    assert statuses(tier.load([key(1)], wait=True)) == [Status.NO_ROOM]
    world.store.abort(frames)
    assert statuses(tier.load([key(1)], wait=True)) == [DONE]


def test_after_close_it_answers_off(world, tier):
    saved(world, [key(1)])
    assert tier.close()
    assert tier.save([key(1)]).statuses == [Status.OFF]
    assert tier.load([key(2)]).statuses == [Status.OFF]
    assert tier.close()


def test_closing_finishes_what_was_asked_for(world, tier):
    put(world.store, keys(8), SIZE)
    handle = tier.save(keys(8))
    tier = world.reopen()
    assert handle.statuses == [DONE] * 8
    assert all(tier.contains(k) for k in keys(8))


def test_it_leaves_figures_in_its_folder(world, tier):
    from kvferry.kvops.store.disk import last_run

    saved(world, keys(2))
    world.close()
    left = last_run.read(world.folder)
    assert left.pid == os.getpid()
    assert left.stats["saved"] == 2
    assert {"queue", "io", "publish"} <= left.stages.keys()


def test_threads_files_and_frames_are_given_back(world, tmp_path):
    import threading

    before_fds, before_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(3):
        world.open()
        saved(world, keys(3, first=10 * number))
        world.close()
        world.store.arena.close()
    assert threading.active_count() == before_threads
    assert len(os.listdir("/proc/self/fd")) == before_fds


def test_a_full_disk_switches_saving_off_and_loading_goes_on(world, tier, caplog):
    saved(world, keys(2))
    size = 3 * KIB
    with world.io.fault("no_space", errno=errno.ENOSPC):
        put(world.store, keys(9, first=10), size)
        answers = [tier.save([k], wait=True).statuses[0] for k in keys(9, first=10)]
    assert answers[:3] == [Status.ERROR] * 3
    assert set(answers[3:]) == {Status.OFF}
    assert sum("failed 3 times in a row" in r.message for r in caplog.records) == 1
    world.store.delete(keys(2))
    assert statuses(tier.load(keys(2), wait=True)) == [DONE] * 2


def test_a_private_arena_is_never_unmapped_under_a_drive(world, tier):
    saved(world, [key(1)])
    tier = world.reopen()
    with world.io.fault("aio_read_timeout"):
        handle = tier.load([key(1)])
        assert not tier.close(timeout_s=0.2)
        assert not handle.is_done
    world.tier = None
    # the drive lets go only now; the mapping was still there
    world.io.inner.close(10)
    assert world.store.arena.is_closed is False


def test_frames_are_where_the_drive_reads_and_writes(world, tier):
    """No bounce buffer: the pieces of a request are the frame itself."""
    seen = []
    submit = world.io.submit

    def watching(requests):
        seen.extend(request.pieces for request in requests)
        return submit(requests)

    world.io.submit = watching
    saved(world, [key(1)])
    frame = world.store.frames[key(1)]
    arena = world.store.arena
    assert seen[0][1] == (arena.address + frame.offset, fmt.round_up(SIZE, fmt.PAGE))
    assert isinstance(arena, Arena)
    assert isinstance(world.store, Store)
    assert world.store.namespace == NAMESPACE


def test_under_pressure_only_what_was_reused_goes_down(world):
    tier = world.open(policy=Policy(write="pressure", admission="reused"))
    frames = commit(world, keys(6), MIB)
    tier.stored(frames)
    tier.used(frames[:2])
    assert settle(world) == set()
    number = 6
    while world.store.free_share() >= 0.1:
        tier.stored(commit(world, [key(number)], MIB))
        number += 1
    tier.poll()
    assert settle(world) == set(keys(2))


def test_a_frame_that_a_worker_marks_bad_while_it_is_saved_is_no_error(world, tier):
    put(world.store, [key(1)], SIZE)
    frame = world.store.frames[key(1)]
    world.store.lease([frame])
    worker = world.workers[0]
    worker.begin_read(frame.header, frame.generation)
    worker.finish_read(frame.header, frame.generation, ok=False)
    tier.stored([frame])
    world.store.release([frame])
    assert tier.flush(10)
    assert world.store.lookup([key(1)]) == [Lookup.MISS]
    assert key(1) not in world.store.frames
