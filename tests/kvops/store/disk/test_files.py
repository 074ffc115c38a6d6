"""Blob files as a whole: saved, found, held, given up under the quota, and found again."""

import os
import random
import threading

import pytest

from kvferry.kvops.errors import DiskBusyError, DiskError
from kvferry.kvops.store.disk import book
from kvferry.kvops.store.disk import folder as folders
from kvferry.kvops.store.disk import format as disk
from kvferry.kvops.store.disk import segments as seg
from kvferry.kvops.store.disk.files import Place, Refusal

from .blobs import (
    MIB,
    NAMESPACE,
    QUOTA,
    data,
    disk_bytes,
    key,
    note,
    read,
    save,
    slot_bytes,
    tag,
    write,
)

LARGE = 60_000
ROOMY = 64 * MIB
"""Room for segments of several slot sizes."""


def test_what_was_saved_is_loaded_bit_for_bit_now_and_after_opening_again(open_files, io):
    files = open_files(ROOMY)
    save(files, io, 1, 2)
    save(files, io, 3, num_bytes=LARGE)
    save(files, io, 4, num_bytes=LARGE, parts=4)
    for _ in range(2):
        assert read(files, io, 1) == data(1)
        assert read(files, io, 2) == data(2)
        assert read(files, io, 3) == data(3, LARGE)
        assert read(files, io, 4) == data(4, LARGE, 4)
        assert read(files, io, 5) == "miss"
        assert files.blob_bytes(tag(3)) == LARGE
        assert files.blob_bytes(tag(5)) == 0
        assert files.stats()["blobs"] == 4
        files.close()
        files = open_files(ROOMY)
    assert files.stats()["recovered"] == 4
    assert files.stats()["discarded_records"] == 0


def test_nothing_is_found_before_it_is_published(open_files):
    files = open_files()
    place = files.begin_save(tag(1), 3000, 1)
    assert (place.segment, place.slot, place.offset, place.header_bytes) == (0, 0, 4096, 4096)
    assert files.begin_save(tag(1), 3000, 1) is Refusal.PENDING
    assert not files.contains(tag(1))
    assert files.begin_load(tag(1)) is None
    assert files.remove([tag(1)]) == [False]
    files.end_save([(place, NAMESPACE)])
    assert files.contains(tag(1))
    assert files.begin_save(tag(1), 3000, 1) is Refusal.EXISTS


def test_an_aborted_save_leaves_no_trace(open_files):
    files = open_files()
    place = files.begin_save(tag(1), 3000, 1)
    files.abort_save(place)
    again = files.begin_save(tag(1), 3000, 1)
    assert again.entry == place.entry
    assert again.generation > place.generation
    for wrong in (files.abort_save, lambda p: files.end_save([(p, NAMESPACE)])):
        with pytest.raises(ValueError, match="place must be one that begin_save returned"):
            wrong(place)
    files.abort_save(again)
    assert files.stats()["held_slots"] == 0


def test_generations_never_come_twice(open_files):
    files = open_files()
    seen = set()
    for _ in range(3):
        for number in range(3):
            place = files.begin_save(tag(number), 3000, 1)
            assert place.generation not in seen
            seen.add(place.generation)
            files.abort_save(place)
        files.close()
        files = open_files()


@pytest.mark.parametrize(("blob_bytes", "parts"), [(0, 1), (-1, 1), (100, 0), (100, 1025)])
def test_what_can_not_be_is_refused(open_files, blob_bytes, parts):
    with pytest.raises(ValueError, match="must be"):
        open_files().begin_save(tag(1), blob_bytes, parts)


def test_a_blob_that_is_removed_is_gone_for_good(open_files, io):
    files = open_files()
    save(files, io, 1, 2)
    assert files.remove([tag(2), tag(3), tag(1)]) == [True, False, True]
    assert not files.contains(tag(1))
    files.close()
    assert open_files().stats()["blobs"] == 0


def test_a_blob_that_is_removed_while_it_is_read_keeps_its_slot_until_then(open_files, io):
    files = open_files()
    (saved,) = save(files, io, 1)
    place = files.begin_load(tag(1))
    again = files.begin_load(tag(1))
    assert files.remove([tag(1)]) == [True]
    other = files.begin_save(tag(2), 3000, 1)
    assert other.entry != saved.entry
    files.end_load(place)
    assert files.begin_save(tag(3), 3000, 1).entry != saved.entry
    files.end_load(again)
    assert files.begin_save(tag(4), 3000, 1).entry == saved.entry


