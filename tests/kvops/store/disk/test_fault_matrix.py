"""Every fault of the table x {save, load, open, evict}: who is told what, and that nothing else comes of it.

In each cell: only the chunks that the fault met fail, with the status of the table below; what was saved before stays;
no byte is ever wrong; nothing is left held or open; and when the fault is over, the tier works.

Time stands still in here until a test moves it: a deadline passes when the test says so, however slow the machine is.
"""

import dataclasses
import functools
import os

import pytest

from kvferry.kvops.errors import DiskBusyError, DiskError
from kvferry.kvops.store.disk import requests
from kvferry.kvops.store.disk.jobs import Status
from kvferry.kvops.store.io_aio import AioIo
from kvferry.kvops.store.io_fault_table import TABLE, Effect
from kvferry.kvops.store.io_threads import ThreadIo

from ..chunks import keys  # noqa: TID252
from .worlds import (
    AFTER,
    COLD,
    CORRUPT,
    COUNT,
    DEADLINE_S,
    DONE,
    ERROR,
    HOT,
    LAST,
    NEW,
    OLD,
    ROOMY,
    SIZE,
    TIGHT,
    TIMEOUT,
    TIMEOUT_S,
    World,
    open_things,
)

MOVED_NOTHING = {
    Status.EXISTS, Status.PENDING, Status.MISSING, Status.NO_ROOM, Status.BUSY, Status.OFF,
}  # fmt: skip

FLIPPED = "DONE or CORRUPT"
"""A bit that nothing depends on, behind the blob or in the header page, may be the one."""

OPENS = "opens"

REQUESTS = ("read", "write")
WHOLE = ("submit", "reap", "batch_read", "batch_write")
"""Kinds that meet several chunks at once."""

ENGINE = {*REQUESTS, *WHOLE}
ON_AIO = {"save": {"write", "batch_write", "submit", "reap"}, "load": {"read", "batch_read"}}


def every_other(status):
    return [DONE, status, DONE, status]


def first(status):
    """Of chunks that are asked for one after the other."""
    return [status, DONE, DONE, DONE]


def every(status):
    return [status] * COUNT


@dataclasses.dataclass
class Row:
    """What each operation says; None: it never meets that fault."""

    save: list | None = None
    load: list | None = None
    evict: list | None = None
    open: object = None


def moves(pattern):
    return Row(save=pattern, load=pattern, evict=pattern)


def saves(pattern):
    return Row(save=pattern, evict=pattern)


def loads(pattern):
    return Row(load=pattern)


