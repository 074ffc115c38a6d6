"""The index against a dictionary, through growth, deletions and crowds; and its readers in other processes."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.index import MAX_LOAD, Index, Reader

from .chunks import KIB, MIB, NAMESPACE, OTHER, audit, blob, fill, is_frame, key, keys, put, read

SMALL, LARGE = 16, 64
FIRST, SECOND = 4096, 8192


def fake_arena(slots=SMALL):
    memory = memoryview(bytearray(16 * KIB))
    words = memory.cast("Q")
    words[fmt.INDEX_OFFSET_WORD], words[fmt.INDEX_SLOTS_WORD] = FIRST, slots
    return SimpleNamespace(buffer=memory, words=words, arena_bytes=16 * KIB)


class AgainstADictionary(RuleBasedStateMachine):
    """Few slots and few tags, so that searches collide, wrap around and step over deleted slots."""

    def __init__(self):
        super().__init__()
        self.arena = fake_arena()
        self.index = Index(self.arena)
        self.entries = set()
        self.next_place = 2

    def found(self, tag):
        reader = Reader(self.arena)
        base = self.arena.words[fmt.INDEX_OFFSET_WORD] // 8
        return set(reader._places(tag, base, self.arena.words[fmt.INDEX_SLOTS_WORD] - 1))

    @rule(tags=st.lists(st.integers(2, 40), min_size=1, max_size=6))
    def insert(self, tags):
        for tag in tags:
            if self.index.is_full:
                return
            self.index.insert(tag, self.next_place)
            self.entries.add((tag, self.next_place))
            self.next_place += 1

    @rule(pick=st.randoms(use_true_random=False), count=st.integers(1, 4))
    def remove(self, pick, count):
        for entry in pick.sample(sorted(self.entries), min(count, len(self.entries))):
            assert self.index.remove(*entry)
            self.entries.remove(entry)

    @rule(tag=st.integers(2, 40))
    def remove_what_is_not_there(self, tag):
        assert not self.index.remove(tag, 1)

    @precondition(lambda self: not self.index.is_full)
    @rule(count=st.integers(1, 3))
    def promise(self, count):
        self.index.promise(count)

    @precondition(lambda self: self.index.promised)
    @rule()
    def keep_a_promise(self):
        self.index.promise(-1)

    @rule(grow=st.booleans(), often=st.integers(0, 4))
    def rebuild(self, grow, often):
        if often:
            return
        place = SECOND if self.index.offset == FIRST else FIRST
        slots = LARGE if grow else max(SMALL, self.index.slots)
        self.index.rebuild(sorted(self.entries), place if grow else self.index.offset, slots)

    @invariant()
    def says_what_the_dictionary_says(self):
        index = self.index
        for tag in range(2, 41):
            assert self.found(tag) == {place for t, place in self.entries if t == tag}
        assert index.used == len(self.entries)
        tags = [self.arena.words[index.offset // 8 + 2 * n] for n in range(index.slots)]
        assert tags.count(1) == index.deleted
        assert tags.count(0) >= 1, "a search for what is not there would not end"
        assert (
            index.room == int(index.slots * MAX_LOAD) - index.used - index.deleted - index.promised
        )


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def test_a_deleted_slot_before_an_empty_one_is_cleared():
    arena = fake_arena()
    index = Index(arena)
    for place in (10, 11, 12):
        index.insert(5, place)
    index.remove(5, 10)
    index.remove(5, 11)
    assert index.deleted == 2
    index.remove(5, 12)
    assert index.deleted == index.used == 0
    assert not any(arena.words[FIRST // 8 + 2 * n] for n in range(SMALL))


def test_a_rebuild_that_was_cut_short_hides_nothing_for_ever(open_store):
    store, _ = open_store()
    put(store, keys(3), 4096)
    store.arena.words[fmt.INDEX_SEQUENCE_WORD] += 1
    assert Reader(store.arena).lookup(NAMESPACE, keys(3)) == [None] * 3
    store._grow_index()
    assert None not in Reader(store.arena).lookup(NAMESPACE, keys(3))
    assert store.arena.words[fmt.INDEX_SEQUENCE_WORD] % 2 == 0


# --- in the arena ----------------------------------------------------------------------------------------------


def test_grows_with_the_store(open_store):
    """About 4000 frames fit the first index only up to its load; more make it move, into slabs of its own."""
    store, _ = open_store(arena_bytes=64 * MIB)
    wanted = keys(9_000)
    assert put(store, wanted, 512) == [True] * 9_000
    assert store._index.slots >= 2 * fmt.INDEX_SLOTS_MIN
    assert store._index_span is not None
    audit_sample(store, wanted)
    assert all(store.delete(wanted[::2]))
    assert put(store, wanted[::2], 512) == [True] * 4_500
    audit_sample(store, wanted)


def audit_sample(store, wanted):
    reader = Reader(store.arena)
    frames = store.frames
    assert reader.lookup(NAMESPACE, wanted) == [
        (frames[k].header, frames[k].offset, frames[k].generation) for k in wanted
    ]
    assert read(store, wanted[::500], 512) == [blob(k, 512) for k in wanted[::500]]


def test_deletions_make_it_new_in_place(open_store):
    store, _ = open_store()
    for first in range(0, 12_000, 200):
        batch = keys(200, first)
        assert put(store, batch, 512) == [True] * 200
        assert all(store.delete(batch))
    assert store._index.slots == fmt.INDEX_SLOTS_MIN
    assert store._index.offset < store.arena.data
    audit(store)


def test_reservations_leave_room_for_their_commits(open_store):
    """All pass the fullness check before any is entered: each is room that is promised."""
    store, (frames,) = open_store(arena_bytes=32 * MIB)
    reserved = store.reserve(keys(6_000), 4096)
    assert all(is_frame(frame) for frame in reserved)
    assert store._index.slots >= 6_000
    for frame in reserved:
        frames.begin_write(frame.header, frame.generation)
        frames.finish_write(frame.header, frame.generation)
    assert store.commit(reserved[1::2]) == [True] * 3_000
    store.abort(reserved[::2])
    assert store._index.promised == 0
    audit(store)


def test_a_store_without_slabs_for_a_larger_index(open_store):
    """Frames that are held everywhere leave no slab for the index: what it has no slot for finds no room."""
    store, _ = open_store(arena_bytes=24 * MIB)
    answers = store.reserve(keys(6_000), 4096)
    given = [answer for answer in answers if is_frame(answer)]
    assert len(given) in range(fmt.INDEX_SLOTS_MIN // 2, 6_000)
    assert store._index.used + store._index.promised < store._index.slots
    store.abort(given)
    audit(store)


def test_readers_miss_what_is_not_ready(open_store):
    store, (frames,) = open_store()
    reader = Reader(store.arena)
    (frame,) = store.reserve([key(1)], 4096)
    assert reader.lookup(NAMESPACE, [key(1)]) == [None]
    fill(frames, frame)
    assert reader.lookup(NAMESPACE, [key(1)]) == [None]
    store.commit([frame])
    expected = (frame.header, frame.offset, frame.generation)
    assert reader.lookup(NAMESPACE, [key(2), key(1), key(1, group=1)]) == [None, expected, None]
    assert reader.lookup(OTHER, [key(1)]) == [None]
    frames.finish_read(frame.header, frame.generation, ok=False)
    assert reader.lookup(NAMESPACE, [key(1)]) == [None]


def test_readers_tell_keys_of_one_tag_apart(open_store, monkeypatch):
    """Tags are 64 bits of a fast hash: the whole key in the header decides."""
    store, _ = open_store()
    monkeypatch.setattr("kvferry.kvops.store.putget.xxhash.xxh3_64_intdigest", lambda _: 77)
    wanted = [*keys(20), *keys(20, group=1), key(1, hash_bytes=16)]
    assert put(store, wanted, 4096) == [True] * 41
    found = Reader(store.arena).lookup(NAMESPACE, [*wanted, key(99)])
    assert found[:-1] == [
        (store.frames[k].header, store.frames[k].offset, store.frames[k].generation) for k in wanted
    ]
    assert found[-1] is None
    assert store.delete(wanted) == [True] * 41
    audit(store)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        pytest.param(fmt.INDEX_OFFSET_WORD, 16 * MIB - 4096, id="place-of-another-size"),
        pytest.param(fmt.INDEX_SLOTS_WORD, 1 << 40, id="size-of-another-place"),
        pytest.param(fmt.INDEX_SLOTS_WORD, 0, id="no-slots"),
        pytest.param(fmt.INDEX_OFFSET_WORD, (1 << 64) - 8, id="beyond-everything"),
    ],
)
def test_readers_survive_a_place_and_size_that_do_not_belong_together(open_store, word, value):
    store, _ = open_store()
    put(store, keys(3), 4096)
    store.arena.words[word] = value
    assert Reader(store.arena).lookup(NAMESPACE, keys(3)) == [None] * 3


def test_readers_survive_an_entry_that_points_nowhere(open_store):
    store, _ = open_store()
    put(store, keys(1), 4096)
    words, index = store.arena.words, store._index
    at = next(n for n in range(index.slots) if words[index.offset // 8 + 2 * n])
    for place in ((1 << 64) - 1, 0, (16 * MIB - 64) // 64 << 24):
        words[index.offset // 8 + 2 * at + 1] = place
        assert Reader(store.arena).lookup(NAMESPACE, keys(1)) == [None]


def test_readers_in_another_process_never_see_a_torn_frame(storm):
    """A writer spins through put, evict, delete, reset and index growth; every blob found is whole and right."""
    assert "0 wrong" in storm("storm_index.py", "--runs", 2_000)
