"""The verbs of the store: lists in, one answer per item in request order, and what each answer promises."""

import numpy as np
import pytest

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.store import Lookup, Reserve, Store

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
    poisoned,
    put,
    read,
)

SIZE = 100_000
LARGE = 1 * MIB
HIT, PENDING, MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS


@pytest.fixture
def store(open_store):
    return open_store()[0]


def commit(store, workers, wanted, size=SIZE):
    frames = store.reserve(wanted, size)
    for frame in frames:
        for rank, worker in enumerate(workers):
            fill(worker, frame, rank)
    assert store.commit(frames) == [True] * len(wanted)
    return frames


def fill_up(store, size=LARGE, first=0):
    """Reserve frames of *size* until there is no room; return them."""
    frames = []
    while is_frame(frame := store.reserve([key(first + len(frames))], size)[0]):
        frames.append(frame)
    return frames


# --- put and get -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 63, 4095, 4096, 4097, SIZE, LARGE, 15 * MIB])
def test_what_was_put_comes_back(store, size):
    assert put(store, [key(1)], size) == [True]
    assert read(store, [key(1)], size) == [blob(key(1), size)]
    assert store.stats()["used_bytes"] == fmt.round_up(size, fmt.PAGE)
    drain(store)


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "numpy", "float32", "2d"])
def test_any_contiguous_buffer_will_do(store, kind):
    data = blob(key(1), 4096)
    source = {
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "numpy": np.frombuffer(data, np.uint8),
        "float32": np.frombuffer(data, np.float32),
        "2d": np.frombuffer(data, np.uint16).reshape(64, 32),
    }[kind]
    assert store.put([key(1)], [source]) == [True]
    out = np.full(4096, 0xA5, np.uint8)
    target = {"float32": out.view(np.float32), "2d": out.view(np.uint16).reshape(64, 32)}.get(
        kind, out
    )
    assert store.get([key(1)], [target]) == [True]
    assert out.tobytes() == data


@pytest.mark.parametrize("hash_bytes", [16, 20, 32])
def test_keys_of_every_length(store, hash_bytes):
    wanted = [
        key(n, group, hash_bytes=hash_bytes) for n in range(3) for group in (0, 1, 0xFFFF_FFFF)
    ]
    assert put(store, wanted, 4096) == [True] * 9
    assert read(store, wanted, 4096) == [blob(k, 4096) for k in wanted]
    assert store.lookup([key(1, 2, hash_bytes=hash_bytes)]) == [MISS]
    audit(store)


def test_get_answers_in_request_order_and_leaves_misses_poisoned(store):
    put(store, keys(3), 4096)
    wanted = [key(2), key(7), key(0), key(8), key(1), key(2)]
    outs = [poisoned(4096) for _ in wanted]
    assert store.get(wanted, outs) == [True, False, True, False, True, True]
    expected = [poisoned(4096) if n in (1, 3) else blob(k, 4096) for n, k in enumerate(wanted)]
    assert outs == expected


def test_put_keeps_what_is_there(store):
    assert put(store, [key(1)], 4096) == [True]
    assert store.put([key(1), key(2), key(1)], [b"x" * 4096] * 3) == [
        Reserve.EXISTS,
        True,
        Reserve.EXISTS,
    ]
    assert read(store, [key(1)], 4096) == [blob(key(1), 4096)]
    assert store.put([key(3)] * 2, [b"a" * 4096, b"b" * 4096]) == [True, Reserve.EXISTS]
    assert read(store, [key(3)], 4096) == [b"a" * 4096]
    assert store.stats()["committed"] == 3


def test_put_of_another_size_keeps_what_is_there(store):
    put(store, [key(1)], 4096)
    assert put(store, [key(1)], LARGE) == [Reserve.EXISTS]
    assert read(store, [key(1)], 4096) == [blob(key(1), 4096)]


def test_put_beside_a_reservation_is_pending(store):
    store.reserve([key(1)], 4096)
    assert put(store, keys(3), 4096) == [True, Reserve.PENDING, True]
    assert read(store, keys(3), 4096)[1] is None