ROWS = {
    # a segment is opened for its first load, and made for a save that needs room
    ("aio_setup_error", "open"): Row(load=first(ERROR), evict=first(ERROR), open=OSError),
    # asked three times, as the kernel wants it
    ("aio_setup_error", "submit"): moves(every(ERROR)),
    ("aio_submit_error", "submit"): moves(every(ERROR)),
    ("aio_submit_timeout", "submit"): moves(every(TIMEOUT)),
    ("aio_submit_partial", "submit"): moves(every(DONE)),
    # what the drive did is not known as long as nobody can ask
    ("aio_getevents_error", "reap"): moves(every(TIMEOUT)),
    ("aio_getevents_timeout", "reap"): moves(every(TIMEOUT)),
    ("aio_getevents_no_events", "reap"): moves(every(TIMEOUT)),
    ("aio_read_error", "read"): loads(every_other(ERROR)),
    ("aio_write_error", "write"): saves(every_other(ERROR)),
    ("aio_read_timeout", "read"): loads(every_other(TIMEOUT)),
    ("aio_write_timeout", "write"): saves(every_other(TIMEOUT)),
    ("read_error", "read"): loads(every_other(ERROR)),
    ("read_error", "read_now"): Row(open=OSError),
    ("write_error", "write"): saves(every_other(ERROR)),
    # the journal; when room is made, the superblock of the new segment
    ("write_error", "write_now"): Row(save=first(ERROR), evict=first(ERROR), open=OSError),
    ("read_timeout", "read"): loads(every_other(TIMEOUT)),
    ("read_timeout", "read_now"): Row(open=OSError),
    ("write_timeout", "write"): saves(every_other(TIMEOUT)),
    ("write_timeout", "write_now"): Row(save=first(ERROR), evict=first(ERROR), open=OSError),
    ("batch_read_error", "batch_read"): loads(every(ERROR)),
    ("batch_write_error", "batch_write"): saves(every(ERROR)),
    ("batch_read_timeout", "batch_read"): loads(every(TIMEOUT)),
    ("batch_write_timeout", "batch_write"): saves(every(TIMEOUT)),
    # a drive returns fewer bytes where the file ends
    ("short_read", "read"): loads(every_other(CORRUPT)),
    ("short_write", "write"): saves(every_other(ERROR)),
    ("bit_flip_read", "read"): loads(every_other(FLIPPED)),
    # a journal, or a segment, that looks damaged, or like one of a later version
    ("bit_flip_read", "read_now"): Row(open=(OPENS, DiskError)),
    # nobody notices before they are loaded
    ("bit_flip_write", "write"): saves(every(DONE)),
    ("bit_flip_write", "write_now"): Row(save=every(DONE), evict=every(DONE), open=OPENS),
    ("no_space", "write"): saves(every_other(ERROR)),
    ("no_space", "write_now"): Row(save=first(ERROR), evict=first(ERROR), open=OSError),
    ("no_space", "allocate"): Row(evict=first(ERROR)),
    ("io_error", "read"): loads(every_other(ERROR)),
    ("io_error", "read_now"): Row(open=OSError),
    ("io_error", "write"): saves(every_other(ERROR)),
    ("io_error", "write_now"): Row(save=first(ERROR), evict=first(ERROR), open=OSError),
    ("io_error", "open"): Row(load=first(ERROR), evict=first(ERROR), open=OSError),
    ("io_error", "allocate"): Row(evict=first(ERROR)),
    # a torn tail is cut off
    ("io_error", "truncate"): Row(open=OSError),
    ("io_error", "sync"): Row(save=first(ERROR), evict=first(ERROR), open=OSError),
    ("io_error", "sync_folder"): Row(evict=first(ERROR)),
    # into quarantine
    ("io_error", "rename"): Row(evict=first(ERROR), open=OSError),
    ("io_error", "unlink"): Row(evict=first(ERROR), open=OSError),
    # tried again, up to three times
    ("interrupted", "read"): loads(every(DONE)),
    ("interrupted", "write"): saves(every(DONE)),
    ("slow", "read"): loads(every(DONE)),
    ("slow", "write"): saves(every(DONE)),
}  # fmt: skip

CELLS = [(name, kind) for name, switch in TABLE.items() for kind in switch.kinds]


def matrix(operation):
    """All cells of an operation on worker threads and tmpfs; what is the engine's once more on AIO and a disk."""
    cells = [
        pytest.param(engine, *cell, id=" ".join((engine, *cell)))
        for cell in CELLS
        for engine in ("threads", "aio")
        if engine == "threads" or cell[1] in ON_AIO.get(operation, ())
    ]
    return pytest.mark.parametrize(("world", "name", "kind"), cells, indirect=["world"])


def test_no_fault_is_forgotten():
    assert set(ROWS) == set(CELLS)


@pytest.fixture(autouse=True)
def one_request_a_blob(monkeypatch):
    """Neighbours travel together otherwise, and a fault would meet all of them; see test_merging.py for those."""
    monkeypatch.setattr(requests, "MERGED_BLOBS", 1)


@functools.cache
def why_no_aio():
    try:
        AioIo().close(1.0)
    except OSError as error:
        return str(error)
    return ""


