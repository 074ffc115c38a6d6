"""What was asked for, or what measures better; nothing stays in the folder, whatever happens."""

import errno
import logging
import threading
import time

import pytest

from kvferry.kvops.store import io_aio, io_choice
from kvferry.kvops.store.io_choice import NAMES, open_io

from .io_memory import DEADLINE_S, PAGE, Memory, open_fds, run, write


@pytest.fixture
def opened():
    """Open engines that are closed at the end."""
    engines = []

    def one(*args, **kwargs):
        engines.append(open_io(*args, **kwargs))
        return engines[-1]

    yield one
    for io in engines:
        assert io.close(DEADLINE_S)


@pytest.mark.parametrize("name", NAMES)
def test_by_name(opened, tmp_path, caplog, name):
    with caplog.at_level(logging.INFO):
        io = opened(name, tmp_path, depth=5, max_inflight_bytes=7 * PAGE)
    assert name in ("auto", io.name)
    assert (io.depth, io.max_inflight_bytes) == (5, 7 * PAGE)
    (record,) = [record for record in caplog.records if record.name == io_choice.__name__]
    assert f"disk I/O by {io.name}" in record.getMessage()
    assert list(tmp_path.iterdir()) == []
    memory = Memory(4 * PAGE)
    fd = io.open(tmp_path / "file", write=True, create=True)
    assert run(io, write(fd, 0, memory.pieces(PAGE)))[0].ok
    io.close_file(fd)


def test_an_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="one of auto, aio, threads; got 'uring'"):
        open_io("uring", tmp_path)


def test_measuring_is_short_and_leaves_nothing(tmp_path, shm):
    before, threads = open_fds(), threading.active_count()
    for folder in (tmp_path, shm):
        start = time.monotonic()
        name, reason = io_choice.choose(folder, 32)
        # a busy machine may take longer; a second for each is not what hangs
        assert time.monotonic() - start < 5
        assert name in NAMES
        assert "GB/s" in reason or "no direct I/O" in reason
        assert list(folder.iterdir()) == []
    assert open_fds() == before
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("aio", "threads", "winner"), [(1.0, 1.05, "aio"), (1.0, 1.2, "threads"), (2.0, 1.0, "aio")]
)
def test_threads_must_lead_clearly(tmp_path, monkeypatch, aio, threads, winner):
    rates = {"aio": aio * 1e9, "threads": threads * 1e9}
    monkeypatch.setattr(io_choice, "_measure", lambda *_: rates)
    monkeypatch.setattr(io_choice, "is_direct", lambda fd: True)
    name, reason = io_choice.choose(tmp_path, 4)
    assert name == winner
    assert reason == f"read aio {aio:.2f} GB/s, threads {threads:.2f} GB/s in pieces of 64 KiB"


def test_no_direct_io_means_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(io_choice, "is_direct", lambda fd: False)
    name, reason = io_choice.choose(tmp_path, 4)
    assert (name, reason) == ("threads", f"{tmp_path} takes no direct I/O")
    assert list(tmp_path.iterdir()) == []


def test_no_aio_means_threads_unless_it_was_asked_for(opened, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no AIO in here")

    monkeypatch.setattr(io_aio, "_set_up", refuse)
    assert opened("auto", tmp_path).name == "threads"
    with pytest.raises(OSError, match="no AIO in here"):
        open_io("aio", tmp_path)


@pytest.mark.parametrize("call", ["open", "allocate", "write_now", "submit"])
def test_a_disk_that_fails_is_for_others_to_report(opened, tmp_path, monkeypatch, call):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_fds()
    monkeypatch.setattr(io_choice.AioIo, call, fail)
    monkeypatch.setattr(io_choice, "is_direct", lambda fd: True)
    name, reason = io_choice.choose(tmp_path, 4)
    assert name == "threads"
    assert "not measured: [Errno 28] No space left" in reason
    assert list(tmp_path.iterdir()) == []
    assert open_fds() == before


def test_a_folder_that_is_not_there(tmp_path):
    assert io_choice.choose(tmp_path / "none", 4)[0] == "threads"


def test_a_read_that_fails(tmp_path, monkeypatch):
    real = io_choice._measured_file
    monkeypatch.setattr(io_choice, "FILE_BYTES", 128 << 10)

    @io_choice.contextlib.contextmanager
    def short(io, folder):
        with real(io, folder) as fd:
            io.truncate(fd, PAGE)
            yield fd

    monkeypatch.setattr(io_choice, "_measured_file", short)
    monkeypatch.setattr(io_choice, "is_direct", lambda fd: True)
    assert "a read did not succeed" in io_choice.choose(tmp_path, 4)[1]


def test_a_stuck_drive_does_not_stop_the_start(tmp_path, monkeypatch):
    """Its memory is kept for good, since the drive may still write into it."""
    real = io_aio._syscall_locked
    stuck = True
    monkeypatch.setattr(io_aio, "_syscall_locked", lambda *args: 0 if stuck else real(*args))
    monkeypatch.setattr(io_choice, "PATIENCE_S", 0.5)
    monkeypatch.setattr(io_choice, "is_direct", lambda fd: True)
    monkeypatch.setattr(io_choice, "_stuck", [])
    name, reason = io_choice.choose(tmp_path, 4)
    assert name == "threads"
    assert "reads did not end" in reason
    (io,) = io_choice._stuck
    assert io.in_flight == 4
    stuck = False
    assert io.close(DEADLINE_S)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_slow_to_be_measured_does_not_stop_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(io_choice, "MEASURE_S", 0.0)
    name, reason = io_choice.choose(tmp_path, 4)
    assert name == "threads"
    assert "too slow, or too busy" in reason
