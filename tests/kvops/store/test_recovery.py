"""What a resting arena holds is taken in again; what was being written when its owner died never is."""

import itertools
import os

import pytest

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store import recovery
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.store import LIFT_EVERY_STEPS, Lookup, Store

from .chunks import (
    ARENA_BYTES,
    KIB,
    MIB,
    NAMESPACE,
    OTHER,
    audit,
    blob,
    drain,
    fill,
    is_frame,
    key,
    keys,
    put,
    read,
)

SIZE = 100_000
HIT, PENDING, MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS


def reopen(store, open_store, path, **kwargs):
    """Do without the goodbye of a clean end, as after kill -9; then open again."""
    store.arena.close()
    return open_store(path, **kwargs)


def header(store, frame):
    return bytes(store.arena.buffer[frame.header : frame.header + 128])


# --- what comes back -------------------------------------------------------------------------------------------


def test_everything_committed_comes_back(open_store, path):
    store, (worker,) = open_store(path)
    sizes = [4 * KIB, 100_000, 300 * KIB, MIB]
    wanted = keys(20)
    for number, k in enumerate(wanted):
        put(store, [k], sizes[number % 4])
    frames = store.reserve(keys(5, first=50), SIZE)
    for frame in frames[:3]:
        fill(worker, frame)
    store.commit(frames[:2])
    before = store.stats()
    store, _ = reopen(store, open_store, path)
    for number, k in enumerate(wanted):
        assert read(store, [k], sizes[number % 4]) == [blob(k, sizes[number % 4])]
    assert store.lookup(keys(5, first=50)) == [HIT, HIT, MISS, MISS, MISS]
    after = store.stats()
    assert (after["recovered"], after["discarded"], after["ready_frames"]) == (22, 3, 22)
    assert after["used_bytes"] == before["used_bytes"] - 3 * fmt.round_up(SIZE, fmt.PAGE)
    audit(store)
    drain(store)


def test_recovery_twice_is_recovery_once(open_store, path):
    store, _ = open_store(path)
    put(store, keys(10), SIZE)
    for _ in range(3):
        store, _ = reopen(store, open_store, path)
        assert read(store, keys(10), SIZE) == [blob(k, SIZE) for k in keys(10)]
        assert store.stats()["discarded"] == 0
        audit(store)


def test_a_frame_comes_back_in_a_new_life(open_store, path):
    """What a worker of the old owner still says of it means the old one."""
    store, (worker,) = open_store(path)
    put(store, keys(3), SIZE)
    old = store.frames[key(1)]
    store.close()
    new = Store.open(store.arena, namespace=NAMESPACE)
    frame = new.frames[key(1)]
    assert frame.header == old.header
    assert frame.generation >> fmt.GENERATION_COUNT_BITS == 2
    assert worker.begin_read(old.header, old.generation) is None
    worker.finish_read(old.header, old.generation, ok=False)
    assert new.lookup([key(1)]) == [HIT]
    audit(new)


def test_the_order_of_use_is_that_of_storing(open_store, path, monkeypatch):
    """Times in headers are seconds; within one, generations tell. A third owner sees the same order."""
    clock = itertools.count(2_000_000_000)
    monkeypatch.setattr("kvferry.kvops.store.putget.time.time", lambda: next(clock))
    store, _ = open_store(path)
    wanted = keys(10)
    for k in wanted:
        put(store, [k], MIB)
    for _ in range(2):
        store, _ = reopen(store, open_store, path)
    for number in range(100, 140):
        put(store, [key(number)], MIB)
        hits = store.lookup(wanted)
        assert hits == sorted(hits, key=lambda answer: answer is HIT), "a younger one went first"
    assert hits == [MISS] * 10


def test_parts_of_all_ranks_come_back(open_store, path):
    store, workers = open_store(path, ranks=3)
    frames = store.reserve(keys(4), 3 * 4096)
    for frame in frames:
        for rank, worker in enumerate(workers):
            fill(worker, frame, rank)
    store.commit(frames[:3])
    store, workers = reopen(store, open_store, path, ranks=3)
    for k in keys(3):
        frame = store.frames[k]
        places = [worker.begin_read(frame.header, frame.generation) for worker in workers]
        data = b"".join(bytes(store.arena.buffer[o : o + n]) for o, n in places)
        assert data == blob(k, 3 * 4096)
    assert store.lookup([key(3)]) == [MISS], "all parts were there, the commit was not"


