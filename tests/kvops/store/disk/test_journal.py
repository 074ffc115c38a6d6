"""The journal: read back what was appended, whatever was cut off, flipped, or failed on the way."""

import errno

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.store.disk import journal as journals
from kvferry.kvops.store.disk import records as rec
from kvferry.kvops.store.disk.journal import Journal

from .blobs import tag


def records(*numbers):
    return b"".join(
        rec.pack_record(tag(n), 1000 + n, 0, n, kind=rec.Kind.PUT, blob_bytes=n) for n in numbers
    )


def read(io, path):
    """Return the slots of all sound records, and where the last one ends."""
    fd = io.open(path, write=False, direct=False)
    try:
        found, end = [], rec.JOURNAL_HEADER_BYTES
        for chunk, end in journals.read_records(io, fd, path.stat().st_size):  # noqa: B007
            found += chunk["slot"].tolist()
        return found, end
    finally:
        io.close_file(fd)


@pytest.fixture
def journal(tmp_path, io):
    journal = Journal.create(io, tmp_path, 3, epoch=2)
    yield journal
    journal.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index-3.log"


def test_what_was_appended_is_read_in_order(journal, path, io, monkeypatch):
    monkeypatch.setattr(journals, "READ_BYTES", 3 * rec.RECORD_BYTES)
    journal.append(records(5, 4))
    journal.append(records(*range(10, 20)))
    assert journal.records == 12
    assert read(io, path) == ([5, 4, *range(10, 20)], journal.end)
    assert path.stat().st_mode & 0o777 == 0o600


def test_progress_is_told(journal, path, io):
    journal.append(records(*range(10)))
    told = []
    fd = io.open(path, write=False, direct=False)
    list(journals.read_records(io, fd, journal.end, lambda *now: told.append(now)))
    io.close_file(fd)
    assert told == [(journal.end, journal.end)]


def test_a_tail_that_was_cut_anywhere_costs_only_its_record(journal, path, io, tmp_path):
    journal.append(records(*range(6)))
    whole = path.read_bytes()
    cut = tmp_path / "index-9.log"
    for size in range(rec.JOURNAL_HEADER_BYTES, len(whole) + 1):
        cut.write_bytes(whole[:size])
        count = (size - rec.JOURNAL_HEADER_BYTES) // rec.RECORD_BYTES
        assert read(io, cut) == (list(range(count)), 64 + 64 * count)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sets(st.integers(64 * 8, 64 * 8 * 9 - 1), max_size=5))
def test_a_flipped_bit_costs_only_its_record(journal, path, io, tmp_path, bits):
    journal.end = rec.JOURNAL_HEADER_BYTES
    journal.append(records(*range(8)))
    damaged = bytearray(path.read_bytes())
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    other = tmp_path / "index-9.log"
    other.write_bytes(damaged)
    hurt = {bit // 512 - 1 for bit in bits}
    found, _ = read(io, other)
    assert found == [n for n in range(8) if n not in hurt]


def test_a_failed_append_does_not_come_back_behind_a_shorter_one(journal, path, io):
    journal.append(records(1))

    def spoil(call):
        # the bytes arrive, and the call fails; then the cut fails as well
        if call.kind == "write_now":
            with path.open("r+b") as stream:
                stream.seek(call.offset)
                stream.write(records(2, 3, 4))
        return True

    with (
        io.fault("io_error", match=spoil) as fault,
        pytest.raises(OSError, match="Input/output error"),
    ):
        journal.append(records(2, 3, 4))
    assert fault.hits == 2
    assert read(io, path)[0] == [1, 2, 3, 4]
    with (
        io.fault("io_error", match=lambda call: call.kind == "truncate"),
        pytest.raises(OSError, match="Input/output error"),
    ):
        journal.append(records(5))
    journal.append(records(5))
    assert read(io, path) == ([1, 5], journal.end)


def test_an_append_can_be_taken_back(journal, path, io):
    journal.append(records(1))
    journal.append(records(2, 3))
    journal.take_back(2 * rec.RECORD_BYTES)
    assert read(io, path)[0] == [1]
    journal.append(records(4))
    assert read(io, path)[0] == [1, 4]


def test_a_rewrite_keeps_what_it_is_told_and_the_old_file_goes(journal, path, io, tmp_path):
    journal.append(records(*range(9)))
    journal.rewrite(2, [records(3), records(7, 8)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index-4.log"]
    journal.append(records(1))
    assert read(io, tmp_path / "index-4.log") == ([3, 7, 8, 1], journal.end)


REWRITE = ("open", "write_now", "sync", "rename", "sync_folder")


@pytest.mark.parametrize("call", REWRITE)
def test_a_rewrite_that_fails_leaves_the_old_journal_in_use(journal, path, io, tmp_path, call):
    journal.append(records(*range(4)))
    fault = io.fault("io_error", match=lambda c: c.kind == call)
    with fault as met, pytest.raises(OSError, match="Input/output error") as caught:
        journal.rewrite(2, [records(3)])
    assert met.hits == 1
    assert caught.value.errno == errno.EIO
    assert [p.name for p in tmp_path.iterdir()] == ["index-3.log"]
    journal.append(records(5))
    assert read(io, path)[0] == [0, 1, 2, 3, 5]
    journal.rewrite(2, [records(3)])
    assert read(io, tmp_path / "index-4.log")[0] == [3]


def test_a_journal_is_wasteful_when_most_of_it_is_dead(journal):
    journal.append(records(*range(2000)))
    assert not journal.is_wasteful(1000)
    assert journal.is_wasteful(900)
    journal.end = 64 + 64 * 1024
    assert not journal.is_wasteful(0)


def test_a_sync_is_skipped_when_there_is_nothing_new(journal, io):
    journal.append(records(1))
    before = io.counts["sync"]
    journal.sync()
    journal.sync()
    assert io.counts["sync"] == before + 1
