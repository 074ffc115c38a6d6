"""What workers do with frames they were told of: parts, checksums, leases' other end, frames that are gone."""

import threading

import pytest
import xxhash

from kvferry.kvops.errors import ArenaError
from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.checksum import SAMPLE_EVERY, Algorithm
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.index import Reader
from kvferry.kvops.store.store import Lookup, Reserve, Store

from .chunks import ARENA_BYTES, KIB, NAMESPACE, OTHER, audit, blob, drain, fill, key, keys

SIZE = 64 * KIB
GONE = (-1, -1)


def part_of(store, frame, rank=0):
    at = frame.header + fmt.HEADER_FIXED_BYTES + rank * fmt.PART_BYTES
    return fmt.PART.unpack_from(store.arena.buffer, at)


def counts(arena):
    return dict(
        zip(("begun", "done", "read", "ended", "bad"), arena.attached()[0][3:], strict=True)
    )


def stored(store, workers, number=1, size=SIZE):
    """Store one chunk through all ranks; return its frame."""
    (frame,) = store.reserve([key(number)], size)
    for rank, worker in enumerate(workers):
        fill(worker, frame, rank)
    assert store.commit([frame]) == [True]
    return frame


def load(worker, frame):
    """Read this rank's part as a worker does; return the bytes or None."""
    place = worker.begin_read(frame.header, frame.generation)
    data = None
    if place is not None:
        data = bytes(worker._buffer[place[0] : place[0] + place[1]])
    worker.finish_read(frame.header, frame.generation, ok=place is not None)
    return data


def flip(store, frame, at=0):
    store.arena.buffer[frame.offset + at] ^= 0x40


# --- writing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_rank_writes_its_own_share(open_store, ranks):
    store, workers = open_store(ranks=ranks)
    size = ranks * 4096
    (frame,) = store.reserve([key(1)], size)
    places = [worker.begin_write(frame.header, frame.generation) for worker in workers]
    assert places == [(frame.offset + rank * 4096, 4096) for rank in range(ranks)]
    for worker in workers:
        worker.fail_write(frame.header, frame.generation)
    assert store.commit([frame]) == [False]
    frame = stored(store, workers, size=size)
    assert bytes(store.arena.buffer[frame.offset : frame.offset + size]) == blob(key(1), size)
    assert b"".join(load(worker, frame) for worker in workers) == blob(key(1), size)
    audit(store)


def test_ready_only_when_every_part_is(open_store):
    store, workers = open_store(ranks=2)
    for order in ([0, 1], [1, 0]):
        (frame,) = store.reserve([key(order[0])], SIZE)
        fill(workers[order[0]], frame, order[0])
        assert store.lookup([frame.key]) == [Lookup.PENDING]
        fill(workers[order[1]], frame, order[1])
        assert store.lookup([frame.key]) == [Lookup.PENDING]
        assert store.commit([frame]) == [True]
        assert store.lookup([frame.key]) == [Lookup.HIT]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda w, f: None, id="never-begun"),
        pytest.param(lambda w, f: w.begin_write(f.header, f.generation), id="never-ended"),
        pytest.param(lambda w, f: w.fail_write(f.header, f.generation), id="failed-before-it-began"),
        pytest.param(
            lambda w, f: (w.begin_write(f.header, f.generation), w.fail_write(f.header, f.generation)),
            id="failed",
        ),
    ],
)  # fmt: skip
def test_a_missing_part_keeps_the_frame_unread(open_store, end):
    store, workers = open_store(ranks=2)
    (frame,) = store.reserve([key(1)], SIZE)
    fill(workers[0], frame)
    end(workers[1], frame)
    assert store.commit([frame]) == [False]
    assert store.lookup([key(1)]) == [Lookup.MISS]
    assert Reader(store.arena).lookup(NAMESPACE, [key(1)]) == [None]
    audit(store)
    assert store.stats()["aborted"] == 1