def test_checksums_outlive_their_owner(open_store, path):
    store, _ = open_store(path)
    put(store, keys(4), SIZE)
    frame = store.frames[key(2)]
    store.arena.buffer[frame.offset + 77] ^= 1
    store, (worker,) = reopen(store, open_store, path)
    frame = store.frames[key(2)]
    store.lease([frame])
    assert worker.begin_read(frame.header, frame.generation) is None
    worker.finish_read(frame.header, frame.generation, ok=False)
    assert store.lookup(keys(4)) == [HIT, HIT, MISS, HIT]
    store.release([frame])
    assert read(store, keys(4), SIZE)[2] is None
    drain(store)


def test_a_large_index_is_made_anew(open_store, path):
    store, _ = open_store(path, 32 * MIB)
    wanted = keys(6_000)
    put(store, wanted, 512)
    store, _ = reopen(store, open_store, path, arena_bytes=32 * MIB)
    assert store.lookup(wanted) == [HIT] * 6_000
    assert store._index.slots >= 2 * fmt.INDEX_SLOTS_MIN
    audit(store)


def test_spans_that_are_empty_go_to_any_size(open_store, path):
    store, _ = open_store(path)
    put(store, keys(150), SIZE)
    store.delete(keys(150))
    store, _ = reopen(store, open_store, path)
    assert put(store, keys(10), MIB) == [True] * 10
    audit(store)


def test_frames_of_two_engines_under_one_key(open_store, path):
    store, _ = open_store(path)
    put(store, [key(1)], SIZE)
    store, _ = reopen(store, open_store, path, namespace=OTHER)
    assert store.put([key(1)], [b"other" * 100]) == [True]
    for namespace, size, data in [
        (NAMESPACE, SIZE, blob(key(1), SIZE)),
        (OTHER, 500, b"other" * 100),
    ]:
        store, _ = reopen(store, open_store, path, namespace=namespace)
        assert read(store, [key(1)], size) == [data]


# --- what does not ---------------------------------------------------------------------------------------------


def overwrite(offset, data):
    def damage(store, frame):
        store.arena.buffer[frame.header + offset : frame.header + offset + len(data)] = data

    return damage


def state(value):
    return lambda store, frame: overwrite(0, bytes([value]))(store, frame)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(state(fmt.State.WRITING), id="writing"),
        pytest.param(state(fmt.State.BAD), id="bad"),
        pytest.param(state(0x42), id="no-such-state"),
        pytest.param(overwrite(8, b"\xff"), id="key"),
        pytest.param(overwrite(44, b"\xff"), id="namespace"),
        pytest.param(overwrite(60, b"\xff"), id="tokens"),
        pytest.param(overwrite(64, b"\xff" * 8), id="blob"),
        pytest.param(overwrite(72, b"\xff" * 8), id="blob_bytes"),
        pytest.param(overwrite(84, b"\xff"), id="magic"),
        pytest.param(overwrite(88, b"\2"), id="version"),
        pytest.param(overwrite(89, b"\xff"), id="key_bytes"),
        pytest.param(overwrite(90, b"\0\0"), id="part_count"),
        pytest.param(overwrite(92, b"\xff" * 4), id="check"),
        pytest.param(overwrite(96, b"\1"), id="part-rank"),
        pytest.param(overwrite(98, b"\0"), id="part-empty"),
        pytest.param(overwrite(98, b"\2"), id="part-failed"),
        pytest.param(overwrite(104, b"\1"), id="part-offset"),
        pytest.param(overwrite(118, b"\1"), id="part-bytes"),
    ],
)
def test_a_header_that_contradicts_itself_is_discarded(open_store, path, damage):
    store, _ = open_store(path)
    put(store, keys(3), SIZE)
    damage(store, store.frames[key(1)])
    store, _ = reopen(store, open_store, path)
    assert store.lookup(keys(3)) == [HIT, MISS, HIT]
    assert store.stats()["discarded"] == 1
    audit(store)
    drain(store)


def test_a_frame_for_another_place_is_discarded(open_store, path):
    """A whole and valid header, copied to where another frame is."""
    store, _ = open_store(path)
    put(store, keys(2), SIZE)
    first, second = (store.frames[k] for k in keys(2))
    store.arena.buffer[second.header : second.header + 128] = header(store, first)
    store.arena.words[first.word] = fmt.State.FREE
    store, _ = reopen(store, open_store, path)
    assert store.lookup(keys(2)) == [MISS, MISS]
    assert store.stats()["discarded"] == 1
    audit(store)