def test_get_finds_a_flipped_bit_once(store):
    put(store, keys(2), SIZE)
    frame = store.frames[key(0)]
    store.arena.buffer[frame.offset + 500] ^= 1
    assert read(store, keys(2), SIZE) == [None, blob(key(1), SIZE)]
    assert store.stats()["bad"] == 1
    assert store.lookup(keys(2)) == [MISS, HIT]
    audit(store)
    assert put(store, [key(0)], SIZE) == [True]
    assert read(store, [key(0)], SIZE) == [blob(key(0), SIZE)]


def test_get_of_a_corrupt_blob_that_a_load_holds(store):
    put(store, [key(1)], SIZE)
    frame = store.frames[key(1)]
    store.lease([frame])
    store.arena.buffer[frame.offset] ^= 1
    assert read(store, [key(1)], SIZE) == [None]
    assert read(store, [key(1)], SIZE) == [None]
    assert store.lookup([key(1)]) == [MISS]
    assert put(store, [key(1)], SIZE) == [Reserve.PENDING]
    store.release([frame])
    assert store.stats()["bad"] == 1
    assert put(store, [key(1)], SIZE) == [True]
    drain(store)


@pytest.mark.parametrize(("verify", "verified"), [("always", 32), ("sampled", 2), ("off", 0)])
def test_how_many_gets_are_verified(open_store, verify, verified):
    store, _ = open_store(verify=verify)
    put(store, [key(1)], 4096)
    for _ in range(32):
        assert read(store, [key(1)], 4096) == [blob(key(1), 4096)]
    assert store.stats()["verified"] == verified


# --- reserve, commit, abort ------------------------------------------------------------------------------------


def test_reserve_answers_per_item_in_request_order(open_store):
    store, workers = open_store()
    commit(store, workers, [key(1)])
    (pending,) = store.reserve([key(2)], SIZE)
    answers = store.reserve([key(3), key(1), key(2), key(3), key(4)], SIZE)
    assert [a if not is_frame(a) else a.key for a in answers] == [
        key(3), Reserve.EXISTS, Reserve.PENDING, Reserve.PENDING, key(4),
    ]  # fmt: skip
    assert store.lookup([key(4), key(1), key(2), key(9)]) == [PENDING, HIT, PENDING, MISS]
    assert pending.is_writing
    drain(store)


def test_commit_answers_per_item_and_aborts_the_rest(open_store):
    store, (worker,) = open_store()
    frames = store.reserve(keys(4), SIZE)
    for frame in (frames[0], frames[3]):
        fill(worker, frame)
    assert store.commit(frames) == [True, False, False, True]
    assert store.lookup(keys(4)) == [HIT, MISS, MISS, HIT]
    assert store.commit(frames) == [False] * 4
    assert store.lookup(keys(4)) == [HIT, MISS, MISS, HIT]
    store.abort(frames)
    assert store.lookup(keys(4)) == [HIT, MISS, MISS, HIT]
    stats = store.stats()
    assert (stats["committed"], stats["aborted"]) == (2, 2)
    drain(store)


def test_an_aborted_frame_is_given_out_again(open_store):
    store, (worker,) = open_store()
    (frame,) = store.reserve([key(1)], SIZE)
    store.abort([frame])
    (again,) = store.reserve([key(1)], SIZE)
    assert again.header == frame.header
    assert again.generation > frame.generation
    # the first one's end comes late
    store.abort([frame])
    assert store.commit([frame]) == [False]
    fill(worker, again)
    assert store.commit([again]) == [True]
    audit(store)


