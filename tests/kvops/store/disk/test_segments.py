"""Segments and their slots: made under the quota, given up as a whole, and who goes first."""

import math
import os
import random

import pytest

from kvferry.kvops.store.disk import format as disk
from kvferry.kvops.store.disk import many
from kvferry.kvops.store.disk import segments as seg
from kvferry.kvops.store.disk import table as tbl
from kvferry.kvops.store.disk.segments import Segments
from kvferry.kvops.store.disk.slots import Slots, SlotSize
from kvferry.kvops.store.disk.table import State, Table

from .blobs import MIB, tag

SMALL, LARGE = SlotSize(8192, 4096), SlotSize(68 * 1024, 4096)
QUOTA = 64 * MIB


@pytest.fixture
def make(tmp_path, io):
    made = []

    def make(quota_bytes=QUOTA, **kwargs):
        kwargs = {"free_floor_bytes": 0, "durable": False, "read_only": False, **kwargs}
        segments = Segments(Slots(Table()), io, tmp_path, quota_bytes=quota_bytes, **kwargs)
        made.append(segments)
        return segments

    yield make
    for segments in made:
        segments.close()


def take(slots, slot_class, number):
    """Take a free slot for a blob; return its place, None if there is none."""
    answers = []
    many.list_saves(
        slots, {(4000, 1): slot_class}, [(tag(number), 4000)], 1, lambda: number + 1, answers
    )
    return answers[0] if answers else None


def publish(slots, place):
    many.publish(slots, [(place, b"")], {b"": 0}, 0)


def use(segments, place):
    """Hold a slot as a load does."""
    assert many.hold_ready(segments.slots, segments, [place.tag]) == [place]


def let_go(slots, *places):
    many.let_go(slots, places)


