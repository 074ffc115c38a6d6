"""The index in memory against a dictionary, beside a thread that looks, and by its size."""

import random
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kvops.store.disk import table as tbl
from kvferry.kvops.store.disk.table import State, Table

SLOTS = 64


def put(table, entry, tag, state=State.READY, generation=1, size=10):
    rows, at = table.row(entry)
    rows[at + tbl.FACTS] = tbl.facts_of(5, 1, 0, state)
    rows[at + tbl.GENERATION] = generation
    rows[at + tbl.BLOB_BYTES] = size
    rows[at + tbl.TAG_LO], rows[at + tbl.TAG_HI] = tag
    table.insert(entry)


def drop(table, entry):
    table.remove(entry)
    rows, at = table.row(entry)
    rows[at + tbl.FACTS] = State.FREE
    rows[at + tbl.TAG_LO] = 0


# tags that meet at the same places, share halves, and differ in bits that the index does not keep
LOWS = [0, 1, 2, 1 << 20, (1 << 20) + 1, 1023, 1 << 63, (1 << 63) + 1, (1 << 64) - 1, 1 << 39]
TAGS = [(low, high) for low in LOWS for high in (0, 1, (1 << 64) - 1)]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(TAGS), st.booleans()), max_size=120), st.integers(0, 40))
def test_it_finds_what_a_dictionary_finds(steps, rebuild_at):
    table, model, free = Table(), {}, []
    for segment in (0, 3, tbl.ENTRY_MASK >> tbl.SLOT_BITS):
        table.add_segment(segment, SLOTS)
        free += [tbl.entry_of(segment, slot) for slot in range(SLOTS)]
    random.Random(len(steps)).shuffle(free)
    for number, (tag, is_save) in enumerate(steps):
        if tag in model:
            entry = model.pop(tag)
            drop(table, entry)
            free.append(entry)
        elif is_save:
            model[tag] = free.pop()
            put(table, model[tag], tag, size=1 + number)
        if number == rebuild_at:
            table.rebuild()
        assert table.listed == len(model)
        for other in TAGS:
            assert table.find(other) == model.get(other, -1)
            assert table.contains(other) == (other in model)


def test_only_what_is_ready_can_be_loaded():
    table = Table()
    table.add_segment(0, 8)
    for slot, state in enumerate(State):
        put(table, slot, (slot, 1), state)
    assert [table.blob_bytes((slot, 1)) for slot in range(5)] == [0, 0, 10, 0, 0]
    assert table.find((State.SAVING, 1)) == State.SAVING


def test_it_grows_and_forgets_and_deleted_places_do_not_pile_up():
    table = Table()
    table.add_segment(0, 1 << 16)
    chance = random.Random(1)
    tags = [(chance.getrandbits(64), chance.getrandbits(64)) for _ in range(1 << 16)]
    for entry, tag in enumerate(tags[:3000]):
        put(table, entry, tag)
    size = table.num_bytes
    # the same number of blobs, always others
    for entry, tag in enumerate(tags[3000:20_000], start=3000):
        drop(table, entry - 3000)
        put(table, entry, tag)
    assert table.num_bytes == size
    assert table.listed == 3000
    assert not any(table.contains(tag) for tag in tags[:17_000])
    assert all(table.contains(tag) for tag in tags[17_000:20_000])
    table.rebuild()
    assert all(table.find(tag) == entry for entry, tag in enumerate(tags[17_000:20_000], 17_000))


def test_a_segment_goes_with_its_rows():
    table = Table()
    for segment in (1, 2):
        table.add_segment(segment, 4)
        put(table, tbl.entry_of(segment, 3), (segment, segment))
    drop(table, tbl.entry_of(1, 3))
    table.drop_segment(1)
    # smaller than the one before it of that number
    table.add_segment(1, 1)
    assert not table.contains((1, 1))
    assert table.contains((2, 2))
    table.rebuild()
    assert table.listed == 1


def test_a_reader_without_a_lock_never_misses_what_stays():
    table = Table()
    table.add_segment(0, 4096)
    chance = random.Random(2)
    # all meet in few places, so that every search is long
    tags = [(chance.getrandbits(4) | chance.getrandbits(20) << 44, n) for n in range(400)]
    for entry, tag in enumerate(tags[:100]):
        put(table, entry, tag)
    stop = threading.Event()
    wrong = []

    def look():
        while not stop.is_set():
            wrong.extend(tag for tag in tags[:100] if not table.contains(tag))
            # may be there or not, but must not end badly
            any(table.contains(tag) for tag in tags[100:])

    reader = threading.Thread(target=look, name="kvferry-test-reader")
    reader.start()
    try:
        for turn in range(12):
            for entry, tag in enumerate(tags[100:], start=100):
                put(table, entry, tag)
            table.add_segment(1, 64)
            put(table, tbl.entry_of(1, 63), (7, 7))
            table.rebuild()
            drop(table, tbl.entry_of(1, 63))
            table.drop_segment(1)
            for entry in range(100, 400):
                drop(table, entry)
            if turn % 3 == 0:
                table.rebuild()
    finally:
        stop.set()
        reader.join()
    assert not wrong


def test_a_blob_costs_at_most_ninety_bytes():
    table = Table()
    slots = 1 << 15
    chance = random.Random(3)
    for segment in range(3):
        table.add_segment(segment, slots)
        columns = table.columns(segment)
        for word in (tbl.TAG_LO, tbl.TAG_HI):
            columns[:, word] = [chance.getrandbits(64) for _ in range(slots)]
        columns[:, tbl.FACTS] = State.READY
    table.rebuild()
    assert table.listed == 3 * slots
    assert table.num_bytes <= 90 * 3 * slots
