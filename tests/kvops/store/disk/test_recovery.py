"""Opening a folder after whatever happened to it: crashes, damage, strangers, later versions, another owner."""

import hashlib
import os
import shutil
import textwrap

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.errors import DiskBusyError, DiskDamagedError, DiskError
from kvferry.kvops.store.disk import folder as folders
from kvferry.kvops.store.disk import format as disk
from kvferry.kvops.store.disk import records as rec
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.io_faults import FaultyIo, PowerCut
from kvferry.kvops.store.io_threads import ThreadIo

from .blobs import MIB, NAMESPACE, QUOTA, data, disk_bytes, note, read, save, slot_bytes, tag, write

LARGE = 60_000
FIRST = "seg-00000000.blobs"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def journal_of(folder):
    (path,) = folder.glob("index-*.log")
    return path


def contents(folder):
    """Name, size, time and bytes of everything."""
    return {
        name: (
            (folder / name).stat().st_mtime_ns,
            hashlib.sha256((folder / name).read_bytes()).digest(),
        )
        for name in names(folder)
    }


@pytest.fixture
def five(open_files, io):
    """Blobs 0 to 4 were saved, and the folder is closed."""
    files = open_files()
    save(files, io, *range(5))
    files.close()


# --- the folder ---------------------------------------------------------------------------------------------------