@pytest.fixture
def world(request, tmp_path, shm, open_store):
    """A world on either engine; at the end no thread and no file of it is left."""
    is_aio = request.param == "aio"
    engine, folder = (AioIo, tmp_path) if is_aio else (lambda: ThreadIo(threads=2), shm)
    if is_aio and (error := why_no_aio()):
        pytest.skip(f"no AIO here: {error}")
    before = open_things()
    world = World(folder / "disk", open_store, engine, sync="never" if is_aio else "always")
    yield world
    world.close()
    assert open_things() == before


def run(world, ask, fault_of, kind, pattern):
    """Ask for the new chunks with a fault on; return what is known of each, after everything has come back.

    While a drive is stuck, every frame that is free is used for something else: nothing may be written there late.
    """
    stuck = False
    others = []
    with fault_of as fault:
        if kind in ENGINE:
            handle = ask(NEW)
            if TIMEOUT in (pattern or ()):
                stuck = True
                late = [at for at, status in enumerate(pattern) if status is TIMEOUT]
                world.wait_for(
                    lambda: handle.statuses.count(Status.WAITING) == len(late) == world.io.in_flight
                )
                others = world.fill(1000)
                assert not handle.is_done
                world.let_time_pass(TIMEOUT_S)
            elif pattern and fault.switch.effect is Effect.DELAY:
                # little by little: a delay begins when the drive is done
                world.wait_for(lambda: handle.is_done or world.let_time_pass(0.002))
            world.wait_for(lambda: handle.is_done)
            statuses = list(handle.statuses)
        else:
            statuses = []
            for key in NEW:
                handle = ask([key])
                world.wait_for(lambda handle=handle: handle.is_done)
                statuses += handle.statuses
        if stuck:
            # answered, and still nobody else's
            assert world.tier.stats()["inflight_bytes"] > 0
            others += world.fill(3000)
            world.check_bytes(others)
    world.wait_for(lambda: not world.tier.stats()["inflight_bytes"])
    assert handle.statuses == statuses[-len(handle.statuses) :], "an answer changed"
    hits = fault.hits
    assert bool(hits) == (pattern is not None), f"met {hits} times"
    for status, expected in zip(statuses, pattern or every(DONE), strict=True):
        assert status is expected or (expected is FLIPPED and status in (DONE, CORRUPT)), statuses
    if stuck:
        assert len(world.check_bytes(others)) > 500
    world.check_bytes(NEW)
    world.check_nothing_is_held()
    return statuses


def fault_of(world, name, kind):
    """Switch a fault on for one kind of call: requests every other time, calls on files once."""
    options = {"match": lambda call: call.kind == kind}
    if kind in REQUESTS and TABLE[name].effect is not Effect.DELAY:
        options["every"] = 2
    elif kind not in ENGINE and TABLE[name].effect is not Effect.FLIP:
        options["count"] = 1
    return world.io.fault(name, **options)


def silent(name):
    """Whether a fault leaves wrong bytes on the disk, and nobody knows."""
    switch = TABLE[name]
    return switch.effect is Effect.FLIP and "write" in switch.kinds


@matrix("save")
def test_save(world, name, kind):
    tier = world.open(ROOMY)
    world.save(OLD)
    world.put(NEW)
    statuses = run(world, tier.save, fault_of(world, name, kind), kind, ROWS[name, kind].save)
    if not ROWS[name, kind].save:
        return
    world.check_works()
    world.reopen(ROOMY)
    # what failed may be there all the same: late, or done and not reported
    failed = {key for key, status in zip(NEW, statuses, strict=True) if status is not DONE}
    world.check_disk(OLD, may_miss=OLD if (name, kind) == ("bit_flip_write", "write_now") else ())
    world.check_disk(NEW, may_miss=NEW if silent(name) else failed)
    world.check_disk(AFTER)