# --- quota --------------------------------------------------------------------------------------------------------


def test_ten_times_the_quota_fits_in_at_every_step(open_files, folder):
    files = open_files()
    number = written = 0
    while written < 10 * QUOTA:
        size = (3000, LARGE, 1_000_000)[number // 2000 % 3]
        note(files, *range(number, number + 40), num_bytes=size)
        assert disk_bytes(folder) <= QUOTA
        number += 40
        written += 40 * (size + 4096)
    stats = files.stats()
    assert stats["used_bytes"] <= QUOTA
    assert stats["used_bytes"] > QUOTA * 0.7
    assert stats["evicted"] == number - stats["blobs"]
    assert stats["handed_over_segments"] > 1
    # what was just saved is there
    assert all(files.contains(tag(n)) for n in range(number - 5, number))
    files.close()
    assert open_files().stats()["blobs"] == stats["blobs"]


def test_the_journal_stays_small_whatever_is_overwritten(open_files, folder, io):
    files = open_files()
    for number in range(0, 8_000, 50):
        note(files, *range(number, number + 50), num_bytes=LARGE)
    stats = files.stats()
    assert stats["rewrites"] > 1
    assert stats["journal_bytes"] <= seg.JOURNAL_FIXED_BYTES + 128 * stats["slots"]
    assert disk_bytes(folder) <= QUOTA
    files.remove([tag(number) for number in range(8_000)])
    # whoever is idle does not wait until it must be
    files.tidy()
    assert files.stats()["rewrites"] == stats["rewrites"] + 1
    assert files.stats()["journal_bytes"] == 64
    files.tidy()
    assert files.stats()["rewrites"] == stats["rewrites"] + 1


def test_a_journal_that_can_not_be_rewritten_keeps_to_its_share_and_then_refuses(
    open_files, io, folder, caplog
):
    files = open_files()
    numbers = iter(range(100_000))
    with io.fault("io_error", match=lambda c: c.kind == "rename" and "index" in c.path.name):
        for _ in range(30):
            note(files, next(numbers), num_bytes=1_000_000)
        limit = seg.JOURNAL_FIXED_BYTES + seg.JOURNAL_SLOT_BYTES * files.stats()["slots"]
        while files.stats()["journal_bytes"] + 64 <= limit:
            note(files, next(numbers), num_bytes=1_000_000)
        files.tidy()
        last = next(numbers)
        place = files.begin_save(tag(last), 1_000_000, 1)
        with pytest.raises(OSError, match="Input/output"):
            files.end_save([(place, NAMESPACE)])
        assert not files.contains(tag(last))
        assert files.contains(tag(last - 1))
        assert files.stats()["journal_bytes"] <= limit
        assert "could not be rewritten" in caplog.text
        assert disk_bytes(folder) <= QUOTA
    files.end_save([(place, NAMESPACE)])
    assert files.contains(tag(last))
    assert files.stats()["rewrites"] == 1


def test_held_slots_are_never_given_up(open_files, io):
    files = open_files()
    numbers = range(30)
    for number in numbers:
        save(files, io, number, num_bytes=1_000_000)
    kept = [n for n in numbers if files.contains(tag(n))]
    loads = {n: files.begin_load(tag(n)) for n in kept[:-2]}
    for number in range(1000, 1030):
        save(files, io, number, num_bytes=1_000_000)
        # the other size wants a segment
        assert isinstance(files.begin_save(tag(5000), 3000, 1), Refusal)
    for number, place in loads.items():
        slot = io.read_now(place.fd, 4096 + 1_003_520, place.offset)
        page = disk.read_header_page(slot[:4096])
        assert (page.generation, page.key) == (place.generation, key(number))
        assert slot[4096:] == slot_bytes(number, 1, 1_000_000)[4096:]
        assert files.contains(tag(number))
        files.end_load(place)
    assert isinstance(files.begin_save(tag(5000), 3000, 1), Place)


def test_no_room_when_everything_is_held_and_room_again_when_one_is_let_go(open_files):
    files = open_files(8 * MIB)
    places = []
    while isinstance(place := files.begin_save(tag(len(places)), 1_000_000, 1), Place):
        places.append(place)
    assert place is Refusal.NO_ROOM
    assert 4 <= len(places) <= 8
    assert files.begin_save(tag(77), 1_000_000, 1) is Refusal.NO_ROOM
    assert files.begin_save(tag(78), 3000, 1) is Refusal.NO_ROOM
    files.abort_save(places.pop())
    assert isinstance(files.begin_save(tag(77), 1_000_000, 1), Place)


def test_a_blob_larger_than_the_quota_is_no_room(open_files):
    assert open_files(8 * MIB).begin_save(tag(1), 9 * MIB, 1) is Refusal.NO_ROOM


def test_a_quota_too_small_for_anything_is_an_error(open_files):
    with pytest.raises(
        DiskError, match=r"quota must be at least 8388608 bytes \(8 MiB\); got 1000"
    ):
        open_files(1000)


def test_a_smaller_quota_takes_effect_at_opening(open_files, folder, io):
    files = open_files(ROOMY)
    for size in (LARGE, 1_000_000):
        for number in range(400 if size == LARGE else 20):
            note(files, size + number, num_bytes=size)
    files.close()
    files = open_files(QUOTA)
    assert disk_bytes(folder) <= QUOTA
    stats = files.stats()
    assert 0 < stats["blobs"] < stats["recovered"]
    note(files, *range(300), num_bytes=LARGE)
    assert disk_bytes(folder) <= QUOTA


def test_a_free_floor_stops_growth_and_not_turnover(open_files, folder):
    files = open_files(ROOMY)
    note(files, 1)
    files.close()
    free = os.statvfs(folder)
    files = open_files(ROOMY, free_floor_bytes=free.f_bavail * free.f_frsize)
    note(files, *range(100, 3000))
    assert files.stats()["segments"] == 1
    assert files.stats()["evicted"] > 800


# --- the disk fails -----------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_reported_once_and_then_made_do_with(open_files, io, folder):
    files = open_files(ROOMY)
    count = 0
    while files.stats()["segments"] < 2:
        note(files, count)
        count += 1
    while files.stats()["free_slots"]:
        note(files, count)
        count += 1
    with io.fault("no_space", match=lambda c: c.kind == "allocate") as fault:
        with pytest.raises(OSError, match="No space"):
            files.begin_save(tag(90_000), 3000, 1)
        note(files, *range(100_000, 100_060))
        assert fault.hits == 1
        # a size that has nothing to give up finds out for itself, each time
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                files.begin_save(tag(90_001), LARGE, 1)
    assert files.stats()["segments"] == 2
    assert not list(folder.glob("*.tmp"))
    note(files, 90_001, num_bytes=LARGE)


@pytest.mark.parametrize("sync", ["never", "batch", "always"])
@pytest.mark.parametrize("call", ["write_now", "sync"])
def test_a_failed_publish_publishes_nothing_and_can_be_tried_again(
    open_files, io, monkeypatch, sync, call
):
    if sync == "never" and call == "sync":
        pytest.skip("it never syncs")
    monkeypatch.setattr(book, "BATCH_S", 0.0)
    files = open_files(sync=sync)
    save(files, io, 1, 2)
    places = [files.begin_save(tag(n), 3000, 1) for n in (3, 4, 5)]
    for number, place in zip((3, 4, 5), places, strict=True):
        write(io, place, number)
    saved = [(place, NAMESPACE) for place in places[:2]]
    with io.fault("io_error", match=lambda c: c.kind == call) as fault:
        with pytest.raises(OSError, match="Input/output"):
            files.end_save(saved)
        assert fault.hits == 1
    assert [files.contains(tag(n)) for n in (1, 2, 3, 4)] == [True, True, False, False]
    assert files.begin_save(tag(3), 3000, 1) is Refusal.PENDING
    files.abort_save(places[2])
    files.end_save(saved)
    files.close()
    files = open_files()
    assert [read(files, io, n) for n in (1, 3, 4)] == [data(1), data(3), data(4)]
    assert files.stats()["blobs"] == 4


def test_always_syncs_data_before_records_and_batch_puts_it_off(open_files, io, monkeypatch):
    calls = []
    real = io.inner.sync, io.inner.write_now
    monkeypatch.setattr(
        io.inner, "sync", lambda fd: calls.append(("sync", name(fd))) or real[0](fd)
    )
    monkeypatch.setattr(
        io.inner, "write_now",
        lambda fd, data, at: calls.append(("write", name(fd))) or real[1](fd, data, at),
    )  # fmt: skip

    def name(fd):
        return io.open_files[fd].name.split("-")[0]

    files = open_files(sync="always")
    place = files.begin_save(tag(1), 3000, 1)
    calls.clear()
    files.end_save([(place, NAMESPACE)])
    assert calls == [("sync", "seg"), ("write", "index"), ("sync", "index")]
    files.close()
    files = open_files(sync="batch")
    monkeypatch.setattr(book, "BATCH_S", 3600.0)
    calls.clear()
    note(files, 2)
    note(files, 3)
    files.sync_if_due()
    assert calls == [("write", "index")] * 2
    monkeypatch.setattr(book, "BATCH_S", 0.0)
    note(files, 4)
    assert calls[2:] == [("write", "index"), ("sync", "seg"), ("sync", "index")]
    monkeypatch.setattr(book, "BATCH_S", 3600.0)
    note(files, 5)
    monkeypatch.setattr(book, "BATCH_S", 0.0)
    files.sync_if_due()
    assert calls[-2:] == [("sync", "seg"), ("sync", "index")]
    count = len(calls)
    files.sync_if_due()
    assert len(calls) == count
    files.close()
    files = open_files(sync="never")
    calls.clear()
    note(files, *range(10, 20))
    files.close()
    assert not [call for call in calls if call[0] == "sync"]


def test_a_removal_that_can_not_be_written_goes_with_the_next_append(open_files, io):
    files = open_files()
    save(files, io, 1, 2)
    with io.fault("io_error"), pytest.raises(OSError, match="Input/output"):
        files.remove([tag(1)])
    assert not files.contains(tag(1))
    # in the other slot: a put into the same one would say it all
    save(files, io, 3)
    save(files, io, 4)
    files.close()
    files = open_files()
    assert [files.contains(tag(n)) for n in (1, 2, 3, 4)] == [False, True, True, True]


def test_an_unreadable_segment_holds_nothing(open_files, io, monkeypatch):
    files = open_files(ROOMY, sync="always")
    save(files, io, 1)
    monkeypatch.setattr(seg, "MAX_OPEN_FILES", 1)
    save(files, io, 2, num_bytes=LARGE)
    with io.fault("io_error", match=lambda c: c.kind == "open"):
        with pytest.raises(OSError, match="Input/output"):
            files.begin_load(tag(1))
        assert [files.check(entry) for entry in files.entries()] == [disk.UNREADABLE, None]
    assert read(files, io, 1) == data(1)
    assert files.stats()["held_slots"] == 0


# --- bad blobs ----------------------------------------------------------------------------------------------------


def spoil(io, place, at):
    byte = io.read_now(place.fd, 1, place.offset + at)[0]
    io.write_now(place.fd, bytes([byte ^ 1]), place.offset + at)


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (0, disk.MAGIC),
        (20, disk.HEADER),
        (80, disk.HEADER),
        (4096, disk.CHECKSUM),
        (7000, disk.CHECKSUM),
    ],
)
def test_a_bad_blob_is_a_miss_and_its_slot_goes_to_quarantine(open_files, io, at, reason):
    files = open_files()
    (place, _) = save(files, io, 1, 2)
    spoil(io, place, at)
    assert read(files, io, 1) == reason
    for _ in range(2):
        assert read(files, io, 1) == "miss"
        assert read(files, io, 2) == data(2)
        stats = files.stats()
        assert (stats["quarantined_slots"], stats["blobs"], stats["held_slots"]) == (1, 1, 0)
        (bad,) = [entry for entry in files.entries() if entry.reason]
        assert (bad.tag, bad.reason, bad.is_ready) == (tag(1), reason, False)
        assert files.check(bad) == reason
        files.close()
        files = open_files()
    save(files, io, 1)
    assert read(files, io, 1) == data(1)
    assert files.gc()["slots"] == 1
    assert files.stats()["quarantined_slots"] == 0
    files.close()
    files = open_files()
    assert files.stats()["quarantined_slots"] == 0
    assert files.stats()["blobs"] == 2


