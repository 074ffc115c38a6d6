"""Both engines, the same cases: every byte where it belongs, every request ended once, nothing left behind."""

import errno
import itertools
import logging
import os
import platform
import resource
import stat
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.store import io_aio, io_calls, io_threads
from kvferry.kvops.store.io_aio import AioIo
from kvferry.kvops.store.io_engine import MAX_PIECES
from kvferry.kvops.store.io_threads import ThreadIo

from .io_memory import DEADLINE_S, PAGE, POISON, Memory, open_fds, read, reap_all, run, write

MIB = 1 << 20


def _engines():
    try:
        AioIo(1, 1).close(1)
    except OSError as error:
        skip = pytest.mark.skip(reason=f"no Linux AIO here: {error}")
        return [ThreadIo, pytest.param(AioIo, marks=skip, id="AioIo")]
    return [ThreadIo, AioIo]


@pytest.fixture(params=_engines(), ids=lambda make: make.__name__)
def make(request):
    """Make engines that are closed at the end, with everything in them ended."""
    made = []

    def one(*args, **kwargs):
        made.append(request.param(*args, **kwargs))
        return made[-1]

    yield one
    for io in made:
        assert io.close(DEADLINE_S)


@pytest.fixture
def io(make):
    return make()


@pytest.fixture
def memory():
    return Memory(4 * MIB)


@pytest.fixture(params=["direct", "buffered", "tmpfs"])
def new_file(request, io, tmp_path, shm):
    """Create files of one kind; they are closed at the end."""
    fds = []
    numbers = itertools.count()

    def create():
        folder = shm if request.param == "tmpfs" else tmp_path
        path = folder / f"file-{next(numbers)}"
        fds.append(io.open(path, write=True, create=True, direct=request.param != "buffered"))
        return fds[-1]

    yield create
    for fd in fds:
        io.close_file(fd)


@pytest.fixture
def fd(new_file):
    return new_file()


@pytest.fixture
def stick(monkeypatch):
    """Let no request end until the event that is returned is set."""

    def stick(io):
        go_on = threading.Event()
        if isinstance(io, AioIo):
            real = io_aio._syscall_locked
            monkeypatch.setattr(
                io_aio, "_syscall_locked", lambda *args: real(*args) if go_on.is_set() else 0
            )
        else:
            move = io_threads.transfer

            def transfer(*args):
                assert go_on.wait(DEADLINE_S)
                return move(*args)

            monkeypatch.setattr(io_threads, "transfer", transfer)
        return go_on

    return stick


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((PAGE,), id="one page"),
        pytest.param((PAGE, 16 * PAGE), id="header and frame"),
        pytest.param((3 * PAGE, PAGE, 5 * PAGE, 2 * PAGE, 7 * PAGE), id="odd"),
        pytest.param((PAGE,) * MAX_PIECES, id="as many pieces as there may be"),
        pytest.param((PAGE, 0, 2 * PAGE, 0), id="empty pieces"),
        pytest.param((), id="nothing"),
    ],
)
def test_round_trip_over_pieces(io, fd, memory, sizes):
    source, sink = memory.pieces(*sizes), memory.pieces(*sizes)
    data = os.urandom(sum(sizes))
    memory.put(source, data)
    (written,) = run(io, write(fd, 3 * PAGE, source))
    (got,) = run(io, read(fd, 3 * PAGE, sink))
    assert written.ok
    assert got.ok
    assert memory.get(sink) == data == io.read_now(fd, len(data), 3 * PAGE)
    assert got.request.submitted_s <= got.request.done_s <= time.monotonic()
    memory.check_guards()


def test_a_short_file_is_reported_by_the_count(io, fd, memory):
    io.write_now(fd, b"x" * 5000, 0)
    inside, behind, across = (memory.pieces(PAGE, PAGE) for _ in range(3))
    ends = run(io, read(fd, 0, inside), read(fd, MIB, behind), read(fd, PAGE, across))
    assert [(end.count, end.errno, end.ok) for end in ends] == [
        (5000, 0, False),
        (0, 0, False),
        (904, 0, False),
    ]
    assert memory.get(inside)[:5000] == b"x" * 5000
    # what a direct read clears behind the end of the file is the file system's choice
    assert set(memory.get(inside)[5000:]) <= {0, POISON}
    assert set(memory.get(behind)) <= {0, POISON}
    memory.check_guards()