def test_a_header_says_what_the_frame_is(open_store):
    store, _ = open_store(ranks=2)
    (frame,) = store.reserve([key(7, group=3)], SIZE, tokens=48)
    start = frame.header + 8
    body = bytes(store.arena.buffer[start : start + fmt.HEADER_BODY.size])
    name, namespace, tokens, blob_at, size, when, magic, version, key_bytes, parts = (
        fmt.HEADER_BODY.unpack(body)
    )
    assert (name, namespace, tokens, blob_at, size) == (
        key(7, group=3),
        NAMESPACE,
        48,
        frame.offset,
        SIZE,
    )
    assert (magic, version, key_bytes, parts) == (fmt.HEADER_MAGIC, fmt.FORMAT_VERSION, 36, 2)
    assert when > 1_700_000_000
    (check,) = fmt.CHECK.unpack_from(store.arena.buffer, frame.header + fmt.HEADER_CHECK)
    assert check == fmt.check_of(body)
    assert frame.offset % fmt.PAGE == 0


# --- room ------------------------------------------------------------------------------------------------------


def test_without_room_each_item_is_told_so(store):
    held = fill_up(store)
    answers = store.reserve(keys(3, first=1000), LARGE)
    assert answers == [Reserve.NO_ROOM] * 3
    assert store.stats()["no_room"] == 4
    assert put(store, [key(2000)], LARGE) == [Reserve.NO_ROOM]
    assert store.lookup([key(1000), key(2000)]) == [MISS, MISS]
    store.abort(held[:2])
    answers = store.reserve(keys(3, first=1000), LARGE)
    assert [is_frame(answer) for answer in answers] == [True, True, False]
    audit(store)


@pytest.mark.parametrize("size", [ARENA_BYTES, 2 * ARENA_BYTES, 1 << 40])
def test_a_blob_that_can_never_fit_has_no_room(store, size):
    put(store, [key(1)], 4096)
    assert store.reserve(keys(2), size) == [Reserve.NO_ROOM] * 2
    assert store.lookup([key(1)]) == [HIT]


def test_least_recently_used_goes_first(store):
    wanted = keys(40)
    for k in wanted:
        put(store, [k], LARGE)
    left = [k for k, answer in zip(wanted, store.lookup(wanted), strict=True) if answer is HIT]
    assert left == wanted[-len(left) :]
    assert store.take_evicted() == wanted[: -len(left)]
    assert store.take_evicted() == []
    # one that is read, one that is touched and one that is offered again outlive their neighbours
    read(store, left[:1], LARGE)
    store.touch(left[1:2])
    assert put(store, left[2:3], LARGE) == [Reserve.EXISTS]
    put(store, keys(len(left) - 3, first=100), LARGE)
    assert store.lookup(left) == [HIT] * 3 + [MISS] * (len(left) - 3)
    audit(store)


def test_a_prefix_that_is_touched_last_first_outlives_its_tail(store):
    prompt = keys(10)
    put(store, prompt, LARGE)
    store.touch(reversed(prompt))
    evicted = 0
    for number in range(100, 130):
        put(store, [key(number)], LARGE)
        hits = store.lookup(prompt)
        assert hits == [HIT] * hits.count(HIT) + [MISS] * hits.count(MISS), (
            "a tail without its prefix"
        )
        evicted = hits.count(MISS)
    assert evicted == 10


def test_touch_passes_over_what_is_not_there(store):
    store.reserve([key(1)], SIZE)
    store.touch([key(1), key(2)])
    assert store.lookup([key(1)]) == [PENDING]


def test_what_is_offered_together_does_not_evict_itself(store):
    """A batch that is there already is most recently used before room is made for its last item."""
    room = len(fill_up(store))
    drain(store)
    wanted = keys(room)
    assert put(store, wanted, LARGE) == [True] * room
    answers = put(store, [*wanted[1:], key(1000)], LARGE)
    assert answers == [Reserve.EXISTS] * (room - 1) + [True]
    assert store.lookup(wanted) == [MISS] + [HIT] * (room - 1)


def test_only_the_latest_evicted_keys_are_remembered(store, monkeypatch):
    put(store, keys(60), LARGE)
    assert store._evicted.maxlen == 65_536
    store.new_epoch(OTHER)
    put(store, keys(60), LARGE)
    evicted = store.take_evicted()
    assert store.stats()["evicted"] == len(evicted)


# --- leases ----------------------------------------------------------------------------------------------------