def test_two_readers_of_one_bad_blob(open_files, io):
    files = open_files()
    save(files, io, 1)
    first, second = files.begin_load(tag(1)), files.begin_load(tag(1))
    files.end_load(first, bad="whatever")
    assert files.gc()["slots"] == 0
    files.end_load(second, bad=disk.CHECKSUM)
    assert files.stats()["bad_other"] == 1
    assert files.stats()["bad_checksum"] == 0
    assert files.gc()["slots"] == 1


def test_many_bad_slots_are_taken_back_when_the_quota_needs_them(open_files, io, caplog):
    files = open_files(8 * MIB)
    count = 0
    while True:
        place = files.begin_save(tag(count), 1_000_000, 1)
        files.end_save([(place, NAMESPACE)])
        count += 1
        if files.stats()["evicted"]:
            break
    slots = files.stats()["slots"]
    for number in range(1, count):
        if (place := files.begin_load(tag(number))) is not None:
            files.end_load(place, bad=disk.CHECKSUM)
    assert files.stats()["quarantined_slots"] == slots
    note(files, 1000, num_bytes=1_000_000)
    assert files.stats()["quarantined_slots"] == 0
    assert f"the quota needs {slots} slots" in caplog.text


def test_check_tells_stale_entries_from_bad_ones(open_files, io):
    files = open_files()
    save(files, io, 1, 2)
    entries = list(files.entries())
    assert [files.check(entry) for entry in entries] == [None, None]
    files.remove([tag(1)])
    assert files.check(entries[0]) == disk.STALE
    # the bytes of another blob, in a sound page of this save
    place = entries[1].place
    fd = files.begin_load(tag(2)).fd
    io.write_now(fd, slot_bytes(9, place.generation), place.offset)
    assert files.check(entries[1]) == disk.FOREIGN
    io.write_now(fd, slot_bytes(2, place.generation - 1), place.offset)
    assert files.check(entries[1]) == disk.STALE
    io.write_now(fd, slot_bytes(2, place.generation, 2000), place.offset)
    assert files.check(entries[1]) == disk.SHAPE
    io.write_now(fd, bytes(8192), place.offset)
    assert files.check(entries[1]) == disk.EMPTY