def test_a_file_of_whole_pages_that_is_too_short(io, fd, memory):
    io.write_now(fd, b"x" * PAGE, 0)
    sink = memory.pieces(PAGE, PAGE)
    (end,) = run(io, read(fd, 0, sink))
    assert (end.count, end.errno) == (PAGE, 0)
    assert memory.get(sink)[:PAGE] == b"x" * PAGE
    memory.check_guards()


def test_a_closed_descriptor_fails_its_request_only(io, fd, memory):
    closed = os.dup(fd)
    os.close(closed)
    first, bad, last = (memory.pieces(PAGE) for _ in range(3))
    ends = run(io, write(fd, 0, first), write(closed, 0, bad), write(fd, PAGE, last))
    assert [(end.count, end.errno) for end in ends] == [(PAGE, 0), (0, errno.EBADF), (PAGE, 0)]
    assert io.in_flight == 0


def test_misaligned_direct_io_fails_its_request_only(io, tmp_path, memory):
    fd = io.open(tmp_path / "file", write=True, create=True)
    if not io_calls.is_direct(fd):
        pytest.skip("this file system takes no direct I/O")
    ends = run(io, write(fd, 1, memory.pieces(PAGE)), write(fd, 0, memory.pieces(PAGE)))
    assert [end.errno for end in ends] == [errno.EINVAL, 0]
    io.close_file(fd)


def test_a_read_only_file_takes_no_writes(io, fd, memory, tmp_path):
    (tmp_path / "other").write_bytes(b"y" * PAGE)
    other = io.open(tmp_path / "other", write=False)
    (end,) = run(io, write(other, 0, memory.pieces(PAGE)))
    assert end.errno == errno.EBADF
    io.close_file(other)


def test_too_many_pieces_are_refused_before_anything_is_taken(io, fd, memory):
    pieces = memory.pieces(*(PAGE,) * (MAX_PIECES + 1))
    with pytest.raises(ValueError, match="at most 64 pieces; got 65"):
        io.submit([write(fd, 0, pieces[:1]), write(fd, 0, pieces)])
    assert io.in_flight == 0


