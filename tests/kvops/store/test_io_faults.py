"""Each switch does what its line in the table says, to what it says, and nothing else; then all is as before."""

import contextlib
import errno
import os
import secrets
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.store.file_io import Direction
from kvferry.kvops.store.io_aio import AioIo
from kvferry.kvops.store.io_choice import open_io
from kvferry.kvops.store.io_fault_table import Effect
from kvferry.kvops.store.io_faults import TABLE, FaultyIo, PowerCut
from kvferry.kvops.store.io_threads import ThreadIo

from .io_memory import DEADLINE_S, PAGE, POISON, Memory, open_fds, read, reap_all, run, write

SECTOR = 512

AIO = [
    "aio_setup_error", "aio_submit_error", "aio_submit_timeout", "aio_submit_partial",
    "aio_getevents_error", "aio_getevents_timeout", "aio_getevents_no_events",
    "aio_read_error", "aio_write_error", "aio_read_timeout", "aio_write_timeout",
]  # fmt: skip
ADAPTOR = [
    f"{batch}{way}_{what}"
    for batch in ("", "batch_")
    for way in ("read", "write")
    for what in ("error", "timeout")
]
DISKS = [
    "short_read", "short_write", "bit_flip_read", "bit_flip_write", "no_space", "io_error", "interrupted", "slow",
]  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Bench:
    """A faulty engine on a file of eight pages of b"o", and memory full of b"n" to write from."""

    def __init__(self, folder, inner, **options):
        self.clock = Clock()
        self.io = FaultyIo(inner, clock=self.clock, **options)
        self.path = folder / "file"
        self.memory = Memory(256 * PAGE)
        self.fd = self.io.open(self.path, write=True, create=True)
        self.io.write_now(self.fd, b"o" * 8 * PAGE, 0)
        self.io.counts.clear()

    def read(self, page, pages=1, owner=None):
        return read(self.fd, page * PAGE, self.memory.pieces(pages * PAGE), owner)

    def write(self, page, pages=1, owner=None):
        pieces = self.memory.pieces(pages * PAGE)
        self.memory.put(pieces, b"n" * pages * PAGE)
        return write(self.fd, page * PAGE, pieces, owner)

    def request(self, way, page, pages=1):
        return self.read(page, pages) if way == "read" else self.write(page, pages)

    def on_disk(self, page, pages=1):
        # past every fault
        return self.io.inner.read_now(self.fd, pages * PAGE, page * PAGE)

    def check_works(self):
        """Reads and writes succeed, and nothing is in flight that should not be."""
        assert self.io.in_flight == 0
        ends = run(self.io, self.write(7), self.read(7))
        assert [end.ok for end in ends] == [True, True]
        assert self.on_disk(7) == b"n" * PAGE
        assert self.io.in_flight == 0


@pytest.fixture(params=["aio", "threads"])
def bench(request, tmp_path, shm):
    """A bench on either engine, and two kinds of disk; at the end it works, and nothing of it is left open."""
    before = open_fds()
    folder = tmp_path if request.param == "aio" else shm
    try:
        inner = open_io(request.param, folder, depth=8, max_inflight_bytes=64 * PAGE)
    except OSError as error:
        pytest.skip(f"no {request.param} here: {error}")
    bench = Bench(folder, inner)
    yield bench
    bench.check_works()
    assert bench.io.open_files == {bench.fd: bench.path}
    bench.io.close_file(bench.fd)
    assert bench.io.close(DEADLINE_S)
    assert open_fds() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-io")]


def test_the_table_has_all_switches_of_the_older_design_and_what_disks_do():
    assert len(AIO) == 11
    assert len(ADAPTOR) == 8
    assert sorted(TABLE) == sorted([*AIO, *ADAPTOR, *DISKS])
    assert {switch.effect for switch in TABLE.values()} == set(Effect)


def test_without_a_fault_it_is_the_engine_below(bench):
    assert bench.io.name == f"faulty {bench.io.inner.name}"
    ends = run(bench.io, bench.write(0, 2), bench.read(4))
    assert all(end.ok for end in ends)
    assert bench.on_disk(0, 3) == b"n" * 2 * PAGE + b"o" * PAGE
    assert all(0 < end.request.submitted_s <= end.request.done_s for end in ends)


def test_unknown_names_get_a_hint(bench):
    with (
        pytest.raises(ValueError, match="got 'write_eror': did you mean 'write_error'"),
        bench.io.fault("write_eror"),
    ):
        pass