def test_the_folder_is_for_its_owner_alone(five, folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert names(folder) == ["index-1.log", "lock", FIRST]
    assert {(folder / name).stat().st_mode & 0o777 for name in names(folder)} == {0o600}


def test_a_folder_that_is_none(open_files, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="must be a folder, and is something else"):
        open_files(folder=tmp_path / "file")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(DiskError, match="must not be a symbolic link"):
        open_files(folder=tmp_path / "link")
    with pytest.raises(DiskError, match="does not exist"):
        open_files(folder=tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()


def test_a_folder_that_others_can_write_to(open_files, folder):
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(DiskError, match="must not be writable by others"):
        open_files()
    folder.chmod(0o755)
    open_files()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user(open_files, folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(DiskError, match=r"must belong to this user \(0\); it is user 12345's"):
        open_files()


OWNER = """
    from pathlib import Path
    from kvferry.kvops.store.disk.files import BlobFiles
    from kvferry.kvops.store.io_threads import ThreadIo
    files = BlobFiles.open(Path({folder!r}), ThreadIo(threads=1), quota_bytes={quota})
"""


def test_another_process_keeps_the_folder_until_it_is_killed(open_files, folder, child, five):
    owner = child(textwrap.dedent(OWNER.format(folder=str(folder), quota=QUOTA))).wait_ready()
    with pytest.raises(DiskBusyError, match=rf"\(pid {owner.pid}\)"):
        open_files()
    owner.kill()
    assert open_files().stats()["recovered"] == 5


def test_a_lock_file_that_is_left_over_means_nothing(open_files, folder, five):
    for text in (b"", b"\xff\xfe", b"1 1\n", b"x" * 5000):
        (folder / "lock").write_bytes(text)
        open_files().close()
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(folder / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_files()


# --- files that can't be used -------------------------------------------------------------------------------------


def truncate(path):
    os.truncate(path, path.stat().st_size - 4096)


def lengthen(path):
    os.truncate(path, path.stat().st_size + 1)


def empty(path):
    os.truncate(path, 0)


def change(at, byte):
    def act(path):
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(byte)

    act.__name__ = f"byte {at}"
    return act


def rename(path):
    path.rename(path.with_name("seg-00000007.blobs"))


def link(path):
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def folder_instead(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (truncate, disk.TRUNCATED),
        (empty, disk.TRUNCATED),
        (lengthen, disk.SHAPE),
        (change(0, b"X"), disk.MAGIC),
        (change(8, b"\2"), disk.VERSION),
        (change(32, b"\xff\xff"), disk.HEADER),
        (rename, disk.FOREIGN),
        (link, disk.UNREADABLE),
        (folder_instead, disk.UNREADABLE),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_segment_that_can_not_be_used_is_moved_away_and_nothing_is_lost(
    open_files, io, folder, five, caplog, act, reason
):
    act(folder / FIRST)
    before = {name.split("/")[-1] for name in names(folder)}
    files = open_files(64 * MIB)
    assert files.stats()["quarantined_files"] == files.stats()["unusable_files"] == 1
    assert files.stats()["discarded_records"] == 5
    (moved,) = [p for p in (folder / "quarantine").iterdir() if p.suffix != ".reason"]
    assert moved.with_name(moved.name + ".reason").read_text().startswith(f"{reason}\n")
    assert len([r for r in caplog.records if "can't be used (" + reason in r.getMessage()]) == 1
    assert before - {name.split("/")[-1] for name in names(folder)} == set()
    save(files, io, 1)
    assert read(files, io, 1) == data(1)
    assert disk_bytes(folder) <= 64 * MIB
    files.close()
    # it stays until somebody asks for it to go
    files = open_files(64 * MIB)
    assert files.stats()["quarantined_files"] == 1
    if act is not folder_instead:
        counts = files.gc()
        assert counts["files"] == 1
        assert list((folder / "quarantine").iterdir()) == []
        assert files.contains(tag(1))


def test_files_in_quarantine_do_not_replace_each_other(open_files, folder, five):
    for _ in range(3):
        shutil.copy(folder / "lock", folder / "seg-00000009.blobs")
        open_files().close()
    assert names(folder / "quarantine") == sorted(
        f"seg-00000009.blobs{n}{reason}" for n in ("", ".1", ".2") for reason in ("", ".reason")
    )


def test_files_in_quarantine_go_when_nothing_else_can(open_files, folder, caplog):
    files = open_files()
    note(files, 1)
    files.close()
    change(0, b"X")(folder / FIRST)
    files = open_files()
    # 16 of 20 MiB are in quarantine
    note(files, 2, num_bytes=LARGE)
    assert disk_bytes(folder) <= QUOTA
    assert "the quota needs its room" in caplog.text


@pytest.mark.parametrize(
    ("act", "reason"), [(empty, disk.TRUNCATED), (change(0, b"X"), disk.MAGIC)], ids=["empty", "foreign"]
)  # fmt: skip
def test_a_journal_that_can_not_be_used_is_moved_away(open_files, io, folder, five, act, reason):
    act(journal_of(folder))
    files = open_files()
    assert names(folder / "quarantine") == ["index-1.log", "index-1.log.reason"]
    assert journal_of(folder).name == "index-2.log"
    assert files.stats()["blobs"] == 0
    save(files, io, 1)
    files.close()
    assert open_files().stats()["blobs"] == 1


def test_a_journal_whose_header_alone_is_damaged_still_tells_its_records(
    open_files, io, folder, five
):
    change(16, b"\x77")(journal_of(folder))
    files = open_files()
    assert files.stats()["blobs"] == 5
    assert names(folder / "quarantine") == ["index-1.log", "index-1.log.reason"]
    assert read(files, io, 3) == data(3)
    files.close()
    assert open_files().stats()["blobs"] == 5


def test_a_journal_of_a_later_version_is_refused_and_can_be_wiped(open_files, io, folder, five):
    change(8, b"\2")(journal_of(folder))
    (folder / "mine.txt").write_text("not yours")
    before = contents(folder)
    with pytest.raises(DiskError, match=f"written by a later kvferry.*kvferry disk wipe {folder}"):
        open_files()
    assert {**contents(folder), "lock": 0} == {**before, "lock": 0}
    counts = folders.wipe(io, folder)
    assert counts["files"] == 2
    assert counts["bytes"] > 16 * MIB
    assert names(folder) == ["lock", "mine.txt"]
    assert open_files().stats()["blobs"] == 0


def test_wipe_takes_the_quarantine_and_what_was_unfinished_along(open_files, io, folder, five):
    (folder / "index-2.log.tmp").touch()
    (folder / "seg-00000003.blobs.tmp").touch()
    (folder / "stats.json").touch()
    change(0, b"X")(folder / FIRST)
    open_files().close()
    folders.wipe(io, folder)
    assert names(folder) == ["lock"]
    assert not (folder / "quarantine").exists()


def test_too_many_owners(open_files, folder):
    open_files().close()
    last = (1 << disk.EPOCH_BITS) - 1 << disk.GENERATION_COUNT_BITS
    with journal_of(folder).open("ab") as stream:
        stream.write(rec.pack_record((0, 0), last, 0, 0, kind=rec.Kind.EPOCH))
    with pytest.raises(DiskDamagedError, match="kvferry disk wipe"):
        open_files()


def test_leftovers_of_a_crash_are_cleared(open_files, folder, five):
    for name in ("index-2.log.tmp", "seg-00000005.blobs.tmp"):
        (folder / name).write_bytes(b"x" * 9999)
    shutil.copy(folder / "index-1.log", folder / "index-0.log")
    files = open_files()
    assert names(folder) == ["index-1.log", "lock", FIRST]
    assert files.stats()["blobs"] == 5
    assert files.stats()["quarantined_files"] == 0


# --- the journal --------------------------------------------------------------------------------------------------


def test_a_journal_cut_at_every_byte_of_its_tail(open_files, io, folder, five):
    whole = journal_of(folder).read_bytes()
    first = len(whole) - 64 * 5
    for size in range(len(whole) - 130, len(whole)):
        journal_of(folder).write_bytes(whole[:size])
        files = open_files()
        left = (size - first) // 64
        assert [files.contains(tag(n)) for n in range(5)] == [n < left for n in range(5)]
        assert files.stats()["discarded_records"] == bool((size - first) % 64)
        files.close()
        # the tail was cut off: what is appended now is read again
        assert journal_of(folder).stat().st_size % 64 == 0
        files = open_files()
        assert files.stats()["blobs"] == left
        files.close()


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(64, 64 * 16 - 1), st.integers(1, 255)), max_size=6),
    st.integers(0, 64 * 12),
    st.binary(max_size=130),
)
def test_any_bytes_in_a_journal_are_survived(open_files, io, folder, flips, cut, tail):
    path = folder / "index-1.log"
    if not folder.exists():
        files = open_files()
        save(files, io, *range(5))
        files.remove([tag(1)])
        save(files, io, 1, 7)
        save(files, io, 8, num_bytes=5000)
        files.close()
        path.with_name("kept").write_bytes(path.read_bytes())
    for old in folder.glob("index-*"):
        old.unlink()
    whole = bytearray(path.with_name("kept").read_bytes())
    for at, flip in flips:
        whole[at % len(whole) if at % len(whole) >= 64 else 64] ^= flip
    path.write_bytes(
        whole[: len(whole) - cut] + tail if cut < len(whole) - 64 else whole[:64] + tail
    )
    files = open_files(64 * MIB)
    for number in (*range(5), 7):
        assert read(files, io, number) in ("miss", data(number))
    assert read(files, io, 8) in ("miss", data(8, 5000))
    files.close()


def put(number, generation, segment=0, slot=0, blob_bytes=3000, kind=rec.Kind.PUT, parts=1):
    return rec.pack_record(
        tag(number), generation, segment, slot, kind=kind, blob_bytes=blob_bytes,
        namespace=disk.namespace_tag(NAMESPACE), parts=parts,
    )  # fmt: skip


NEW = 9 << disk.GENERATION_COUNT_BITS


def test_of_the_records_of_a_slot_the_highest_generation_holds(open_files, folder, five):
    records = [
        put(20, NEW + 5),
        put(21, NEW + 4),
        put(22, NEW + 6, slot=1),
        put(23, NEW + 6, slot=1),
    ]
    records += [put(20, NEW + 4, kind=rec.Kind.REMOVE)]
    with journal_of(folder).open("ab") as stream:
        stream.write(b"".join(records))
    files = open_files()
    found = [files.contains(tag(n)) for n in (0, 20, 21, 1, 22, 23)]
    assert found == [False, True, False, False, False, True]
    assert files.begin_save(tag(99), 3000, 1).generation >> disk.GENERATION_COUNT_BITS == 10


def test_of_a_blob_in_two_slots_the_later_one_is_kept_for_good(open_files, io, folder, five):
    with journal_of(folder).open("ab") as stream:
        stream.write(put(3, NEW, slot=9) + put(3, NEW + 1, slot=8))
    files = open_files()
    place = files.begin_load(tag(3))
    assert place.slot == 8
    files.end_load(place)
    assert files.stats()["blobs"] == 5
    files.remove([tag(3)])
    files.close()
    assert not open_files().contains(tag(3))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(put(30, NEW, segment=5), id="no such segment"),
        pytest.param(put(30, NEW, segment=1 << 31), id="no possible segment"),
        pytest.param(put(30, NEW, slot=2048), id="no such slot"),
        pytest.param(put(30, NEW, slot=(1 << 32) - 1), id="no possible slot"),
        pytest.param(put(30, NEW, blob_bytes=5000), id="too large for the slots there"),
        pytest.param(put(30, NEW, blob_bytes=0), id="no bytes"),
        pytest.param(put(30, NEW, blob_bytes=(1 << 64) - 1), id="impossible size"),
        pytest.param(put(30, NEW, parts=200), id="a header area of another size"),
        pytest.param(put(30, 0), id="older than its segment"),
        pytest.param(put(30, NEW)[:52] + b"\7" + put(30, NEW)[53:], id="check does not hold"),
    ],
)
def test_a_record_that_can_not_be_meant_is_passed_over(
    open_files, io, folder, five, record, caplog
):
    with journal_of(folder).open("ab") as stream:
        stream.write(record)
    files = open_files()
    assert not files.contains(tag(30))
    assert files.stats()["blobs"] == 5
    assert files.stats()["discarded_records"] == 1
    assert "1 records of" in caplog.text
    assert [read(files, io, n) for n in range(5)] == [data(n) for n in range(5)]