def test_a_leased_frame_stays(store):
    put(store, keys(3), LARGE)
    frame = store.frames[key(0)]
    store.lease([frame])
    store.lease([frame])
    for number in range(100, 150):
        assert put(store, [key(number)], LARGE) == [True]
    assert store.lookup(keys(3)) == [HIT, MISS, MISS]
    assert store.delete([key(0)]) == [False]
    assert store.stats()["leases"] == 2
    store.release([frame])
    put(store, keys(50, first=200), LARGE)
    assert store.lookup([key(0)]) == [HIT]
    store.release([frame])
    put(store, keys(50, first=300), LARGE)
    assert store.lookup([key(0)]) == [MISS]
    drain(store)


def test_when_all_is_leased_there_is_no_room(store):
    stored = [key(n) for n in range(40)]
    put(store, stored, LARGE)
    frames = list(store.frames.values())
    store.lease(frames)
    assert put(store, [key(100)], LARGE) == [Reserve.NO_ROOM]
    store.release(frames[:1])
    assert put(store, [key(100)], LARGE) == [True]
    drain(store)


def test_a_hit_of_this_step_stays_until_the_step_ends(store):
    put(store, keys(2), LARGE)
    for k in keys(2):
        store.frames[k].step = store.step
    put(store, keys(50, first=100), LARGE)
    assert store.lookup(keys(2)) == [HIT, HIT]
    assert store.delete(keys(2)) == [False, False]
    # the first became a load, the second was not taken up
    frame = store.frames[key(0)]
    store.lease([frame])
    store.end_step()
    put(store, keys(50, first=200), LARGE)
    assert store.lookup(keys(2)) == [HIT, MISS]
    store.release([frame])
    assert store.delete([key(0)]) == [True]
    drain(store)


def test_a_frame_that_nobody_reads_cannot_be_released(store):
    put(store, [key(1)], SIZE)
    frame = store.frames[key(1)]
    with pytest.raises(ValueError, match=r"frames must be leased; got Frame.* which nobody reads"):
        store.release([frame])
    store.lease([frame])
    store.release([frame])
    with pytest.raises(ValueError, match="frames must be leased"):
        store.release([frame])


@pytest.mark.parametrize("how", ["deleted", "reused", "writing", "evicted"])
def test_a_frame_that_is_not_there_cannot_be_leased(open_store, how):
    store, (worker,) = open_store()
    (frame,) = store.reserve([key(1)], LARGE)
    if how != "writing":
        fill(worker, frame)
        store.commit([frame])
    if how in ("deleted", "reused"):
        store.delete([key(1)])
    if how == "reused":
        put(store, [key(2)], LARGE)
    if how == "evicted":
        put(store, keys(50, first=100), LARGE)
    put(store, [key(3)], LARGE)
    good = store.frames[key(3)]
    with pytest.raises(
        ValueError, match=r"frames must be ready; got Frame.* which is not there any more"
    ):
        store.lease([good, frame])
    assert good.leases == frame.leases == 0
    assert store.stats()["leases"] == 0
    audit(store)


# --- delete, reset ---------------------------------------------------------------------------------------------


def test_delete_answers_per_item(open_store):
    store, _ = open_store()
    put(store, keys(3), SIZE)
    store.reserve([key(3)], SIZE)
    store.lease([store.frames[key(2)]])
    assert store.delete([key(0), key(9), key(3), key(2), key(1), key(0)]) == [
        True, False, False, False, True, False,
    ]  # fmt: skip
    assert store.lookup(keys(4)) == [MISS, MISS, HIT, PENDING]
    assert store.stats()["deleted"] == 2
    drain(store)


def test_after_a_reset_nothing_is_found(store):
    put(store, keys(5), SIZE)
    store.new_epoch(OTHER)
    assert store.lookup(keys(5)) == [MISS] * 5
    assert read(store, keys(5), SIZE) == [None] * 5
    assert store.stats()["used_bytes"] == 0
    assert store.stats()["resets"] == 1
    assert store.put(keys(5), [b"new" * 1000] * 5) == [True] * 5
    store.new_epoch(NAMESPACE)
    assert store.lookup(keys(5)) == [MISS] * 5
    audit(store)