# one by one: errors


@pytest.mark.parametrize("number", [0, errno.ENOMEM], ids=["table's number", "another"])
@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize(
    ("name", "reaches_disk"),
    [("aio_{}_error", True), ("{}_error", False), ("batch_{}_error", False), ("io_error", False),
     ("interrupted", False)],
)  # fmt: skip
def test_a_request_that_fails(bench, name, reaches_disk, way, number):
    name = name.format(way)
    other = "write" if way == "read" else "read"
    with bench.io.fault(name, errno=number, match=lambda call: call.kind.endswith(way)) as fault:
        bad, good = bench.request(way, 0), bench.request(other, 1)
        ends = run(bench.io, bad, good)
    assert (ends[0].count, ends[0].errno) == (0, number or TABLE[name].errno)
    assert ends[1].ok
    assert fault.hits == 1
    if way == "write":
        assert bench.on_disk(0) == (b"n" if reaches_disk else b"o") * PAGE
    else:
        assert bench.memory.get(bad.pieces) == (b"o" if reaches_disk else bytes([POISON])) * PAGE


def test_no_space_meets_what_takes_some(bench):
    with bench.io.fault("no_space") as fault:
        (end, fine) = run(bench.io, bench.write(0), bench.read(0))
        for call in (
            lambda: bench.io.write_now(bench.fd, b"n", 0),
            lambda: bench.io.allocate(bench.fd, 99 * PAGE),
        ):
            with pytest.raises(OSError, match="No space left"):
                call()
        bench.io.read_now(bench.fd, 1, 0)
        bench.io.sync(bench.fd)
    assert end.errno == errno.ENOSPC
    assert fine.ok
    assert fault.hits == 3
    assert bench.on_disk(0) == b"o" * PAGE
    assert os.fstat(bench.fd).st_size == 8 * PAGE


@pytest.mark.parametrize("name", ["aio_setup_error", "aio_submit_error"])
def test_nothing_is_taken(bench, name, tmp_path):
    requests = [bench.write(0), bench.write(1)]
    with bench.io.fault(name):
        with pytest.raises(BlockingIOError):
            bench.io.submit(requests)
        assert bench.io.in_flight == 0
        if name == "aio_setup_error":
            with pytest.raises(BlockingIOError):
                bench.io.open(tmp_path / "other", write=True, create=True)
        else:
            bench.io.close_file(bench.io.open(bench.path, write=False))
    assert bench.on_disk(0, 2) == b"o" * 2 * PAGE
    assert bench.io.counts["write"] == 0
    assert run(bench.io, *requests)[1].ok


def test_a_part_is_taken(bench):
    requests = [bench.write(page) for page in range(5)]
    with bench.io.fault("aio_submit_partial", limit=2) as fault:
        assert bench.io.submit(requests) == 2
        assert bench.io.submit(requests[2:]) == 2
    with bench.io.fault("aio_submit_partial", limit=0):
        assert bench.io.submit(requests[4:]) == 0
    assert bench.io.submit(requests[4:]) == 1
    assert fault.hits == 2
    assert len(reap_all(bench.io)) == 5
    assert bench.on_disk(0, 5) == b"n" * 5 * PAGE


def test_reap_fails_and_loses_nothing(bench):
    bench.io.submit([bench.write(0)])
    with bench.io.fault("aio_getevents_error", count=2):
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                bench.io.reap(1)
        (end,) = reap_all(bench.io)
    assert end.ok


def test_reap_finds_nothing_for_a_while(bench):
    bench.io.submit([bench.write(0)])
    start = time.monotonic()
    with bench.io.fault("aio_getevents_no_events", count=3) as fault:
        assert [bench.io.reap(DEADLINE_S) for _ in range(3)] == [[], [], []]
        assert time.monotonic() - start < DEADLINE_S
        (end,) = reap_all(bench.io)
    assert end.ok
    assert fault.hits == 3


def test_faults_of_reap_are_not_spent_on_idle_ones(bench):
    with bench.io.fault("aio_getevents_error") as fault:
        assert bench.io.reap(0) == []
    assert fault.hits == 0