def test_a_kind_that_is_not_known_is_passed_over(open_files, folder, five):
    record = bytearray(put(30, NEW))
    record[52] = 77
    rec.seal_records(memoryview(record))
    with journal_of(folder).open("ab") as stream:
        stream.write(record)
    files = open_files()
    assert files.stats()["discarded_records"] == 1
    assert not files.contains(tag(30))


def test_the_page_tells_when_a_slot_was_used_again_and_the_new_record_is_lost(
    open_files, io, folder, five
):
    old = journal_of(folder).read_bytes()
    files = open_files()
    files.remove([tag(2), tag(3)])
    # slots are taken last freed first: 3 goes into its own again, with the same bytes, 12 into that of 2
    save(files, io, 3, 12)
    files.close()
    for path in folder.glob("index-*"):
        path.unlink()
    (folder / "index-1.log").write_bytes(old)
    files = open_files()
    assert [read(files, io, n) for n in (1, 2, 3, 4, 12)] == [
        data(1), disk.STALE, disk.STALE, data(4), "miss",
    ]  # fmt: skip
    assert files.stats()["quarantined_slots"] == files.stats()["bad_stale"] == 2


def test_the_checksums_tell_when_only_the_data_were_written(open_files, io, folder, five):
    files = open_files()
    place = files.begin_load(tag(2))
    io.write_now(place.fd, slot_bytes(12, NEW)[4096:], place.offset + 4096)
    files.end_load(place)
    assert read(files, io, 2) == disk.CHECKSUM