def test_one_key_twice_is_kept_once(open_store, path):
    store, _ = open_store(path)
    put(store, keys(2), SIZE)
    frame, other = store.frames[key(0)], store.frames[key(1)]
    body = bytearray(header(store, frame)[8 : 8 + fmt.HEADER_BODY.size])
    body[56:64] = other.offset.to_bytes(8, "little")
    at = other.header
    store.arena.buffer[at + 8 : at + 96] = bytes(body) + fmt.CHECK.pack(fmt.check_of(bytes(body)))
    store, _ = reopen(store, open_store, path)
    assert store.stats()["recovered"] == store.stats()["discarded"] == 1
    assert store.lookup(keys(2)) == [HIT, MISS]
    audit(store)


def test_what_an_index_says_is_not_believed(open_store, path):
    store, _ = open_store(path)
    put(store, keys(3), SIZE)
    arena = store.arena
    index = arena.words[fmt.INDEX_OFFSET_WORD]
    arena.buffer[index : index + 4096] = b"\x11" * 4096
    arena.words[fmt.INDEX_OFFSET_WORD] = 12345
    arena.words[fmt.INDEX_SLOTS_WORD] = 77
    arena.words[fmt.INDEX_SEQUENCE_WORD] = (1 << 64) - 1
    store, _ = reopen(store, open_store, path)
    assert read(store, keys(3), SIZE) == [blob(k, SIZE) for k in keys(3)]
    audit(store)


def test_scan_yields_what_is_in_use(open_store):
    store, (worker,) = open_store()
    frames = store.reserve(keys(4), SIZE)
    for frame in frames[:2]:
        fill(worker, frame)
    store.commit(frames[:1])
    store.abort(frames[3:])
    (span,) = [span for span in store._space.spans.all() if span.size]
    found = {f.header: f for f in recovery.scan(store.arena, span)}
    assert [found[f.header].state.name for f in frames[:3]] == ["READY", "WRITING", "WRITING"]
    assert len(found) == 3
    one = found[frames[0].header]
    assert (one.key, one.namespace, one.blob_bytes, one.offset, one.generation, one.parts) == (
        key(0), NAMESPACE, SIZE, frames[0].offset, frames[0].generation, 1,
    )  # fmt: skip


# --- workers that outlive their owner --------------------------------------------------------------------------


@pytest.fixture
def old_engine(open_arena, path):
    """An owner that died, with one frame committed, one begun by its worker, one told of; the worker lives on."""
    owner_arena, worker_arena = (open_arena(path, session="old") for _ in range(2))
    worker_arena.attach()
    store = Store.open(owner_arena, namespace=NAMESPACE)
    put(store, [key(0)], SIZE)
    worker = Frames(worker_arena, 0)
    begun, told = store.reserve(keys(2, first=1), SIZE)
    worker.begin_write(begun.header, begun.generation)
    owner_arena.close()
    return worker_arena, worker, begun, told


def give_all(store, size=SIZE):
    """Reserve all there is of one size; return the headers."""
    frames = [f for f in store.reserve(keys(300, first=1000), size) if is_frame(f)]
    headers = {frame.header for frame in frames}
    store.abort(frames)
    return headers


@pytest.mark.parametrize("session", ["new", "old"])
def test_what_a_live_worker_may_write_is_not_given_out(open_store, path, old_engine, session):
    """Also where the new engine has the old one's name, and where it writes as the new engine stores."""
    worker_arena, worker, begun, told = old_engine
    store, _ = open_store(path, session=session)
    assert store.lookup(keys(3)) == [HIT, MISS, MISS]
    assert store.stats()["quarantined_frames"] == 2
    assert not give_all(store) & {begun.header, told.header}
    # another size does not get their slabs either
    put(store, keys(40, first=100), MIB)
    audit(store)
    put(store, keys(150, first=200), SIZE)
    worker_arena.buffer[begun.offset : begun.offset + SIZE] = b"\x5a" * SIZE
    assert not worker.finish_write(begun.header, begun.generation)
    # it was told of this one too, and does not begin any more
    assert worker.begin_write(told.header, told.generation) is None
    audit(store)
    for k in keys(150, first=200):
        assert read(store, [k], SIZE)[0] in (None, blob(k, SIZE))
    assert store.stats()["bad"] == 0

    if session == "new":
        store.reap()
        assert store.stats()["quarantined_frames"] == 2, "the worker still lives"
        worker_arena.close()
    assert store.reap() == 0
    assert store.stats()["quarantined_frames"] == 0
    assert give_all(store) >= {begun.header, told.header}
    audit(store)
    drain(store)