@pytest.mark.parametrize(
    "name", ["read_error", "write_error", "read_timeout", "write_timeout", "io_error"]
)
def test_reads_and_writes_at_once_fail(bench, name):
    number = errno.ETIMEDOUT if "timeout" in name else errno.EIO
    with bench.io.fault(name):
        if "write" not in name:
            with pytest.raises(OSError, match=os.strerror(number)):
                bench.io.read_now(bench.fd, 1, 0)
        if "read" not in name:
            with pytest.raises(OSError, match=os.strerror(number)):
                bench.io.write_now(bench.fd, b"n", 0)
    assert bench.on_disk(0) == b"o" * PAGE


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("open", lambda b: b.io.open(b.path, write=True)),
        ("allocate", lambda b: b.io.allocate(b.fd, 99 * PAGE)),
        ("truncate", lambda b: b.io.truncate(b.fd, 0)),
        ("sync", lambda b: b.io.sync(b.fd)),
        ("sync_folder", lambda b: b.io.sync_folder(b.path.parent)),
        ("rename", lambda b: b.io.rename(b.path, b.path.with_name("new"))),
        ("unlink", lambda b: b.io.unlink(b.path)),
    ],
)
def test_calls_on_files_fail_and_change_nothing(bench, kind, call):
    with bench.io.fault("io_error", match=lambda seen: seen.kind == kind) as fault:
        with pytest.raises(OSError, match="Input/output error"):
            call(bench)
        bench.io.read_now(bench.fd, 1, 0)
    assert fault.hits == 1
    assert bench.io.counts[kind] == 1
    assert bench.path.stat().st_size == 8 * PAGE
    assert [path.name for path in bench.path.parent.iterdir()] == ["file"]


# one by one: late


@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("ended_by", ["release", "the end of the block"])
@pytest.mark.parametrize(
    ("name", "bytes_move"),
    [
        ("aio_{}_timeout", "before"),
        ("aio_getevents_timeout", "before"),
        ("{}_timeout", "late"),
        ("batch_{}_timeout", "late"),
        ("aio_submit_timeout", "late"),
    ],
)
def test_a_timeout_is_late_and_comes_once(bench, name, way, bytes_move, ended_by):
    requests = [bench.request(way, page) for page in range(2)]
    done = {"write": b"n", "read": b"o"}[way]
    untouched = {"write": b"o", "read": bytes([POISON])}[way]

    def touched():
        if way == "write":
            return bench.on_disk(0, 2)
        return bench.memory.get(requests[0].pieces) + bench.memory.get(requests[1].pieces)

    with bench.io.fault(name.format(way)) as fault:
        assert bench.io.submit(requests) == 2
        deadline = time.monotonic() + DEADLINE_S
        while len(fault.held) < 2 and time.monotonic() < deadline:
            assert bench.io.reap(0.01) == []
        assert bench.io.reap(0) == []
        assert bench.io.in_flight == 2
        assert touched() == (done if bytes_move == "before" else untouched) * 2 * PAGE
        assert not bench.io.close(0)
        bench.io.closed = False
        if ended_by == "release":
            fault.release()
            if "getevents" not in name:
                assert len(reap_all(bench.io, 2 if bytes_move == "late" else 0)) in (0, 2)
    ends = reap_all(bench.io)
    assert bench.io.in_flight == 0
    assert bench.io.reap(0) == []
    assert all(end.ok for end in ends)
    assert touched() == done * 2 * PAGE


def test_release_wakes_who_waits(bench):
    with bench.io.fault("write_timeout") as fault:
        bench.io.submit([bench.write(0)])
        releasing = threading.Thread(target=fault.release)
        releasing.start()
        start = time.monotonic()
        while not (ends := bench.io.reap(DEADLINE_S)):
            assert time.monotonic() - start < DEADLINE_S / 2
        releasing.join()
    assert ends[0].ok


def test_held_requests_count_against_the_depth(bench):
    with bench.io.fault("write_timeout"):
        assert bench.io.submit([bench.write(0) for _ in range(10)]) == bench.io.depth == 8
        assert bench.io.submit([bench.read(0)]) == 0
    assert len(reap_all(bench.io)) == 8


def test_a_slow_disk_by_the_clock(bench):
    with bench.io.fault("slow", seconds=5, match=lambda call: call.kind == "write") as fault:
        bench.io.submit([bench.write(0), bench.read(1)])
        (end,) = reap_all(bench.io, 1)
        assert end.request.direction is Direction.READ
        while bench.on_disk(0) != b"n" * PAGE:
            assert bench.io.reap(0.01) == []
        assert bench.io.reap(0.01) == []
        bench.clock.now += 5
        (end,) = reap_all(bench.io, 1)
        bench.io.submit([bench.write(0)])
        assert bench.io.reap(0.01) == []
    # the fault has ended: nobody turns the clock any more
    assert len(reap_all(bench.io)) == 1
    assert end.ok
    assert fault.hits == 2