def test_a_reset_to_the_same_namespace_forgets_too(store):
    put(store, keys(5), SIZE)
    (frame,) = store.reserve([key(9)], SIZE)
    store.new_epoch(NAMESPACE)
    assert store.lookup(keys(10)) == [MISS] * 10
    assert put(store, [key(9)], SIZE) == [True]
    store.abort([frame])
    assert store.lookup([key(9)]) == [HIT]
    audit(store)


def test_a_reset_in_the_step_of_a_hit(store):
    put(store, [key(1)], SIZE)
    store.frames[key(1)].step = store.step
    store.new_epoch(OTHER)
    assert store.lookup([key(1)]) == [MISS]
    drain(store)


def test_other_namespaces_rest(open_store, path):
    store, _ = open_store(path)
    put(store, keys(3), SIZE)
    store.arena.close()
    store, _ = open_store(path, namespace=OTHER)
    assert store.lookup(keys(3)) == [MISS] * 3
    assert store.put(keys(3), [b"other" * 100] * 3) == [True] * 3
    audit(store)
    store.arena.close()
    store, _ = open_store(path)
    assert read(store, keys(3), SIZE) == [blob(k, SIZE) for k in keys(3)]
    assert store.stats()["recovered"] == 6
    # room is made at their cost as well, and their keys are not reported as this engine's
    put(store, keys(60, first=100), LARGE)
    assert not set(keys(3)) & set(store.take_evicted()) or store.lookup(keys(3)) == [MISS] * 3
    audit(store)