def test_a_worker_of_the_same_name_is_a_stranger_only_while_it_writes(open_store, path, old_engine):
    _, worker, begun, told = old_engine
    worker.fail_write(begun.header, begun.generation)
    store, _ = open_store(path, session="old")
    assert store.stats()["quarantined_frames"] == 0
    assert worker.begin_write(told.header, told.generation) is None
    drain(store)


def test_a_quarantine_outlives_an_owner(open_store, path, old_engine):
    worker_arena, _, begun, told = old_engine
    for session in ("second", "third"):
        store, _ = open_store(path, session=session)
        assert store.stats()["quarantined_frames"] == 2
        audit(store)
        store.arena.close()
    worker_arena.close()
    store, _ = open_store(path, session="fourth")
    assert store.stats()["quarantined_frames"] == 0
    assert give_all(store) >= {begun.header, told.header}


def test_a_scheduler_that_only_steps_lifts_the_quarantine(open_store, path, old_engine):
    worker_arena, *_ = old_engine
    store, _ = open_store(path, session="new")
    worker_arena.close()
    for _ in range(LIFT_EVERY_STEPS):
        store.end_step()
    assert store.stats()["quarantined_frames"] == 0
    audit(store)


def test_a_worker_that_was_killed_is_no_stranger(open_store, path, child):
    worker = child(
        "from kvferry.kvops.store.arena import Arena\nfrom kvferry.kvops.store.frames import Frames\n"
        "from kvferry.kvops.store.store import Store\n"
    ).wait_ready()
    begun = worker.ask(
        f"a = Arena.open({str(path)!r}, {ARENA_BYTES}, session='old')\n"
        f"a.attach()\n"
        f"s = Store.open(a, namespace={NAMESPACE!r})\n"
        f"(f,) = s.reserve([{key(1)!r}], {SIZE})\n"
        f"Frames(a, 0).begin_write(f.header, f.generation)\n"
        f"s.close()\n"
        f"print(f.header, flush=True)"
    )
    store, _ = open_store(path, session="new")
    assert store.arena.strangers() == [(worker.pid, store.arena.attached()[0][1])]
    assert store.stats()["quarantined_frames"] == 1
    assert store.reap() == 0
    assert store.stats()["quarantined_frames"] == 1
    worker.kill()
    store.reap()
    assert store.stats()["quarantined_frames"] == 0
    assert int(begun) in give_all(store)
    audit(store)


def test_a_stranger_that_only_looks_on_keeps_nothing(open_store, path):
    """A worker of an engine that is about to be refused; nothing was being written."""
    store, _ = open_store(path)
    put(store, keys(2), SIZE)
    store.arena.close()
    with Arena.open(path, ARENA_BYTES, session="other") as other:
        other.attach()
        store, _ = open_store(path)
        assert store.stats()["quarantined_frames"] == 0
        audit(store)


# --- storms ----------------------------------------------------------------------------------------------------


def test_owners_killed_anywhere(storm):
    """At a random moment or at a random line of the store: what was committed is there, nothing half-written is."""
    assert "21 owners killed" in storm("storm_kill.py", "--runs", 21)


def test_bytes_flipped_anywhere(storm):
    assert "0 wrong bytes read" in storm("storm_flip.py", "--runs", 25)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs to be fast")
def test_arenas_outlive_the_processes_that_made_them(child, open_store, path):
    writer = child(
        "from kvferry.kvops.store.arena import Arena\nfrom kvferry.kvops.store.store import Store\n"
    ).wait_ready()
    writer.ask(
        f"s = Store.open(Arena.open({str(path)!r}, {ARENA_BYTES}, session='old'), namespace={NAMESPACE!r})\n"
        f"s.put([{key(1)!r}], [{blob(key(1), 4096)!r}])\n"
        f"print(flush=True)"
    )
    writer.kill()
    store, _ = open_store(path, session="new")
    assert read(store, [key(1)], 4096) == [blob(key(1), 4096)]
    assert store.lookup([key(2)]) == [MISS]
    assert PENDING not in store.lookup(keys(5))


@pytest.mark.parametrize(
    ("stored", "opened", "found"),
    [("off", "always", False), ("off", "sampled", True), ("off", "off", True), ("always", "always", True),
     ("sampled", "always", True)],
)  # fmt: skip
def test_what_rests_without_a_checksum_is_no_hit_where_all_loads_are_verified(
    open_store, path, stored, opened, found
):
    store, _ = open_store(path, verify=stored)
    store.put([key(1)], [bytes(SIZE)])
    store.arena.close()
    store, _ = open_store(path, verify=opened)
    assert store.lookup([key(1)]) == [Lookup.HIT if found else Lookup.MISS]
    assert store.stats()["discarded"] == (not found)