def test_wake_reaches_a_reap_that_waits_for_a_slow_disk(bench):
    with bench.io.fault("slow", seconds=1000):
        bench.io.submit([bench.write(0)])
        bench.io.wake()
        start = time.monotonic()
        assert bench.io.reap(DEADLINE_S) == []
        assert time.monotonic() - start < DEADLINE_S / 2
    reap_all(bench.io)


# one by one: wrong


@pytest.mark.parametrize(
    ("way", "pages", "moved"), [("read", 5, 2), ("write", 5, 2), ("read", 1, 0), ("write", 1, 0)]
)
def test_short(bench, way, pages, moved):
    request = bench.request(way, 0, pages)
    with bench.io.fault(f"short_{way}"):
        (end,) = run(bench.io, request)
    assert (end.count, end.errno, end.ok) == (moved * PAGE, 0, False)
    if way == "write":
        assert bench.on_disk(0, pages) == b"n" * moved * PAGE + b"o" * (pages - moved) * PAGE
    else:
        rest = bytes([POISON]) * (pages - moved) * PAGE
        assert bench.memory.get(request.pieces) == b"o" * moved * PAGE + rest


def _bits(data, expected):
    return sum((a ^ b).bit_count() for a, b in zip(data, expected, strict=True))


def test_one_bit_of_a_read_is_wrong(bench):
    pieces = bench.memory.pieces(PAGE, 2 * PAGE)
    with bench.io.fault("bit_flip_read"):
        (end,) = run(bench.io, read(bench.fd, 0, pieces))
        assert _bits(bench.io.read_now(bench.fd, 50, 0), b"o" * 50) == 1
        assert bench.io.read_now(bench.fd, 5, 99 * PAGE) == b""
    assert end.ok
    assert _bits(bench.memory.get(pieces), b"o" * 3 * PAGE) == 1
    assert bench.on_disk(0, 8) == b"o" * 8 * PAGE


def test_one_bit_of_a_write_is_wrong_and_the_memory_is_left_alone(bench):
    request = bench.write(0, 3)
    with bench.io.fault("bit_flip_write"):
        (end,) = run(bench.io, request)
        bench.io.write_now(bench.fd, b"n" * 50, 5 * PAGE)
    assert end.ok
    assert end.request is request
    assert bench.memory.get(request.pieces) == b"n" * 3 * PAGE
    assert _bits(bench.on_disk(0, 3), b"n" * 3 * PAGE) == 1
    assert _bits(bench.on_disk(5)[:50], b"n" * 50) == 1


# which and how often


def test_every_and_count_and_match(bench):
    with bench.io.fault(
        "write_error", every=2, count=2, match=lambda call: call.offset < 7 * PAGE
    ) as fault:
        ends = run(bench.io, *(bench.write(page) for page in range(8)))
    assert [end.ok for end in ends] == [True, False, True, False, True, True, True, True]
    assert (fault.hits, fault.seen) == (2, 4)


def test_match_sees_the_file(bench, tmp_path):
    other = bench.io.open(tmp_path / "other", write=True, create=True)
    seen = []
    with bench.io.fault(
        "write_error", match=lambda call: seen.append(call) or call.path.name == "other"
    ):
        ends = run(bench.io, bench.write(0), write(other, PAGE, bench.memory.pieces(PAGE)))
    assert [end.ok for end in ends] == [True, False]
    assert [(call.kind, call.path, call.offset, call.num_bytes) for call in seen] == [
        ("write", bench.path, 0, PAGE),
        ("write", tmp_path / "other", PAGE, PAGE),
    ]
    bench.io.close_file(other)


def test_a_batch_fault_meets_one_direction_of_one_submit(bench):
    with bench.io.fault("batch_write_error", every=2):
        first = run(bench.io, bench.write(0), bench.write(1))
        second = run(bench.io, bench.write(2), bench.read(3), bench.write(4))
    assert [end.ok for end in first + second] == [True, True, False, True, False]