# --- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(4 * KIB, LARGE, id="small-then-large"),
        pytest.param(LARGE, 4 * KIB, id="large-then-small"),
        pytest.param(100_000, 2 * MIB, id="odd-then-huge"),
        pytest.param(2 * MIB, 100_000, id="huge-then-odd"),
    ],
)
def test_no_size_starves_behind_another(store, first, second):
    """One size has filled the arena; another comes, and soon has more than half the room it would have had alone."""
    alone = room_for(store, second)
    put(store, keys(20_000_000 // first), first)
    wanted = keys(alone + 80, group=1)
    for k in wanted:
        assert put(store, [k], second) == [True]
    audit(store)
    # a span is a run of slabs: what lies between two of them may be too short for a third
    assert store.lookup(wanted).count(HIT) > alone / 2


def room_for(store, size):
    room = len(fill_up(store, size, first=1 << 20))
    drain(store)
    return room


def test_a_size_that_is_used_keeps_its_room(store):
    """A size in use does not lose its spans to one that only streams through."""
    hot, size = keys(20), 200_000
    put(store, hot, size)
    for number in range(1_000, 1_200):
        store.touch(hot)
        put(store, [key(number)], LARGE)
    assert store.lookup(hot) == [HIT] * 20
    audit(store)


def test_a_held_frame_keeps_its_span_from_another_size(open_store):
    store, workers = open_store()
    put(store, keys(150), 100_000)
    frames = list(store.frames.values())
    held = frames[:: len(frames) // 8]
    store.lease(held)
    (writing,) = store.reserve([key(999)], 100_000)
    put(store, keys(50, first=1_000), LARGE)
    assert store.lookup([frame.key for frame in held]) == [HIT] * len(held)
    assert read(store, [frame.key for frame in held], 100_000) == [
        blob(f.key, 100_000) for f in held
    ]
    assert store.lookup([key(999)]) == [PENDING]
    fill(workers[0], writing)
    assert store.commit([writing]) == [True]
    store.release(held)
    drain(store)


# --- bad arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda s: s.reserve([key(1), b"short"], SIZE), "key must be 16 to 32 bytes", id="key"),
        pytest.param(lambda s: s.reserve([key(1)], 0), "blob_bytes must be a positive multiple of 1 parts; got 0", id="no-bytes"),
        pytest.param(lambda s: s.reserve([key(1)], -4096), "blob_bytes must be a positive multiple", id="negative-bytes"),
        pytest.param(lambda s: s.reserve([key(1)], SIZE, tokens=-1), "tokens must be 0 to 4294967295; got -1", id="reserve-tokens"),
        pytest.param(lambda s: s.put([key(1)], [b"x"], tokens=1 << 32), "tokens must be 0 to 4294967295", id="put-tokens"),
        pytest.param(lambda s: s.put([b"k" * 37], [b"x"]), "key must be 16 to 32 bytes", id="put-key"),
        pytest.param(lambda s: s.put([key(1)], [b""]), "blob_bytes must be a positive multiple", id="put-nothing"),
        pytest.param(lambda s: s.put(keys(2), [b"x"]), "got 1 parts, 2 keys, 1 blobs", id="put-lengths"),
        pytest.param(lambda s: s.get(keys(2), [bytearray(1)]), "got 1 parts, 2 keys, 1 buffers", id="get-lengths"),
        pytest.param(lambda s: s.get([key(5)], [bytearray(99)]), "out must be 100 bytes for key .*; got 99", id="get-size"),
        pytest.param(lambda s: s.new_epoch(b"short"), "namespace must be 16 bytes; got 5", id="new-epoch"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_and_changes_nothing(store, call, message):
    put(store, [key(5)], 100)
    before = store.stats()
    with pytest.raises(ValueError, match=message):
        call(store)
    after = store.stats()
    assert {**after, "free_frames": 0} == {**before, "free_frames": 0}
    audit(store)
    assert read(store, [key(5)], 100) == [blob(key(5), 100)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"namespace": b"x"}, "namespace must be 16 bytes; got 1", id="namespace"),
        pytest.param({"parts": 0}, "parts must be 1 to 1024; got 0", id="no-parts"),
        pytest.param({"parts": 1025}, "parts must be 1 to 1024; got 1025", id="too-many-parts"),
        pytest.param(
            {"eviction": "fifo"}, "eviction must be one of .'lru'.; got 'fifo'", id="eviction"
        ),
        pytest.param({"verify": "never"}, "'never' is not a valid Verify", id="verify"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_arena_is_owned(open_arena, arguments, message):
    arena = open_arena()
    with pytest.raises(ValueError, match=message):
        Store.open(arena, **{"namespace": NAMESPACE, **arguments})
    assert arena.words[fmt.EPOCH_WORD] == 0
    Store.open(arena, namespace=NAMESPACE)


@pytest.mark.parametrize("size", [1, 4095, 4097])
def test_parts_must_divide_the_blob(open_store, size):
    store, _ = open_store(ranks=2)
    with pytest.raises(ValueError, match="must be a positive multiple of 2 parts"):
        store.reserve([key(1)], size)


def test_put_and_get_are_for_one_part(open_store):
    store, _ = open_store(ranks=2)
    with pytest.raises(ValueError, match=r"put needs one part .* got 2 parts"):
        store.put([key(1)], [b"x" * 4096])
    with pytest.raises(ValueError, match=r"get needs one part .* got 2 parts"):
        store.get([key(1)], [bytearray(4096)])


@pytest.mark.parametrize("verb", ["lookup", "touch", "delete", "commit", "abort", "lease", "release", "put", "get", "reserve"])  # fmt: skip
def test_nothing_is_an_empty_list(store, verb):
    arguments = {"put": ([], []), "get": ([], []), "reserve": ([], SIZE)}.get(verb, ([],))
    assert getattr(store, verb)(*arguments) in ([], None)
    assert store.stats()["free_frames"] == 0


def test_a_closed_store_lets_the_next_one_in(open_store, path):
    store, (worker,) = open_store(path)
    put(store, [key(1)], SIZE)
    (frame,) = store.reserve([key(2)], SIZE)
    store.close()
    again = Store.open(store.arena, namespace=NAMESPACE)
    assert again.lookup(keys(3)) == [MISS, HIT, MISS]
    # of the same session, and begun before: it meets a frame that is not its own
    assert worker.begin_write(frame.header, frame.generation) is None
    audit(again)


def test_closing_after_the_arena_is_no_error(open_store):
    store, _ = open_store(None)
    store.close()
    store.arena.close()
    # its descriptor is gone, or by now somebody else's
    store.close()


# --- half a call -----------------------------------------------------------------------------------------------


def test_a_put_that_fails_in_the_middle_leaves_nothing_of_itself(store):
    put(store, keys(2), 4096)
    before = store.stats()
    strided = memoryview(bytearray(8192))[::2]
    with pytest.raises(TypeError):
        store.put(keys(3, first=10), [b"a" * 4096, strided, b"c" * 4096])
    gone = store.put(keys(3, first=10), [b"d" * 4096] * 3)
    # a blob before the one at fault may be there; nothing is half there
    assert all(answer in (True, Reserve.EXISTS) for answer in gone)
    assert read(store, keys(3, first=10), 4096)[1:] == [b"d" * 4096] * 2
    assert store.stats()["writing_frames"] == before["writing_frames"] == 0
    drain(store)


def test_an_interrupt_between_the_copies_of_a_put_leaves_nothing_readable(store, monkeypatch):
    wanted = keys(3)
    seen = []

    class Interrupting:
        def insert(self, tag, place):
            seen.append(tag)
            if len(seen) == 2:
                raise KeyboardInterrupt
            inner.insert(tag, place)

        def __getattr__(self, name):
            return getattr(inner, name)

    inner = store._index
    monkeypatch.setattr(store, "_index", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        put(store, wanted, 4096)
    monkeypatch.setattr(store, "_index", inner)
    assert store.lookup(wanted) == [HIT, MISS, MISS]
    audit(store)
    assert put(store, wanted, 4096) == [Reserve.EXISTS, True, True]
    assert read(store, wanted, 4096) == [blob(k, 4096) for k in wanted]
    drain(store)


# --- pins ------------------------------------------------------------------------------------------------------


def test_a_pinned_frame_is_not_evicted(store):
    put(store, [key(0)], LARGE)
    frame = store.frames[key(0)]
    store.pin([frame, frame])
    put(store, keys(60, first=1), LARGE)
    assert read(store, [key(0)], LARGE) == [blob(key(0), LARGE)]
    store.unpin([frame])
    put(store, keys(60, first=100), LARGE)
    assert store.lookup([key(0)]) == [HIT]
    store.unpin([frame])
    put(store, keys(60, first=200), LARGE)
    assert store.lookup([key(0)]) == [MISS]
    drain(store)


def test_a_pinned_frame_outlives_a_reset_and_is_freed_by_the_last_unpin(store):
    put(store, keys(2), LARGE)
    frame = store.frames[key(0)]
    store.pin([frame])
    store.new_epoch(OTHER)
    assert store.reap() == 1
    assert store.abandon() == 0
    assert bytes(store.arena.buffer[frame.offset : frame.offset + LARGE]) == blob(key(0), LARGE)
    store.unpin([frame])
    assert store.reap() == 0
    assert store.stats()["orphaned_frames"] == 0
    drain(store)


def test_what_is_not_ready_is_not_pinned(store):
    (frame,) = store.reserve([key(1)], 4096)
    with pytest.raises(ValueError, match="frames must be ready"):
        store.pin([frame])
    store.abort([frame])
    drain(store)


def test_a_pinned_frame_that_a_worker_found_corrupt_goes_when_both_let_go(open_store):
    store, (frames,) = open_store()
    put(store, [key(1)], 4096)
    frame = store.frames[key(1)]
    store.pin([frame])
    store.lease([frame])
    frames.begin_read(frame.header, frame.generation)
    frames.finish_read(frame.header, frame.generation, ok=False)
    store.release([frame])
    assert store.lookup([key(1)]) == [MISS]
    assert store.counts["bad"] == 0
    store.unpin([frame])
    assert store.counts["bad"] == 1
    assert key(1) not in store.frames


def test_the_coldest_frames_come_in_the_order_in_which_they_would_go(store):
    put(store, keys(6), LARGE)
    store.touch([key(0), key(2)])
    assert [f.key for f in store.coldest(3)] == [key(1), key(3), key(4)]
    assert 0 < store.free_share() < 1
    drain(store)