# --- beside others ------------------------------------------------------------------------------------------------


def test_two_owners_are_one_too_many(open_files, folder):
    files = open_files()
    with pytest.raises(DiskBusyError, match=rf"in use by another process \(pid {os.getpid()}\)"):
        open_files()
    with pytest.raises(DiskBusyError):
        folders.wipe(files._io, folder)
    files.close()
    open_files()


def test_closed_is_closed(open_files):
    files = open_files()
    files.close()
    files.close()
    for verb in (files.sync_now, files.gc, files.stats, lambda: files.begin_load(tag(1))):
        with pytest.raises(DiskError, match="is closed"):
            verb()


def test_a_policy_that_does_not_exist(open_files):
    with pytest.raises(ValueError, match="sync must be one of never, batch, always; got 'often'"):
        open_files(sync="often")


def test_threads_take_turns(open_files, io, folder):
    files = open_files(8 * MIB)
    failures = []

    def work(seed):
        chance = random.Random(seed)
        try:
            for _ in range(150):
                number = chance.randrange(40)
                place = files.begin_save(tag(number), 200_000, 1)
                if isinstance(place, Place):
                    if chance.random() < 0.2:
                        files.abort_save(place)
                    else:
                        files.end_save([(place, NAMESPACE)])
                files.contains(tag(number))
                if (held := files.begin_load(tag(chance.randrange(40)))) is not None:
                    files.end_load(held, bad=disk.CHECKSUM if chance.random() < 0.05 else None)
                if chance.random() < 0.05:
                    files.remove([tag(number)])
                    list(files.entries())
                    files.stats()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,), name=f"kvferry-test-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = files.stats()
    assert stats["held_slots"] == 0
    assert stats["free_slots"] + stats["blobs"] + stats["quarantined_slots"] == stats["slots"]
    assert disk_bytes(folder) <= 8 * MIB
    files.close()
    assert open_files(8 * MIB).stats()["blobs"] == stats["blobs"]