def test_the_checksum_is_that_of_the_part(open_store):
    store, workers = open_store(ranks=2)
    frame = stored(store, workers)
    for rank in range(2):
        own_rank, state, algorithm, reads, offset, size, checksum = part_of(store, frame, rank)
        assert (own_rank, state, reads, offset, size) == (
            rank,
            fmt.PartState.READY,
            0,
            rank * SIZE // 2,
            SIZE // 2,
        )
        half = blob(key(1), SIZE)[rank * SIZE // 2 :][: SIZE // 2]
        assert algorithm == Algorithm.XXH3_64
        assert checksum == xxhash.xxh3_64_intdigest(half)


def test_verify_off_makes_no_checksum(open_store):
    store, (worker,) = open_store(verify="off")
    frame = stored(store, [worker])
    assert part_of(store, frame)[2] == Algorithm.NONE
    assert part_of(store, frame)[-1] == 0
    flip(store, frame)
    assert load(worker, frame) is not None
    assert worker.verified_blobs == 0


def test_a_frame_that_was_taken_back_is_not_begun(open_store):
    store, (worker,) = open_store()
    (frame,) = store.reserve([key(1)], SIZE)
    store.abort([frame])
    before = bytes(store.arena.buffer[frame.header : frame.header + 128])
    assert worker.begin_write(frame.header, frame.generation) is None
    worker.fail_write(frame.header, frame.generation)
    assert bytes(store.arena.buffer[frame.header : frame.header + 128]) == before
    assert worker.stale_frames == 1
    assert counts(store.arena)["begun"] == counts(store.arena)["done"]


@pytest.mark.parametrize("ending", ["finish_write", "fail_write"])
def test_a_late_end_leaves_the_next_life_alone(open_store, ending):
    """The frame was taken back and used again while a worker was writing: neither mark nor checksum is touched."""
    store, (worker,) = open_store()
    (old,) = store.reserve([key(1)], SIZE)
    worker.begin_write(old.header, old.generation)
    store.abort([old])
    new = stored(store, [worker], number=2)
    assert new.header == old.header
    assert new.generation != old.generation
    assert not getattr(worker, ending)(old.header, old.generation)
    assert load(worker, new) == blob(key(2), SIZE)
    (third,) = store.reserve([key(3)], SIZE)
    assert counts(store.arena)["begun"] == counts(store.arena)["done"]
    store.abort([third])


def test_a_frame_of_an_older_generation_is_not_begun(open_store):
    store, (worker,) = open_store()
    (old,) = store.reserve([key(1)], SIZE)
    store.abort([old])
    (new,) = store.reserve([key(2)], SIZE)
    assert new.header == old.header
    assert worker.begin_write(old.header, old.generation) is None
    assert worker.begin_write(new.header, new.generation) is not None


@pytest.mark.parametrize("verb", ["begin_write", "begin_read"])
def test_no_frame_at_all(open_store, verb):
    """A chunk that went away between lookup and load is sent as -1, -1."""
    store, (worker,) = open_store()
    before = bytes(store.arena.buffer[-64:])
    assert getattr(worker, verb)(*GONE) is None
    worker.fail_write(*GONE)
    worker.finish_read(*GONE, ok=False)
    assert bytes(store.arena.buffer[-64:]) == before
    assert worker.stale_frames == 1


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verify", "verified"), [("always", 32), ("sampled", 32 // SAMPLE_EVERY), ("off", 0)]
)
def test_how_many_reads_are_verified(open_store, verify, verified):
    store, (worker,) = open_store(verify=verify)
    frame = stored(store, [worker])
    store.lease([frame])
    for _ in range(32):
        assert load(worker, frame) == blob(key(1), SIZE)
    assert worker.verified_blobs == verified
    assert worker.checksum_mismatches == 0