# --- reading only -------------------------------------------------------------------------------------------------


def test_reading_only_changes_nothing_beside_a_live_owner(open_files, io, folder):
    owner = open_files()
    save(owner, io, 1, 2)
    (folder / "seg-00000009.blobs").write_bytes(b"junk")
    (folder / "index-7.log.tmp").touch()
    before = contents(folder)
    with BlobFiles.open(folder, io, quota_bytes=0, read_only=True) as files:
        assert files.stats()["blobs"] == 2
        assert files.stats()["unusable_files"] == 1
        assert [files.check(entry) for entry in files.entries()] == [None, None]
        for verb in (
            lambda: files.begin_save(tag(5), 10, 1),
            lambda: files.remove([tag(1)]),
            files.gc,
            files.sync_now,
        ):
            with pytest.raises(DiskError, match="reading only"):
                verb()
        owner.remove([tag(1)])
        save(owner, io, 3)
        # of that moment
        assert [files.contains(tag(n)) for n in (1, 2, 3)] == [True, True, False]
        assert sorted(str(files.check(entry)) for entry in files.entries()) == ["None", disk.STALE]
    after = contents(folder)
    assert {n: v for n, v in after.items() if n not in ("index-1.log", FIRST)} == {
        n: v for n, v in before.items() if n not in ("index-1.log", FIRST)
    }


def test_reading_only_follows_a_journal_that_is_replaced_meanwhile(open_files, io, folder):
    owner = open_files()
    note(owner, *range(3))
    note(owner, *range(10, 12))
    owner.remove([tag(0)])

    def replace(call):
        # between the listing and the opening
        if call.path.name.startswith("index") and owner.stats()["rewrites"] == 0:
            owner.gc()
        return False

    reader = FaultyIo(ThreadIo(threads=1))
    with (
        reader.fault("io_error", match=replace),
        BlobFiles.open(folder, reader, quota_bytes=0, read_only=True) as files,
    ):
        assert owner.stats()["rewrites"] == 1
        assert files.stats()["blobs"] == 4
    assert reader.close(10.0)