def test_a_file_size_limit_is_an_error_of_the_request(make, memory, tmp_path):
    """As a full disk in the middle of a write, without filling one."""
    io = make()
    fd = io.open(tmp_path / "file", write=True, create=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE, hard))
    try:
        ends = run(
            io, write(fd, 6 * PAGE, memory.pieces(4 * PAGE)), write(fd, 0, memory.pieces(PAGE))
        )
        with pytest.raises(OSError, match="File too large"):
            io.allocate(fd, 9 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not ends[0].ok
    assert ends[0].count <= 2 * PAGE
    assert ends[0].errno in (errno.EFBIG, 0)
    assert ends[1].ok
    assert os.fstat(fd).st_size <= 8 * PAGE
    io.close_file(fd)


# depth and bytes


def test_depth_bounds_what_is_taken(make, tmp_path, memory):
    io = make(3, MIB)
    fd = io.open(tmp_path / "file", write=True, create=True)
    requests = [write(fd, n * PAGE, memory.pieces(PAGE)) for n in range(8)]
    assert io.submit(requests) == 3
    # what has ended and was not reaped still counts: its memory is not yet the submitter's
    assert io.submit(requests[3:]) == 0
    assert io.in_flight == 3
    ended = reap_all(io, 1)
    assert io.submit(requests[3:]) == len(ended)
    reap_all(io)
    assert io.in_flight == 0
    io.close_file(fd)


def test_bytes_bound_what_is_taken_and_a_larger_one_goes_alone(make, tmp_path, memory):
    io = make(8, 4 * PAGE)
    fd = io.open(tmp_path / "file", write=True, create=True)
    small = [write(fd, n * PAGE, memory.pieces(PAGE)) for n in range(3)]
    large = write(fd, 0, memory.pieces(6 * PAGE))
    assert io.submit([*small, large]) == 3
    assert io.submit([large]) == 0
    reap_all(io)
    assert io.submit([large, *small]) == 1
    assert io.submit(small) == 0
    assert all(end.ok for end in reap_all(io))
    io.close_file(fd)


@pytest.mark.parametrize(("depth", "inflight"), [(0, 1), (1, 0), (-1, 1)])
def test_bounds_must_be_positive(make, depth, inflight):
    with pytest.raises(ValueError, match="must be at least 1; got"):
        make(depth, inflight)


def test_more_requests_than_depth_all_end_once(make, tmp_path, memory):
    io = make(7, 64 * PAGE)
    fd = io.open(tmp_path / "file", write=True, create=True)
    pieces = memory.pieces(PAGE, PAGE)
    requests = [write(fd, n * PAGE, pieces) for n in range(500)]
    assert all(end.ok for end in run(io, *requests))
    io.close_file(fd)


# waiting and waking


def test_reap_without_anything_returns_at_its_timeout(io):
    start = time.monotonic()
    assert io.reap(0) == []
    assert io.reap(-1.0) == []
    assert time.monotonic() - start < 1
    assert io.reap(0.02) == []
    assert time.monotonic() - start >= 0.02


def test_wake_ends_the_wait_or_the_next_one(io):
    io.wake()
    io.wake()
    start = time.monotonic()
    assert io.reap(DEADLINE_S) == []
    waking = threading.Thread(target=io.wake)
    waking.start()
    assert io.reap(DEADLINE_S) == []
    waking.join()
    assert time.monotonic() - start < DEADLINE_S / 2
    # tokens are used up
    io.reap(0)
    start = time.monotonic()
    io.reap(0.02)
    assert time.monotonic() - start >= 0.02


def test_wake_from_many_threads(io, tmp_path, memory):
    fd = io.open(tmp_path / "file", write=True, create=True)
    threads = [threading.Thread(target=io.wake) for _ in range(16)]
    for thread in threads:
        thread.start()
    assert all(end.ok for end in run(io, *(write(fd, 0, memory.pieces(PAGE)) for _ in range(40))))
    for thread in threads:
        thread.join()
    io.close_file(fd)


def test_a_stuck_drive(make, stick, tmp_path, memory):
    """Bounds hold, waiting ends, close says what is left, and the bytes come late, once."""
    io = make(4, MIB)
    fd = io.open(tmp_path / "file", write=True, create=True)
    go_on = stick(io)
    requests = [write(fd, n * PAGE, memory.pieces(PAGE)) for n in range(5)]
    assert io.submit(requests) == 4
    assert io.reap(0.01) == []
    assert io.submit(requests[4:]) == 0
    io.wake()
    assert io.reap(DEADLINE_S) == []
    assert not io.close(0.01)
    assert not io.close(0)
    assert io.in_flight == 4
    go_on.set()
    assert all(end.ok for end in reap_all(io))
    assert io.close(DEADLINE_S)
    assert io.read_now(fd, 4 * PAGE, 0) == bytes([POISON]) * 4 * PAGE
    io.close_file(fd)


# the end


def test_close_waits_for_what_is_in_flight_and_it_can_still_be_reaped(make, tmp_path, memory):
    io = make()
    fd = io.open(tmp_path / "file", write=True, create=True)
    pieces = [memory.pieces(16 * PAGE) for _ in range(20)]
    requests = [write(fd, n * 16 * PAGE, one) for n, one in enumerate(pieces)]
    assert io.submit(requests) == 20
    assert io.close(DEADLINE_S)
    with pytest.raises(OSError, match="closed"):
        io.submit(requests)
    assert len(reap_all(io)) == 20
    assert os.fstat(fd).st_size == 20 * 16 * PAGE
    assert io.close(0)
    io.wake()
    assert io.reap(0) == []
    # calls on files go on
    assert io.read_now(fd, 4, 0) == bytes([POISON]) * 4
    io.close_file(fd)


def test_nothing_is_left_behind(make, tmp_path, memory):
    before, threads = open_fds(), threading.active_count()
    for round_ in range(5):
        io = make(4, MIB)
        fd = io.open(tmp_path / f"file-{round_}", write=True, create=True)
        run(io, *(write(fd, 0, memory.pieces(PAGE)) for _ in range(9)))
        with pytest.raises(FileExistsError):
            io.open(tmp_path / f"file-{round_}", write=True, create=True)
        io.close_file(fd)
        assert io.close(DEADLINE_S)
    assert open_fds() == before
    assert threading.active_count() == threads


def test_other_threads_run_meanwhile(io, tmp_path):
    """The interpreter lock is free while bytes move."""
    big = Memory(34 * MIB)
    fd = io.open(tmp_path / "file", write=True, create=True, direct=False)
    pieces = big.pieces(32 * MIB)
    stop, ticks = threading.Event(), []

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            stop.wait(0.0005)

    def ran_meanwhile():
        (end,) = run(io, write(fd, 0, pieces))
        assert end.ok
        return sum(end.request.submitted_s < at < end.request.done_s for at in ticks) >= 3

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        # on a busy machine this thread may just not have been given a core
        assert any(ran_meanwhile() for _ in range(20))
    finally:
        stop.set()
        thread.join()
        io.close_file(fd)


# against a model


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_requests_against_bytes(make, tmp_path_factory, data):
    """Rounds of writes that do not overlap, in any order and size, then reads: the file is a bytes object."""
    io = make(data.draw(st.integers(1, 16), "depth"), 40 * PAGE)
    path = tmp_path_factory.mktemp("model") / "file"
    fd = io.open(path, write=True, create=True, direct=data.draw(st.booleans(), "direct"))
    model = bytearray(64 * PAGE)
    io.allocate(fd, len(model))
    memory = Memory(6 * MIB)
    for number in range(data.draw(st.integers(1, 3), "rounds")):
        cuts = sorted(data.draw(st.sets(st.integers(0, 64), max_size=12), "cuts"))
        requests = []
        for start, end in itertools.pairwise(cuts):
            sizes = data.draw(_split(end - start))
            pieces = memory.pieces(*(size * PAGE for size in sizes))
            content = bytes([(number * 50 + start) % 251 + 1]) * ((end - start) * PAGE)
            content = content[:-2] + os.urandom(2)
            memory.put(pieces, content)
            model[start * PAGE : end * PAGE] = content
            requests.append(write(fd, start * PAGE, pieces))
        order = data.draw(st.permutations(requests))
        assert all(end.ok for end in run(io, *order))
        sinks = [
            (start, memory.pieces((end - start) * PAGE)) for start, end in itertools.pairwise(cuts)
        ]
        ends = run(io, *(read(fd, start * PAGE, sink) for start, sink in sinks))
        assert all(end.ok for end in ends)
        for start, sink in sinks:
            got = memory.get(sink)
            assert got == model[start * PAGE : start * PAGE + len(got)]
    memory.check_guards()
    assert path.read_bytes() == model
    io.close_file(fd)
    assert io.close(DEADLINE_S)


@st.composite
def _split(draw, pages):
    sizes = []
    while pages:
        sizes.append(draw(st.integers(1, pages)))
        pages -= sizes[-1]
    return sizes


# calls on files


def test_small_writes_and_reads_at_once(io, fd):
    offsets = [0, 1, 100, PAGE - 1, PAGE, 2 * PAGE + 7, 3 * PAGE]
    sizes = [0, 1, 64, PAGE, PAGE + 1, 3 * PAGE - 5]
    for offset, num_bytes in itertools.product(offsets, sizes):
        before = os.urandom(2 * PAGE + 33)
        io.truncate(fd, 0)
        io.write_now(fd, before, 0)
        data = os.urandom(num_bytes)
        io.write_now(fd, data, offset)
        expected = bytearray(before.ljust(offset, b"\0") if num_bytes else before)
        expected[offset : offset + num_bytes] = data
        assert io.read_now(fd, 20 * PAGE, 0) == expected
        assert os.fstat(fd).st_size == len(expected)
        assert io.read_now(fd, num_bytes, offset) == data
        assert io.read_now(fd, 5, len(expected) - 2) == expected[-2:]
        assert io.read_now(fd, 5, len(expected) + 9000) == b""


def test_allocate_reserves_and_never_shortens(io, fd):
    io.write_now(fd, b"keep", 0)
    io.allocate(fd, MIB)
    status = os.fstat(fd)
    assert status.st_size == MIB
    assert status.st_blocks * 512 >= MIB
    io.allocate(fd, PAGE)
    assert os.fstat(fd).st_size == MIB
    assert io.read_now(fd, 8, 0) == b"keep\0\0\0\0"


def test_allocate_writes_where_nothing_can_be_reserved(io, fd, monkeypatch):
    def refuse(*_):
        io_calls.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(io_calls, "_fallocate", refuse)
    io.write_now(fd, b"keep", 0)
    io.allocate(fd, 2 * MIB + 5)
    status = os.fstat(fd)
    assert status.st_size == 2 * MIB + 5
    assert status.st_blocks * 512 >= 2 * MIB
    assert io.read_now(fd, 3 * MIB, 0) == b"keep".ljust(2 * MIB + 5, b"\0")


def test_allocate_leaves_the_length_after_an_error(io, fd, monkeypatch):
    def half(number, mode, offset, size):
        os.ftruncate(number, size // 2)
        io_calls.ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(io_calls, "_fallocate", half)
    io.write_now(fd, b"keep", 0)
    with pytest.raises(OSError, match="No space"):
        io.allocate(fd, MIB)
    assert os.fstat(fd).st_size == 4


def test_files_are_private_and_links_are_not_followed(io, tmp_path):
    fd = io.open(tmp_path / "file", write=True, create=True)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    assert not os.get_inheritable(fd)
    io.close_file(fd)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for write_ in (True, False):
        with pytest.raises(OSError, match="symbolic links"):
            io.open(tmp_path / "link", write=write_)
    with pytest.raises(FileExistsError):
        io.open(tmp_path / "link", write=True, create=True)
    with pytest.raises(FileNotFoundError):
        io.open(tmp_path / "none", write=True)


def test_names(io, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"1")
    new.write_bytes(b"2")
    io.rename(old, new)
    assert new.read_bytes() == b"1"
    io.sync_folder(tmp_path)
    io.unlink(new)
    io.unlink(new)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        io.rename(old, new)
    with pytest.raises(FileNotFoundError):
        io.sync_folder(tmp_path / "none")


def test_truncate_and_sync(io, fd):
    io.write_now(fd, b"x" * PAGE, 0)
    io.truncate(fd, 10)
    io.sync(fd)
    assert io.read_now(fd, PAGE, 0) == b"x" * 10
    io.truncate(fd, 20)
    assert io.read_now(fd, PAGE, 0) == b"x" * 10 + bytes(10)


# where direct I/O is refused


@pytest.fixture
def unknown_file_systems(monkeypatch):
    monkeypatch.setattr(io_calls, "_direct_on", {})


def _refuse_flag(monkeypatch):
    real = io_calls.fcntl.fcntl

    def fcntl(fd, command, argument=0):
        if command == io_calls.fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(io_calls.fcntl, "fcntl", fcntl)


def _refuse_transfer(monkeypatch):
    def pwritev(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(io_calls.os, "pwritev", pwritev)


@pytest.mark.usefixtures("unknown_file_systems")
@pytest.mark.parametrize("refuse", [_refuse_flag, _refuse_transfer])
def test_refused_direct_io_is_buffered_and_said_once(
    io, tmp_path, memory, monkeypatch, caplog, refuse
):
    refuse(monkeypatch)
    with caplog.at_level(logging.WARNING):
        fds = [io.open(tmp_path / name, write=True, create=True) for name in "abc"]
        fds.append(io.open(tmp_path / "a", write=False))
    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text
    assert "refuses direct I/O" in caplog.text
    monkeypatch.undo()
    for fd in fds[:3]:
        assert not io_calls.is_direct(fd)
        assert all(end.ok for end in run(io, write(fd, 1, memory.pieces(100))))
    for fd in fds:
        io.close_file(fd)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


@pytest.mark.usefixtures("unknown_file_systems")
def test_one_file_that_refuses_is_buffered_too(io, tmp_path, monkeypatch, caplog):
    io.close_file(io.open(tmp_path / "a", write=True, create=True))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        caplog.clear()
        _refuse_flag(patch)
        fds = [io.open(tmp_path / name, write=True, create=True) for name in "bc"]
    assert len([r for r in caplog.records if "refuses direct I/O" in r.getMessage()]) <= 1
    for fd in fds:
        assert not io_calls.is_direct(fd)
        io.close_file(fd)


@pytest.mark.usefixtures("unknown_file_systems")
def test_a_file_system_without_nameless_files_is_tried_by_a_read(io, tmp_path, monkeypatch):
    real = os.open

    def no_tmpfile(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(io_calls.os, "open", no_tmpfile)
    fd = io.open(tmp_path / "file", write=True, create=True)
    plain = io.open(tmp_path / "file", write=False, direct=False)
    assert not io_calls.is_direct(plain)
    assert io_calls.is_direct(fd) == io_calls._direct_on[os.fstat(fd).st_dev]
    io.close_file(fd)
    io.close_file(plain)


# what only AIO can meet


@pytest.fixture
def aio():
    try:
        io = AioIo(4, MIB)
    except OSError as error:
        pytest.skip(f"no Linux AIO here: {error}")
    yield io
    assert io.close(DEADLINE_S)


def _failing(monkeypatch, number, name, replies):
    """Let a system call fail with errors from *replies*; None: let it through."""
    real = getattr(io_aio, name)

    def syscall(called, *args):
        reply = next(replies, None) if called.value == number else None
        if reply is None:
            return real(called, *args)
        io_aio.ctypes.set_errno(reply)
        return -1

    monkeypatch.setattr(io_aio, name, syscall)


SUBMIT, GETEVENTS = (io_aio.NUMBERS.get(platform.machine(), (0,) * 4)[at] for at in (3, 2))


def test_a_busy_kernel_takes_nothing_for_now(aio, tmp_path, memory, monkeypatch):
    fd = aio.open(tmp_path / "file", write=True, create=True)
    requests = [write(fd, n * PAGE, memory.pieces(PAGE)) for n in range(3)]
    _failing(monkeypatch, SUBMIT, "_syscall", iter([errno.EAGAIN, None, errno.EAGAIN]))
    with pytest.raises(BlockingIOError, match="takes no I/O requests"):
        aio.submit(requests)
    assert aio.in_flight == 0
    assert aio.submit(requests[:1]) == 1
    assert aio.submit(requests[1:]) == 0
    assert aio.submit(requests[1:]) == 2
    assert len(reap_all(aio)) == 3
    aio.close_file(fd)


def test_interrupted_calls_are_made_again(aio, tmp_path, memory, monkeypatch):
    fd = aio.open(tmp_path / "file", write=True, create=True)
    _failing(monkeypatch, SUBMIT, "_syscall", iter([errno.EINTR, errno.EINTR]))
    _failing(monkeypatch, GETEVENTS, "_syscall_locked", iter([errno.EINTR]))
    (end,) = run(aio, write(fd, 0, memory.pieces(PAGE)))
    assert end.ok
    aio.close_file(fd)


def test_what_the_kernel_cannot_tell_is_raised_and_nothing_is_lost(
    aio, tmp_path, memory, monkeypatch
):
    fd = aio.open(tmp_path / "file", write=True, create=True)
    bad = write(10**6, 0, memory.pieces(PAGE))
    assert aio.submit([write(fd, 0, memory.pieces(PAGE)), bad]) == 2
    _failing(monkeypatch, GETEVENTS, "_syscall_locked", iter([errno.EFAULT]))
    with pytest.raises(OSError, match="Bad address"):
        aio.reap(1)
    assert sorted(end.errno for end in reap_all(aio)) == [0, errno.EBADF]
    aio.close_file(fd)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSYS, "this kernel has no AIO"),
        (errno.EAGAIN, "aio-max-nr"),
        (errno.EPERM, "sandbox"),
        (errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_set_up_that_fails_says_why(monkeypatch, number, said):
    def syscall(*_):
        io_aio.ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(io_aio, "_syscall", syscall)
    before = open_fds()
    with pytest.raises(OSError, match=said) as raised:
        AioIo(5)
    assert raised.value.errno == number
    assert open_fds() == before


def test_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr(io_aio.platform, "machine", lambda: "vax")
    with pytest.raises(OSError, match="x86_64 and aarch64; got vax: use threads"):
        AioIo()


def test_more_aio_than_the_kernel_has():
    with pytest.raises(OSError, match="could not be set up for 1073741824 requests"):
        AioIo(1 << 30)