@matrix("load")
def test_load(world, name, kind):
    world.open(ROOMY)
    world.save(OLD)
    world.save(NEW)
    tier = world.reopen(ROOMY)
    statuses = run(world, tier.load, fault_of(world, name, kind), kind, ROWS[name, kind].load)
    assert not set(statuses) & MOVED_NOTHING
    if not ROWS[name, kind].load:
        return
    world.check_works()
    world.reopen(ROOMY)
    corrupt = {key for key, status in zip(NEW, statuses, strict=True) if status is CORRUPT}
    world.check_disk(OLD)
    world.check_disk(NEW, may_miss=corrupt)
    assert world.files.stats()["quarantined_slots"] == len(corrupt)


@matrix("evict")
def test_evict(world, name, kind):
    tier = world.open(TIGHT)
    world.save(COLD)
    world.save(HOT)
    assert world.files.stats()["segments"] == 2
    world.put(NEW)
    statuses = run(world, tier.save, fault_of(world, name, kind), kind, ROWS[name, kind].evict)
    if statuses[0] is DONE:
        assert not any(map(tier.contains, COLD))
    if not ROWS[name, kind].evict:
        return
    world.check_works()
    assert world.files.stats()["used_bytes"] <= TIGHT
    world.reopen(TIGHT)
    failed = {key for key, status in zip(NEW, statuses, strict=True) if status is not DONE}
    world.check_disk(HOT)
    world.check_disk(NEW, may_miss=NEW if silent(name) else failed)
    world.check_disk(COLD, may_miss=COLD)
    world.check_disk(AFTER, may_miss=AFTER if silent(name) else ())


@matrix("open")
def test_open(world, name, kind):
    world.open(ROOMY)
    world.save(OLD)
    world.save(HOT)
    world.close()
    # there is something to do for each call on files: a torn tail, a file that is none of ours, an unfinished one
    (journal,) = world.folder.glob("index-*.log")
    with journal.open("ab") as file:
        file.write(b"torn" * 20)
    (world.folder / "seg-00000077.blobs").write_bytes(b"?" * 10_000)
    (world.folder / "seg-00000078.blobs.tmp").write_bytes(b"?" * 10_000)
    before = open_things()
    expected = ROWS[name, kind].open
    allowed = expected if isinstance(expected, tuple) else (expected or OPENS,)
    io = world.open_io()
    with io.fault(name, match=lambda call: call.kind == kind) as fault:
        try:
            world.open(ROOMY, io)
            outcome = OPENS
        except (OSError, DiskError) as error:
            outcome = DiskError if isinstance(error, DiskError) else OSError
            assert io.close(DEADLINE_S)
    assert outcome in allowed
    assert bool(fault.hits) == (expected is not None)
    if outcome is OPENS:
        world.check_works()
        world.check_nothing_is_held()
        for key in (*OLD, *HOT):
            world.tier.load([key], wait=True)
            world.check_bytes([key])
        world.close()
    else:
        world.store.arena.close()
    assert open_things() == before
    world.open(ROOMY)
    # a segment that was misread is in quarantine
    world.check_disk([*OLD, *HOT], may_miss=[*OLD, *HOT] if name == "bit_flip_read" else ())
    world.check_works(LAST)


both = pytest.mark.parametrize("world", ["threads", "aio"], indirect=True)
on_threads = pytest.mark.parametrize("world", ["threads"], indirect=True)


@both
def test_what_is_interrupted_without_end_is_an_error(world):
    tier = world.open(ROOMY)
    world.put(NEW)
    with world.io.fault("interrupted") as fault:
        assert tier.save(NEW[:1], wait=True).statuses == [ERROR]
        assert fault.hits == 4
    world.check_nothing_is_held()
    world.check_works()