# --- a disk that fails, a power that goes -------------------------------------------------------------------------


def test_opening_fails_cleanly_at_every_call(open_files, io, folder):
    files = open_files()
    save(files, io, *range(3))
    note(files, *range(10, 12), num_bytes=2_000_000 // 2)
    files.close()
    change(0, b"X")(folder / sorted(folder.glob("seg-*"))[-1].name)
    template = folder.with_name("template")
    shutil.copytree(folder, template)
    number = 0
    while True:
        number += 1
        shutil.rmtree(folder)
        shutil.copytree(template, folder)
        descriptors = len(os.listdir("/proc/self/fd"))
        with io.fault("io_error", every=number, count=1) as fault:
            try:
                files = open_files(64 * MIB)
            except OSError as error:
                assert "Input/output" in str(error)  # noqa: PT017
                assert len(os.listdir("/proc/self/fd")) == descriptors
            else:
                files.close()
        files = open_files(64 * MIB)
        assert all(read(files, io, n) in ("miss", data(n)) for n in range(3))
        files.close()
        if not fault.hits:
            break
    assert number > 8


def work(files, io):
    """A bit of everything; yields the blobs that are published, and what they are."""
    save(files, io, 1, 2, 3)
    yield {1, 2, 3}
    files.remove([tag(2)])
    yield {1, 3}
    save(files, io, 4)
    yield {1, 3, 4}
    place = files.begin_save(tag(5), 3000, 1)
    write(io, place, 5)
    files.abort_save(place)
    yield {1, 3, 4}
    files.gc()
    yield {1, 3, 4}
    save(files, io, 5, 2)
    yield {1, 2, 3, 4, 5}


@pytest.mark.parametrize("sync", ["always", "batch", "never"])
def test_whatever_a_power_cut_leaves_no_wrong_byte_is_believed(folder, sync):
    cut, ended = 0, False
    while not ended:
        cut += 1
        shutil.rmtree(folder, ignore_errors=True)
        io = FaultyIo(ThreadIo(threads=1), seed=cut, power_cuts=True)
        published = set()
        try:
            files = BlobFiles.open(folder, io, quota_bytes=QUOTA, sync=sync)
            io.cut_after(cut)
            for published in work(files, io):  # noqa: B007
                pass
            ended = True
        except PowerCut:
            pass
        io.crash_image()
        assert io.close(10.0)
        io = ThreadIo(threads=1)
        with BlobFiles.open(folder, io, quota_bytes=QUOTA, sync=sync) as files:
            found = {n: read(files, io, n) for n in range(1, 6)}
            assert all(
                value in (data(number), "miss", *disk.REASONS) for number, value in found.items()
            )
            if sync == "always":
                there = {n for n, value in found.items() if value == data(n)}
                # what the step that was cut short would have removed may be gone or not
                assert there >= published - {2}
                assert files.stats()["quarantined_files"] == 0
            assert disk_bytes(folder) <= QUOTA
            for number in range(1, 6):
                if found[number] != data(number):
                    save(files, io, number)
            assert [read(files, io, n) for n in range(1, 6)] == [data(n) for n in range(1, 6)]
        assert io.close(10.0)
    assert cut > 10


def test_a_folder_with_files_of_somebody_else_is_refused_and_left_alone(io, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir(mode=0o700)
    (folder / "holiday.jpg").write_bytes(b"sea")
    with pytest.raises(
        DiskError, match=r"must be empty, or one that kvferry made; it holds 'holiday.jpg'"
    ):
        BlobFiles.open(folder, io, quota_bytes=QUOTA)
    assert [path.name for path in folder.iterdir()] == ["holiday.jpg"]


def test_a_folder_where_a_file_of_ours_should_be_goes_with_the_quarantine(open_files, io, folder):
    open_files().close()
    (journal,) = folder.glob("index-*.log")
    journal.unlink()
    journal.mkdir()
    files = open_files()
    assert files.stats()["quarantined_files"] == 1
    files.gc()
    assert files.stats()["quarantined_files"] == 0