def test_of_two_faults_the_first_that_applies(bench):
    with bench.io.fault("write_error", errno=1, count=1), bench.io.fault("no_space"):
        ends = run(bench.io, bench.write(0), bench.write(1))
    assert [end.errno for end in ends] == [1, errno.ENOSPC]


def test_counts(bench):
    run(bench.io, bench.write(0, 2), bench.write(2), bench.read(3))
    bench.io.write_now(bench.fd, b"12345", 0)
    bench.io.read_now(bench.fd, 7, 0)
    with bench.io.fault("write_error"):
        run(bench.io, bench.write(0))
    assert bench.io.counts == {
        "write": 3, "write_bytes": 4 * PAGE + 5, "write_now": 1,
        "read": 1, "read_bytes": PAGE + 7, "read_now": 1,
    }  # fmt: skip


def test_bytes_that_are_refused_by_the_engine_below(bench):
    """A descriptor that is closed: the same error as without faults."""
    closed = os.dup(bench.fd)
    os.close(closed)
    (end,) = run(bench.io, write(closed, 0, bench.memory.pieces(PAGE)))
    assert end.errno == errno.EBADF


def test_the_same_seed_flips_the_same_bits(tmp_path):
    images = []
    for seed in (1, 1, 2):
        folder = tmp_path / str(len(images))
        folder.mkdir()
        bench = Bench(folder, ThreadIo(threads=1), seed=seed)
        with bench.io.fault("bit_flip_write"):
            run(bench.io, *(bench.write(page) for page in range(8)))
        images.append(bench.on_disk(0, 8))
        bench.io.close_file(bench.fd)
        assert bench.io.close(DEADLINE_S)
    assert images[0] == images[1] != images[2]


# power cuts


@pytest.fixture
def powered(shm):
    """Benches whose power can be cut; nothing of them is left open."""
    before, threads = open_fds(), threading.active_count()
    benches = []

    def one(seed=0, inner=None):
        folder = shm / f"disk-{len(benches)}"
        folder.mkdir()
        bench = Bench(folder, inner or ThreadIo(threads=2), seed=seed, power_cuts=True)
        bench.io.sync(bench.fd)
        bench.io.sync_folder(folder)
        benches.append(bench)
        return bench

    yield one
    for bench in benches:
        bench.io.close_file(bench.fd)
        assert bench.io.close(DEADLINE_S)
    assert open_fds() == before
    assert threading.active_count() == threads


def test_every_call_after_the_cut_says_so(powered):
    bench = powered()
    bench.io.cut_after(2)
    run(bench.io, bench.write(0))
    bench.io.read_now(bench.fd, 1, 0)
    bench.io.truncate(bench.fd, 8 * PAGE)
    for call in (
        lambda: bench.io.submit([bench.read(0)]),
        lambda: bench.io.reap(0),
        lambda: bench.io.open(bench.path, write=False),
        lambda: bench.io.read_now(bench.fd, 1, 0),
        lambda: bench.io.write_now(bench.fd, b"n", 0),
        lambda: bench.io.allocate(bench.fd, 1),
        lambda: bench.io.truncate(bench.fd, 1),
        lambda: bench.io.sync(bench.fd),
        lambda: bench.io.sync_folder(bench.path.parent),
        lambda: bench.io.rename(bench.path, bench.path),
        lambda: bench.io.unlink(bench.path),
    ):
        with pytest.raises(PowerCut, match="the power was cut after change"):
            call()
    assert bench.path.stat().st_size == 8 * PAGE
    bench.io.crash_image()


def test_the_power_can_be_cut_at_each_change(powered):
    """What a sweep over crash points does: all changes before the cut were made, none behind it."""
    for changes in range(5):
        bench = powered(seed=changes)
        start = bench.io.changes
        bench.io.cut_after(changes)
        for _ in range(changes):
            bench.io.write_now(bench.fd, b"n", 0)
        with pytest.raises(PowerCut):
            bench.io.write_now(bench.fd, b"n", 0)
        assert bench.io.changes - start == changes
        bench.io.crash_image()