@both
def test_what_waits_for_a_drive_that_is_stuck_is_given_back_in_time(world):
    """The frames of what the drive has begun stay; those of what it never saw don't."""
    tier = world.open(ROOMY)
    world.put(keys(40, first=100))
    with world.io.fault("aio_write_timeout"):
        handle = tier.save(keys(40, first=100))
        world.wait_for(lambda: world.io.in_flight == world.io.depth)
        world.let_time_pass(TIMEOUT_S)
        world.wait_for(lambda: handle.is_done)
        stuck, rest = handle.statuses[: world.io.depth], handle.statuses[world.io.depth :]
        assert set(stuck) == {TIMEOUT}
        assert set(rest) == {Status.BUSY}
        assert world.files.stats()["held_slots"] == world.io.depth
        assert tier.stats()["inflight_bytes"] == world.io.depth * SIZE
    world.wait_for(lambda: not tier.stats()["inflight_bytes"])
    world.check_nothing_is_held()
    world.check_works()


@both
def test_a_folder_is_not_let_go_of_while_a_drive_may_write_there(world):
    tier = world.open(ROOMY)
    world.put(NEW)
    with world.io.fault("write_timeout", match=lambda call: call.kind == "write"):
        handle = tier.save(NEW)
        assert not tier.close(0.1)
        assert tier.save(NEW).statuses == [Status.OFF] * COUNT
        with pytest.raises(DiskBusyError):
            world.files.open(world.folder, world.io, quota_bytes=ROOMY)
    assert tier.close(DEADLINE_S)
    tier.poll()
    assert handle.statuses == [DONE] * COUNT
    world.reopen(ROOMY)
    world.check_disk(NEW)


@on_threads
def test_a_disk_that_fails_at_everything_does_not_keep_the_tier_from_closing(world, monkeypatch):
    """Also calls that go past the engine: those that list the folder."""
    tier = world.open(ROOMY)
    world.save(OLD)
    world.put(NEW)

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        patch.setattr(tier._driver._upkeep, "_next_report_s", 0.0)
        with world.io.fault("io_error"):
            assert tier.save(NEW, wait=True).statuses == [ERROR] * COUNT
            world.wait_for(lambda: tier._driver._upkeep._next_report_s)
            assert not tier._driver.is_broken
            tier.flush(DEADLINE_S)
            assert tier.close(DEADLINE_S)
    world.reopen(ROOMY)
    world.check_disk(OLD)
    world.check_works()


@on_threads
def test_a_thread_that_breaks_answers_and_takes_nothing_more(world, caplog, monkeypatch):
    tier = world.open(ROOMY)
    world.save(OLD)
    world.put(NEW)
    with world.io.fault("aio_write_timeout"):
        flying = tier.save(NEW[:2])
        world.wait_for(lambda: world.io.in_flight == 2)

        def fail(*_):
            raise RuntimeError("a defect")

        monkeypatch.setattr(tier._driver, "_expire", fail)
        waiting = tier.load(keys(1, first=999), start=False)
        world.wait_for(lambda: flying.is_done)
        assert flying.statuses == [TIMEOUT] * 2
        assert tier._driver.is_broken
        assert waiting.statuses == [Status.MISSING]
        assert tier.save(NEW).statuses == [Status.OFF] * COUNT
        # asked for when it still worked
        world.store.delete(OLD)
        monkeypatch.setattr(tier._driver, "is_broken", False)
        handle = tier.load(OLD, wait=True)
        assert handle.statuses == [Status.OFF] * COUNT
        assert not tier._loads.moving
        monkeypatch.setattr(tier._driver, "is_broken", True)
    assert tier.close(DEADLINE_S)
    assert "a defect" in caplog.text
    # nobody knows what the thread held, so nobody gives it back
    world.store.unpin(world.store.frames[key] for key in NEW[:2])
    world.reopen(ROOMY)
    world.check_disk(OLD)


@on_threads
def test_a_chunk_that_a_worker_finds_corrupt_meanwhile_is_not_saved(world):
    tier = world.open(ROOMY)
    world.put(NEW)
    frames = [world.store.frames[key] for key in NEW]
    world.store.arena.words[frames[1].word] = frames[1].ready | 1
    assert tier.save(NEW, wait=True).statuses == [DONE, Status.MISSING, DONE, DONE]
    world.store.arena.words[frames[1].word] = frames[1].ready