def fill(segments, size, count, first=0):
    """Publish *count* blobs of a size; return their places."""
    slots = segments.slots
    slot_class = slots.class_of(size)
    places = []
    for number in range(first, first + count):
        if not slot_class.open_segments:
            assert segments.grow(slot_class, born=1)
        places.append(take(slots, slot_class, number))
        publish(slots, places[-1])
    return places


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("quota", "size", "slots"),
    [
        pytest.param(1 << 40, SMALL, (256 * MIB) // 8192, id="never more than 256 MiB"),
        pytest.param(8 << 30, LARGE, (128 * MIB) // LARGE.slot_bytes, id="a 64th of the quota"),
        pytest.param(64 * MIB, SMALL, 2048, id="never less than 16 MiB"),
        pytest.param(1 << 40, SlotSize(200 * MIB, 4096), 4, id="four slots at least"),
    ],
)
def test_how_large_a_segment_is(make, quota, size, slots):
    assert make(quota).slots_wanted(size) == slots


def test_a_segment_that_no_quota_has_room_for_is_not_made(make):
    segments = make(64 * MIB)
    assert segments.slots_needed(SlotSize(30 * MIB, 4096)) == 2
    assert segments.slots_needed(SlotSize(65 * MIB, 4096)) == 0
    assert not segments.grow(segments.slots.class_of(SlotSize(65 * MIB, 4096)), 1)


def test_segments_are_made_until_the_quota_is_full(make, tmp_path):
    segments = make()
    slot_class = segments.slots.class_of(SMALL)
    while segments.grow(slot_class, born=7):
        used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
        assert used <= segments.cost_bytes <= QUOTA
    # the last one may be smaller, so that not much is left over
    assert used > QUOTA - 6 * MIB
    assert names(tmp_path) == [f"seg-{n:08x}.blobs" for n in range(4)]
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        block = disk.read_superblock(path.read_bytes()[:4096])
        assert (block.born, block.file_bytes) == (7, path.stat().st_size)
        # no holes: the disk can't be full later
        assert path.stat().st_blocks * 512 >= block.file_bytes


def test_the_journal_may_use_up_the_room_of_a_segment(make):
    segments = make()
    room = segments.room_bytes
    segments.journal_bytes = seg.JOURNAL_FIXED_BYTES
    assert segments.room_bytes == room
    segments.journal_bytes += 1000
    assert segments.room_bytes == room - 1000


def test_what_must_stay_free_on_the_disk_stays_free(make, tmp_path):
    free = os.statvfs(tmp_path)
    segments = make(free_floor_bytes=free.f_bavail * free.f_frsize)
    assert not segments.grow(segments.slots.class_of(SMALL), 1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["open", "allocate", "write_now", "sync", "rename", "sync_folder"])
def test_a_segment_that_fails_leaves_nothing(make, tmp_path, io, call):
    segments = make(durable=True)
    slot_class = segments.slots.class_of(SMALL)
    room = segments.room_bytes
    with (
        io.fault("io_error", match=lambda c: c.kind == call) as fault,
        pytest.raises(OSError, match="Input/output error"),
    ):
        segments.grow(slot_class, 1)
    assert fault.hits == 1
    assert (names(tmp_path), segments.room_bytes, segments.slots.total) == ([], room, 0)
    assert segments.grow(slot_class, 1)


def test_a_segment_that_is_dropped_gives_its_number_and_its_room_back(make, tmp_path, io):
    segments = make()
    room = segments.room_bytes
    fill(segments, SMALL, 10)
    (segment,) = segments.slots.segments.values()
    with (
        io.fault("io_error", match=lambda c: c.kind == "unlink"),
        pytest.raises(OSError, match="Input/output error"),
    ):
        segments.drop(segment)
    assert segments.slots.table.contains(tag(3))
    segments.drop(segment)
    assert (segments.room_bytes, segments.evicted, names(tmp_path)) == (room, 10, [])
    assert (segments.slots.blobs, segments.slots.blob_bytes, segments.slots.total) == (0, 0, 0)
    assert not segments.slots.table.contains(tag(3))
    fill(segments, LARGE, 1)
    assert names(tmp_path) == ["seg-00000000.blobs"]


def test_only_so_many_files_are_open(make, io, monkeypatch):
    monkeypatch.setattr(seg, "MAX_OPEN_FILES", 2)
    monkeypatch.setattr(seg, "MIN_SEGMENT_BYTES", MIB)
    segments = make()
    slot_class = segments.slots.class_of(LARGE)
    for _ in range(5):
        assert segments.grow(slot_class, 1)
    assert len(io.open_files) == 2
    all_of_them = list(segments.slots.segments.values())
    all_of_them[0].held = 1
    fds = [segments.fd(segment) for segment in all_of_them]
    assert segments.fd(all_of_them[0]) == fds[0]
    assert len(io.open_files) == 2


# --- who goes first -----------------------------------------------------------------------------------------------


def victims(slots, slot_class, count):
    found = []
    for _ in range(count):
        entry = slots.victim(slot_class)
        found.append(entry)
        if entry >= 0:
            slots.unlist(entry)
    return found


def test_the_clock_takes_the_oldest_and_spares_what_was_used_once(make):
    segments = make()
    slots = segments.slots
    places = fill(segments, SMALL, 6)
    entries = [place.entry for place in places]
    for place in places[:3]:
        use(segments, place)
        let_go(slots, place)
    slots.hold(entries[3])
    assert victims(slots, slots.class_of(SMALL), 2) == entries[4:]
    # round again: the chances are used up, one is held
    assert victims(slots, slots.class_of(SMALL), 4) == [*entries[:3], -1]
    let_go(slots, places[3])
    assert victims(slots, slots.class_of(SMALL), 2) == [entries[3], -1]


def test_what_is_written_or_in_quarantine_is_no_victim(make):
    segments = make()
    slots = segments.slots
    bad, ready = fill(segments, SMALL, 2)
    assert take(slots, slots.class_of(SMALL), 99)
    slots.quarantine(bad.entry, 3)
    assert victims(slots, slots.class_of(SMALL), 2) == [ready.entry, -1]


def test_heat_is_the_mean_of_the_last_uses(make):
    segments = make()
    slots = segments.slots
    cold = fill(segments, SMALL, 4)
    warm = fill(segments, LARGE, 4, first=10)
    other = slots.class_of(SlotSize(16384, 4096))
    assert [s.size for s in slots.coldest(other)] == [SMALL, LARGE]
    for place in cold:
        use(segments, place)
    assert [s.size for s in slots.coldest(other)] == [LARGE]
    let_go(slots, *cold)
    assert [s.size for s in slots.coldest(other)] == [LARGE, SMALL]
    for segment in slots.segments.values():
        ticks = [slots.last_use(e) for e in slots.entries_in(segment, State.READY)]
        assert segment.heat == sum(ticks) / len(ticks)
    slots.unlist(warm[0].entry)
    slots.quarantine(warm[1].entry, 1)
    ticks = [slots.last_use(place.entry) for place in warm[2:]]
    assert slots.of(warm[0].entry).heat == sum(ticks) / 2


def test_segments_are_taken_over_only_if_that_is_enough_and_they_are_colder(make):
    segments = make()
    slots = segments.slots
    while segments.grow(slots.class_of(SMALL), 1):
        pass
    places = fill(segments, SMALL, slots.total)
    large = slots.class_of(SlotSize(20 * MIB, 4096))
    count = len(slots.segments)
    assert not segments.take_over(large, colder_than=0.0)
    assert not segments.take_over(slots.class_of(SlotSize(80 * MIB, 4096)), math.inf)
    slots.hold(places[0].entry)
    # what is left is not enough
    assert not segments.take_over(large, math.inf)
    let_go(slots, places[0])
    assert len(slots.segments) == count
    assert segments.take_over(large, math.inf)
    assert segments.grow(large, 1)


def test_counts_hold_after_any_life(make):
    segments = make()
    slots = segments.slots
    chance = random.Random(4)
    slot_class = slots.class_of(SMALL)
    ready, saving, held, bad, doomed = [], [], [], [], []
    segments.grow(slot_class, 1)
    for number in range(3000):
        act = chance.choice("bbpahlurq")
        if act == "b" and slot_class.open_segments:
            saving.append(take(slots, slot_class, number))
        elif act == "p" and saving:
            ready.append(saving.pop(chance.randrange(len(saving))))
            publish(slots, ready[-1])
        elif act == "a" and saving:
            slots.abort(saving.pop(chance.randrange(len(saving))).entry)
        elif act == "h" and ready:
            held.append(chance.choice(ready))
            use(segments, held[-1])
        elif act == "l" and held:
            place = held.pop(chance.randrange(len(held)))
            let_go(slots, place)
            if place in doomed and place not in held:
                doomed.remove(place)
        elif act == "u" and ready:
            place = ready.pop(chance.randrange(len(ready)))
            slots.unlist(place.entry)
            if place in held:
                doomed.append(place)
        elif act == "q" and ready:
            bad.append(ready.pop(chance.randrange(len(ready))))
            slots.quarantine(bad[-1].entry, 1)
        elif act == "r" and bad:
            assert slots.release(bad[-1].entry) is (bad[-1] not in held)
            if bad[-1] not in held:
                bad.pop()
        (segment,) = slots.segments.values()
        busy = len(ready) + len(saving) + len(bad) + len(doomed)
        assert (segment.ready, segment.quarantined) == (len(ready), len(bad))
        assert segment.held == len(held) + len(saving)
        assert segment.free == segment.block.slots - busy
        assert (slots.blobs, slots.quarantined) == (len(ready), len(bad))
        assert segment.ticks == sum(slots.last_use(place.entry) for place in ready)
    # the chain of free slots has each of them once
    slots_left = set()
    for number in range(segment.free):
        slots_left.add(take(slots, slot_class, 10_000 + number).entry)
    assert take(slots, slot_class, 20_000) is None
    taken = {place.entry for place in (*ready, *saving, *bad, *doomed)}
    everything = {tbl.entry_of(0, n) for n in range(segment.block.slots)}
    assert slots_left == everything - taken