def test_a_reap_that_waits_learns_of_the_cut(powered):
    bench = powered()
    cutting = threading.Thread(target=bench.io.cut_after, args=(0,))
    cutting.start()
    start = time.monotonic()
    # woken before the cut, or by it
    with contextlib.suppress(PowerCut):
        bench.io.reap(DEADLINE_S)
    with pytest.raises(PowerCut):
        bench.io.reap(DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S / 2
    cutting.join()


def test_what_was_synced_stays_and_what_was_not_is_kept_lost_or_torn(powered):
    fates = set()
    for seed in range(24):
        bench = powered(seed)
        run(bench.io, bench.write(0, 2))
        bench.io.sync(bench.fd)
        run(bench.io, bench.write(4, 2))
        bench.io.crash_image()
        image = bench.path.read_bytes()
        assert image[: 4 * PAGE] == b"n" * 2 * PAGE + b"o" * 2 * PAGE
        assert image[6 * PAGE :] == b"o" * 2 * PAGE
        sectors = {image[at : at + SECTOR] for at in range(4 * PAGE, 6 * PAGE, SECTOR)}
        assert sectors <= {b"o" * SECTOR, b"n" * SECTOR}
        fates.add("torn" if len(sectors) == 2 else sectors.pop()[:1])
    assert fates == {b"o", b"n", "torn"}


def test_the_same_seed_leaves_the_same_image(powered):
    images = []
    for seed in (3, 3, 4):
        bench = powered(seed)
        run(bench.io, *(bench.write(page) for page in range(6)))
        bench.io.crash_image()
        images.append(bench.path.read_bytes())
    assert images[0] == images[1] != images[2]


@pytest.mark.parametrize("make", [ThreadIo, AioIo])
def test_writes_in_flight_are_not_covered_by_a_sync(powered, make):
    """Nobody may rely on a sync for what has not been reported done."""
    try:
        seen = set()
        for seed in range(12):
            bench = powered(seed, make())
            bench.io.submit([bench.write(0)])
            bench.io.sync(bench.fd)
            bench.io.crash_image()
            seen.add(bench.path.read_bytes()[:1])
    except OSError as error:
        pytest.skip(f"no {make.__name__} here: {error}")
    assert seen == {b"o", b"n"}


def test_a_held_write_never_happens_after_the_cut(powered):
    for seed in range(4):
        bench = powered(seed)
        with bench.io.fault("write_timeout"):
            bench.io.submit([bench.write(0)])
            bench.io.cut_after(0)
        bench.io.crash_image()
        assert bench.path.read_bytes() == b"o" * 8 * PAGE


def test_a_failed_write_is_covered_by_the_next_sync(powered):
    for seed in range(8):
        bench = powered(seed)
        with bench.io.fault("aio_write_error"):
            run(bench.io, bench.write(0))
        run(bench.io, bench.write(0))
        bench.io.sync(bench.fd)
        bench.io.crash_image()
        assert bench.path.read_bytes()[:PAGE] == b"n" * PAGE


def test_lengths_are_old_or_new(powered):
    sizes = set()
    for seed in range(24):
        bench = powered(seed)
        bench.io.truncate(bench.fd, PAGE)
        bench.io.write_now(bench.fd, b"n" * PAGE, 2 * PAGE)
        bench.io.crash_image()
        image = bench.path.read_bytes()
        sizes.add(len(image) // PAGE)
        assert image[:PAGE] == b"o" * PAGE
        assert set(image[PAGE:]) <= set(b"on\0")
    assert sizes == {1, 3, 8}


def test_an_allocation_may_be_lost(powered):
    sizes = set()
    for seed in range(12):
        bench = powered(seed)
        bench.io.allocate(bench.fd, 20 * PAGE)
        bench.io.crash_image()
        image = bench.path.read_bytes()
        assert image == (b"o" * 8 * PAGE).ljust(len(image), b"\0")
        sizes.add(len(image) // PAGE)
    assert sizes == {8, 20}


def _names(folder):
    return {path.name: path.read_bytes()[:1] for path in folder.iterdir()}


def test_names_go_back_in_order_up_to_a_point(powered):
    """A new file is written, synced, put in the place of the old one, and a third is deleted: a journal's life."""
    images = []
    for seed in range(40):
        bench = powered(seed)
        folder = bench.path.parent
        (folder / "third").write_bytes(b"t" * PAGE)
        fresh = bench.io.open(folder / "fresh.tmp", write=True, create=True)
        bench.io.write_now(fresh, b"f" * PAGE, 0)
        bench.io.sync(fresh)
        bench.io.rename(folder / "fresh.tmp", bench.path)
        bench.io.unlink(folder / "third")
        bench.io.unlink(folder / "never there")
        bench.io.close_file(fresh)
        bench.io.crash_image()
        names = _names(folder)
        if names not in images:
            images.append(names)
        assert names.get("third", b"t") == b"t"
        assert (folder / "third").stat().st_size == PAGE if "third" in names else True
    expected = [
        {"file": b"o", "third": b"t"},
        {"file": b"o", "third": b"t", "fresh.tmp": b"f"},
        {"file": b"f", "third": b"t"},
        {"file": b"f"},
    ]
    assert len(images) == 4
    assert all(names in images for names in expected)


def test_names_that_were_synced_stay(powered):
    for seed in range(6):
        bench = powered(seed)
        folder = bench.path.parent
        (folder / "third").write_bytes(b"t")
        bench.io.rename(folder / "third", folder / "fourth")
        bench.io.unlink(folder / "fourth")
        with pytest.raises(FileNotFoundError):
            bench.io.rename(folder / "fourth", bench.path)
        bench.io.close_file(bench.io.open(folder / "fifth", write=True, create=True))
        bench.io.sync_folder(Path(os.path.relpath(folder)))
        bench.io.crash_image()
        assert _names(folder) == {"file": b"o", "fifth": b""}


def test_what_is_synced_through_one_descriptor_is_synced(powered):
    for seed in range(6):
        bench = powered(seed)
        second = bench.io.open(bench.path, write=True)
        bench.io.write_now(second, b"n" * PAGE, 0)
        bench.io.close_file(second)
        bench.io.sync(bench.fd)
        bench.io.crash_image()
        assert bench.path.read_bytes()[:PAGE] == b"n" * PAGE


def test_appends_in_one_sector_are_never_mixed(powered):
    """Records shorter than a sector: a later one is never there without an earlier one in the same sector."""
    for seed in range(20):
        bench = powered(seed)
        for number in range(20):
            bench.io.write_now(bench.fd, bytes([number + 1]) * 64, 8 * PAGE + number * 64)
        bench.io.crash_image()
        tail = bench.path.read_bytes()[8 * PAGE :]
        for at in range(0, len(tail), SECTOR):
            records = [tail[b : b + 64] for b in range(at, min(at + SECTOR, len(tail)), 64)]
            present = [record != bytes(len(record)) for record in records]
            assert present == sorted(present, reverse=True)


def test_without_power_cuts_nothing_is_remembered(bench):
    with pytest.raises(ValueError, match="power_cuts must be True"):
        bench.io._log.cut(None)
    assert bench.io._log._files == {}
    assert bench.io._log._names == []


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 9), st.integers(1, 4)),
            st.tuples(st.just("small"), st.integers(0, 9 * 8), st.integers(1, 700)),
            st.tuples(st.just("sync"), st.just(0), st.just(0)),
        ),
        max_size=12,
    ),
    seed=st.integers(0, 1000),
)
def test_each_sector_is_one_of_its_versions(shm, steps, seed):
    folder = shm / secrets.token_hex(8)
    folder.mkdir()
    bench = Bench(folder, ThreadIo(threads=1), seed=seed, power_cuts=True)
    bench.io.sync(bench.fd)
    bench.io.sync_folder(folder)
    image = bytearray(b"o" * 8 * PAGE)
    sizes = {len(image)}
    versions = {}

    def remember():
        padded = image.ljust(16 * PAGE, b"\0")
        for at in range(0, len(padded), SECTOR):
            versions.setdefault(at, set()).add(bytes(padded[at : at + SECTOR]))
        sizes.add(len(image))

    remember()
    for number, (kind, place, size) in enumerate(steps):
        data = bytes([number + 1])
        if kind == "write":
            pieces = bench.memory.pieces(size * PAGE)
            bench.memory.put(pieces, data * size * PAGE)
            assert run(bench.io, write(bench.fd, place * PAGE, pieces))[0].ok
            start, data = place * PAGE, data * size * PAGE
        elif kind == "small":
            start, data = place * SECTOR + 100, data * size
            bench.io.write_now(bench.fd, data, start)
        else:
            bench.io.sync(bench.fd)
            versions.clear()
            sizes.clear()
            remember()
            continue
        image[:] = image.ljust(start, b"\0")
        image[start : start + len(data)] = data
        remember()
    bench.io.crash_image()
    after = bench.path.read_bytes()
    assert len(after) in sizes
    for at in range(0, len(after), SECTOR):
        sector = after[at : at + SECTOR]
        assert any(sector == version[: len(sector)] for version in versions[at])
    assert bench.io.close(DEADLINE_S)