def test_a_blob_without_checksum_is_read_unless_all_are_verified(open_store, path):
    store, (worker,) = open_store(path, verify="off")
    frame = stored(store, [worker])
    lenient = Frames(store.arena, 0, verify="sampled")
    for _ in range(32):
        assert load(lenient, frame) == blob(key(1), SIZE)
    assert lenient.verified_blobs == 0
    strict = Frames(store.arena, 0, verify="always")
    assert strict.begin_read(frame.header, frame.generation) is None


@pytest.mark.parametrize("at", [0, 1, SIZE // 2 - 1, SIZE // 2, SIZE - 1])
def test_a_flipped_bit_is_found_by_its_rank_alone(open_store, at):
    store, workers = open_store(ranks=2)
    frame = stored(store, workers)
    store.lease([frame])
    flip(store, frame, at)
    bad = at // (SIZE // 2)
    places = [worker.begin_read(frame.header, frame.generation) for worker in workers]
    assert [place is None for place in places] == [rank == bad for rank in range(2)]
    assert [worker.checksum_mismatches for worker in workers] == [rank == bad for rank in range(2)]


def test_a_bad_frame_is_marked_once_missed_at_once_and_freed_last(open_store):
    store, workers = open_store(ranks=2)
    frame = stored(store, workers)
    store.lease([frame, frame])
    flip(store, frame)
    assert load(workers[0], frame) is None
    assert store.arena.words[frame.word] == frame.generation << 8 | fmt.State.BAD
    assert counts(store.arena)["bad"] == 1

    # at once, although two loads still hold it
    assert store.lookup([key(1)]) == [Lookup.MISS]
    assert Reader(store.arena).lookup(NAMESPACE, [key(1)]) == [None]
    assert store.reserve([key(1)], SIZE) == [Reserve.PENDING]
    audit(store)

    # the others meet a frame that is not ready: they fail as well, and mark nothing
    assert load(workers[1], frame) is None
    assert load(workers[0], frame) is None
    assert counts(store.arena)["bad"] == 1
    assert [worker.checksum_mismatches for worker in workers] == [1, 0]

    store.release([frame])
    assert (
        store.stats()["free_frames"] + 1
        == store.stats()["free_frames"] + store.stats()["ready_frames"]
    )
    store.release([frame])
    assert store.stats()["bad"] == 1
    assert store.arena.words[frame.word] & 0xFF == fmt.State.FREE
    audit(store)

    again = stored(store, workers)
    assert load(workers[0], again) is not None
    drain(store)


def test_a_read_that_fails_later_marks_the_frame_too(open_store):
    """The bytes were intact, the copy to the device was not."""
    store, (worker,) = open_store()
    frame = stored(store, [worker])
    store.lease([frame])
    assert worker.begin_read(frame.header, frame.generation) is not None
    worker.finish_read(frame.header, frame.generation, ok=False)
    assert store.lookup([key(1)]) == [Lookup.MISS]
    store.release([frame])
    audit(store)


def test_several_frames_go_bad_at_once(open_store):
    store, (worker,) = open_store()
    frames = [stored(store, [worker], number) for number in range(6)]
    store.lease(frames)
    for frame in frames[::2]:
        flip(store, frame)
    results = [load(worker, frame) for frame in frames]
    assert [data is None for data in results] == [True, False] * 3
    assert store.lookup([f.key for f in frames]) == [Lookup.MISS, Lookup.HIT] * 3
    store.release(frames)
    assert store.stats()["bad"] == 3
    drain(store)


def test_what_a_new_worker_finds_is_noticed(open_store, path):
    """A worker that attaches after the first lease is listened to as well, and none of the old counts is lost."""
    store, (first,) = open_store(path)
    frames = [stored(store, [first], number) for number in range(3)]
    store.lease(frames[:1])
    flip(store, frames[0])
    assert load(first, frames[0]) is None
    with Arena.open(path, ARENA_BYTES, session="engine") as arena:
        arena.attach()
        second = Frames(arena, 0)
        store.lease(frames[1:])
        assert store.lookup(keys(3)) == [Lookup.MISS, Lookup.HIT, Lookup.HIT]
        flip(store, frames[1])
        assert load(second, frames[1]) is None
        assert store.lookup(keys(3)) == [Lookup.MISS, Lookup.MISS, Lookup.HIT]
    store.release(frames)
    drain(store)


def test_a_frame_that_is_being_written_cannot_be_read(open_store):
    store, (worker,) = open_store()
    (frame,) = store.reserve([key(1)], SIZE)
    fill(worker, frame)
    assert load(worker, frame) is None
    assert worker.stale_frames == 1
    assert store.commit([frame]) == [True]


def test_a_frame_of_an_older_generation_is_left_alone(open_store):
    store, (worker,) = open_store()
    old = stored(store, [worker], 1)
    store.delete([key(1)])
    new = stored(store, [worker], 2)
    assert new.header == old.header
    assert worker.begin_read(old.header, old.generation) is None
    worker.finish_read(old.header, old.generation, ok=False)
    assert store.lookup([key(2)]) == [Lookup.HIT]
    assert part_of(store, new)[3] == 0, "a load of the frame before was counted"


def test_counts_of_the_process_add_up(open_store):
    store, workers = open_store(ranks=2)
    (frame,) = store.reserve([key(1)], SIZE)
    workers[0].begin_write(frame.header, frame.generation)
    assert store.arena.writes_in_flight() == 1
    workers[0].finish_write(frame.header, frame.generation)
    workers[1].fail_write(frame.header, frame.generation)
    store.commit([frame])
    frame = stored(store, workers)
    store.lease([frame])
    for worker in workers:
        load(worker, frame)
    assert counts(store.arena) == {"begun": 3, "done": 3, "read": 2, "ended": 2, "bad": 0}
    assert [part_of(store, frame, rank)[3] for rank in range(2)] == [1, 1]
    assert store.arena.writes_in_flight() == 0


def test_an_unknown_verify_is_refused(open_store):
    store, _ = open_store()
    with pytest.raises(ValueError, match="'perhaps' is not a valid Verify"):
        Frames(store.arena, 0, verify="perhaps")


def test_a_process_that_has_not_attached_has_no_frames(open_arena):
    with pytest.raises(ArenaError, match="this process has not attached"):
        Frames(open_arena(), 0)


def test_threads_of_a_worker_count_every_part(open_store):
    store, (worker,) = open_store()
    frames = store.reserve(keys(200), 4096)
    start = threading.Barrier(4)
    failures = []

    def work(mine):
        start.wait()
        failures.extend(frame for frame in mine if not fill(worker, frame))

    threads = [
        threading.Thread(target=work, args=(frames[n::4],), name=f"kvferry-test-{n}")
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.commit(frames) == [True] * 200
    assert counts(store.arena) == {"begun": 200, "done": 200, "read": 0, "ended": 0, "bad": 0}


# --- reset -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["workers-first", "owner-first"])
def test_a_reset_with_100_writes_and_100_loads_in_flight_leaks_nothing(open_store, order):
    store, workers = open_store(ranks=2)
    size = 8 * KIB
    loads = [stored(store, workers, number, size) for number in range(100)]
    store.lease(loads)
    writes = store.reserve(keys(100, first=100), size)
    begun, ready = writes[:40], writes[40:60]
    for frame in begun:
        for worker in workers:
            worker.begin_write(frame.header, frame.generation)
    for frame in ready:
        for rank, worker in enumerate(workers):
            fill(worker, frame, rank)
    for frame in loads[:50]:
        workers[0].begin_read(frame.header, frame.generation)

    store.new_epoch(OTHER)
    assert store.lookup(keys(200)) == [Lookup.MISS] * 200
    assert store.stats()["orphaned_frames"] == 200
    audit(store)
    # whose parts are all there already is waited for no longer
    assert store.reap() == 180
    assert store.reap() == 180

    # frames that are waited for are not given out again, whatever the need
    fresh = store.reserve(keys(3000, first=1000), size)
    given = {frame.header for frame in fresh if not isinstance(frame, Reserve)}
    assert not given & {frame.header for frame in [*loads, *begun, *writes[60:]]}
    store.abort([frame for frame in fresh if not isinstance(frame, Reserve)])

    for worker in workers:
        for frame in begun:
            worker.finish_write(frame.header, frame.generation)
        for frame in writes[60:]:
            worker.fail_write(frame.header, frame.generation)
    for frame in loads[:50]:
        workers[0].finish_read(frame.header, frame.generation, ok=True)
    assert store.reap() == 100
    for frame in loads[50:]:
        assert load(workers[0], frame) is not None
    for frame in loads:
        assert load(workers[1], frame) is not None
    if order == "owner-first":
        store.release(loads)
        assert store.stats()["orphaned_frames"] == 0
    assert store.reap() == 0
    if order == "workers-first":
        store.release(loads)
    stats = store.stats()
    assert stats["used_bytes"] == stats["leases"] == stats["orphaned_frames"] == 0
    drain(store)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_the_end_of_a_job_from_before_a_reset(open_store, ready, verb):
    store, (worker,) = open_store()
    (frame,) = store.reserve([key(1)], SIZE)
    if ready:
        fill(worker, frame)
    store.new_epoch(OTHER)
    assert getattr(store, verb)([frame]) in ([False], None)
    assert store.lookup([key(1)]) == [Lookup.MISS]
    assert store.reap() == 0
    assert store.stats()["orphaned_frames"] == 0
    audit(store)
    store.new_epoch(NAMESPACE)
    assert store.lookup([key(1)]) == [Lookup.MISS]


def test_loads_of_recovered_frames_are_waited_for_after_a_reset(open_store, path):
    """The part counts loads that ended; those that an earlier owner had granted are not this one's."""
    store, (worker,) = open_store(path)
    frame = stored(store, [worker])
    store.lease([frame, frame])
    load(worker, frame)
    load(worker, frame)
    store.arena.close()

    store, (worker,) = open_store(path)
    frame = store.frames[key(1)]
    assert part_of(store, frame)[3] == 0
    store.lease([frame])
    store.new_epoch(OTHER)
    assert store.reap() == 1
    assert load(worker, frame) is not None
    assert store.reap() == 0
    audit(store)


def test_frames_of_dead_workers_are_abandoned(open_store):
    store, (worker,) = open_store()
    held = stored(store, [worker])
    store.lease([held])
    writes = store.reserve(keys(5, first=10), SIZE)
    store.new_epoch(OTHER)
    assert store.reap() == 6
    assert store.abandon() == 6
    assert store.abandon() == 0
    store.release([held])
    store.abort(writes)
    assert store.stats()["aborted"] == 0
    drain(store)


def test_an_owner_of_one_part_does_not_serve_frames_of_two(open_store, path):
    store, workers = open_store(path, ranks=2)
    stored(store, workers)
    store.arena.close()
    store = Store.open(
        Arena.open(path, ARENA_BYTES, session="s", populate=False), namespace=NAMESPACE
    )
    assert store.lookup([key(1)]) == [Lookup.MISS]
    audit(store)
    store.arena.close()


def test_where_all_loads_are_verified_a_part_without_a_checksum_is_not_read(open_store):
    store, (worker,) = open_store()
    store.put([key(1)], [bytes(5000)])
    frame = store.frames[key(1)]
    store.lease([frame])
    store.arena.buffer[frame.header + fmt.HEADER_FIXED_BYTES + 3] = Algorithm.NONE
    assert worker.begin_read(frame.header, frame.generation) is None
    worker.finish_read(frame.header, frame.generation, ok=False)
    store.release([frame])
    assert key(1) not in store.frames
