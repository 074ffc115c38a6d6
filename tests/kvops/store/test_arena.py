"""Who comes first creates the arena, who comes later attaches; what can't be used is refused in one sentence."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from kvferry.kvops.errors import (
    ArenaBusyError,
    ArenaDamagedError,
    ArenaError,
    ArenaMismatchError,
    ArenaSpaceError,
)
from kvferry.kvops.store import arena as arena_module
from kvferry.kvops.store import format as fmt
from kvferry.kvops.store import locks, memory
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.private_arena import private_arena_path, sweep_private_arenas
from kvferry.kvops.store.store import Store

from .chunks import ARENA_BYTES, MIB, NAMESPACE, key, put, read

IMPORTS = "from kvferry.kvops.store.arena import Arena\nfrom kvferry.kvops.store.store import Store\nimport os\n"


def geometry(arena):
    return arena.arena_bytes, arena.slab_bytes, arena.slab_count, arena.data, arena.span_table


# --- creating --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arena_bytes",
    [
        pytest.param(ARENA_BYTES, id="least"),
        pytest.param(ARENA_BYTES + 1, id="odd"),
        pytest.param(24 * MIB + 4096, id="no-power-of-two"),
        pytest.param(64 * MIB, id="64MiB"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "memfd"])
def test_a_new_arena_is_formatted(open_arena, path, kind, arena_bytes):
    arena = open_arena(path if kind == "file" else None, arena_bytes)
    size = fmt.round_up(arena_bytes, fmt.PAGE)
    assert len(arena.buffer) == len(arena.array) == arena.arena_bytes == size
    assert bytes(arena.buffer[:8]) == fmt.MAGIC
    assert arena.data % fmt.PAGE == 0
    index = arena.span_table + fmt.round_up(arena.slab_count * fmt.SPAN_ENTRY_BYTES, fmt.PAGE)
    assert arena.words[fmt.INDEX_OFFSET_WORD] == index
    assert index + fmt.INDEX_SLOTS_MIN * fmt.INDEX_SLOT_BYTES <= arena.data
    spare = size - arena.data - arena.slab_count * arena.slab_bytes
    assert 0 <= spare < arena.slab_bytes
    assert not any(arena.buffer[120 : arena.span_table])
    if kind == "file":
        assert path.stat().st_size == size
        assert path.stat().st_mode & 0o7777 == 0o600
        assert path.stat().st_blocks * 512 >= size


def test_two_mappings_are_one_memory(open_arena, path):
    first, second = open_arena(path), open_arena(path)
    assert geometry(first) == geometry(second)
    first.buffer[first.data] = 0x5A
    assert second.array[second.data] == 0x5A
    assert first.address != second.address


def test_a_memfd_belongs_to_its_process(open_arena):
    first, second = open_arena(), open_arena()
    first.buffer[first.data] = 0x5A
    assert second.buffer[second.data] == 0
    assert first.path is None
    first.unlink()


def test_the_mapping_outlives_the_name(open_arena, path):
    first = open_arena(path)
    second = open_arena(path)
    first.unlink()
    assert not path.exists()
    first.unlink()
    first.buffer[first.data] = 0x5A
    assert second.buffer[second.data] == 0x5A
    third = open_arena(path)
    assert third.buffer[third.data] == 0, "the name was free: this is another arena"


def test_close_twice_and_views_are_gone(path):
    with Arena.open(path, ARENA_BYTES, session="s") as arena:
        arena.attach()
        arena.close()
    assert arena.is_closed
    with pytest.raises(ValueError, match="released"):
        arena.buffer[0]
    with Arena.open(path, ARENA_BYTES, session="s") as again:
        assert all(pid == 0 for pid, *_ in again.attached())


@pytest.mark.parametrize(
    "content", [b"", fmt.MAGIC_UNFINISHED, fmt.MAGIC_UNFINISHED + b"\xa5" * 70_000]
)
def test_what_a_dead_creator_left_is_made_anew(open_arena, path, content):
    path.touch(0o600)
    path.write_bytes(content)
    arena = open_arena(path)
    assert bytes(arena.buffer[:8]) == fmt.MAGIC
    assert not any(arena.buffer[128 : arena.data])


# --- refusing --------------------------------------------------------------------------------------------------


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def cut(path, size):
    os.truncate(path, size)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        pytest.param(lambda p: overwrite(p, 0, b"PK\3\4"), ArenaMismatchError, "must be a kvferry arena or not exist", id="foreign-magic"),
        pytest.param(lambda p: overwrite(p, 8, b"\2\0\0\0"), ArenaMismatchError, "has format version 2, this kvferry reads version 1", id="other-version"),
        pytest.param(lambda p: overwrite(p, 12, b"\0\0\0\0"), ArenaDamagedError, "damaged superblock; delete", id="check"),
        pytest.param(lambda p: overwrite(p, 40, b"\xff" * 8), ArenaDamagedError, "damaged superblock; delete", id="geometry"),
        pytest.param(lambda p: cut(p, ARENA_BYTES // 2), ArenaDamagedError, "damaged superblock; delete", id="cut-in-half"),
        pytest.param(lambda p: cut(p, 4096), ArenaDamagedError, "damaged superblock; delete", id="cut-to-the-superblock"),
        pytest.param(lambda p: cut(p, 64), ArenaDamagedError, "damaged superblock; delete", id="cut-to-64"),
        pytest.param(lambda p: cut(p, 63), ArenaDamagedError, "cut off in its superblock; delete", id="cut-to-63"),
        pytest.param(lambda p: cut(p, 8), ArenaDamagedError, "cut off in its superblock; delete", id="cut-to-the-magic"),
        pytest.param(lambda p: cut(p, 7), ArenaMismatchError, "must be a kvferry arena or not exist", id="cut-in-the-magic"),
        pytest.param(lambda p: cut(p, 2 * ARENA_BYTES), ArenaDamagedError, "damaged superblock; delete", id="grown"),
        pytest.param(lambda p: overwrite(p, 88, b"\xff" * 8), ArenaDamagedError, "has had .* owners; delete", id="epoch"),
        pytest.param(lambda p: os.chmod(p, 0o640), ArenaMismatchError, "its mode 0640 lets others in", id="mode"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_our_arena_is_refused_and_kept(path, damage, error, message):
    with Arena.open(path, ARENA_BYTES, session="s") as arena:
        put(Store.open(arena, namespace=NAMESPACE), [key(1)], 4096)
    damage(path)
    before = path.read_bytes()
    with (
        pytest.raises(error, match=message),
        Arena.open(path, ARENA_BYTES, session="s") as arena,
    ):
        Store.open(arena, namespace=NAMESPACE)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"x", b"#!/bin/sh\n", b"\0" * 4096, b"KVFERRY2" + b"\0" * 4096]
)
def test_a_foreign_file_is_refused_and_kept(path, content):
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(
        ArenaMismatchError, match=f"a file of {len(content)} bytes that begins with"
    ):
        Arena.open(path, ARENA_BYTES, session="s")
    assert path.read_bytes() == content


@pytest.mark.parametrize("arena_bytes", [17 * MIB, 32 * MIB])
def test_another_size_is_refused(open_arena, path, arena_bytes):
    store = Store.open(open_arena(path), namespace=NAMESPACE)
    put(store, [key(1)], 4096)
    with pytest.raises(
        ArenaMismatchError,
        match=f"arena_bytes must be {ARENA_BYTES}, the size of the arena that rests in .*; got {arena_bytes}",
    ):
        Arena.open(path, arena_bytes, session="s")
    assert read(store, [key(1)], 4096) != [None]


@pytest.mark.parametrize("arena_bytes", [-1, 0, 4096, 16 * MIB - 1])
def test_an_arena_that_is_too_small_is_refused(path, arena_bytes):
    with pytest.raises(ArenaMismatchError, match=f"at least 16777216 .16 MiB.; got {arena_bytes}"):
        Arena.open(path, arena_bytes, session="s")
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "memfd"])
def test_an_arena_that_is_too_large_is_refused(path, kind):
    with pytest.raises(ArenaSpaceError, match="must fit into the machine's available memory"):
        Arena.open(path if kind == "file" else None, 1 << 50, session="s")
    assert not path.exists()


def test_a_cgroup_that_is_too_small_is_refused(path, monkeypatch):
    monkeypatch.setattr(memory, "_room_left", lambda: [("cgroup memory limit (x)", 8 * MIB)])
    with pytest.raises(
        ArenaSpaceError, match=r"cgroup memory limit .x., which has 8 MiB left; got 16 MiB"
    ):
        Arena.open(path, ARENA_BYTES, session="s")
    assert not path.exists()


def test_a_full_file_system_is_refused(path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ArenaSpaceError, match=r"must fit into .*; got 16 MiB: No space left on device"
    ):
        Arena.open(path, ARENA_BYTES, session="s")
    assert not path.exists()


@pytest.mark.parametrize("error", [ArenaSpaceError, KeyboardInterrupt])
def test_a_failed_creation_gives_its_memory_back(path, monkeypatch, error):
    class Failing:
        def __init__(self, *_, **__):
            raise error

    monkeypatch.setattr(memory, "Mapping", Failing)
    with pytest.raises(error):
        Arena.open(path, ARENA_BYTES, session="s")
    assert not path.exists()


FULL_TMPFS = """
import os, shutil, subprocess, sys
from kvferry.kvops.errors import ArenaSpaceError
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.store import Store

def refused(name, size):
    try:
        Arena.open(f"{sys.argv[1]}/{name}", size, session="s")
    except ArenaSpaceError as error:
        return "No space left on device" in str(error)

MIB = 1 << 20
assert refused("large", 64 * MIB)
assert os.listdir(sys.argv[1]) == []
with Arena.open(sys.argv[1] + "/first", 16 * MIB, session="s") as arena:
    Store.open(arena, namespace=b"n" * 16).put([b"k" * 20], [b"x" * 4096])
assert refused("second", 16 * MIB)
assert os.listdir(sys.argv[1]) == ["first"]
# not one page left
fd = os.open(sys.argv[1] + "/filler", os.O_RDWR | os.O_CREAT)
try:
    while os.write(fd, bytes(4096)):
        pass
except OSError:
    pass
assert refused("nothing", 16 * MIB)
assert sorted(os.listdir(sys.argv[1])) == ["filler", "first"]
os.unlink(sys.argv[1] + "/filler")
os.close(fd)
# a copy with holes takes little room, until somebody touches it
subprocess.run(["cp", "--sparse=always", sys.argv[1] + "/first", sys.argv[1] + "/copy"], check=True)
assert os.stat(sys.argv[1] + "/copy").st_blocks * 512 < MIB
assert refused("copy", 16 * MIB)
assert os.stat(sys.argv[1] + "/copy").st_size == 16 * MIB
os.unlink(sys.argv[1] + "/first")
with Arena.open(sys.argv[1] + "/copy", 16 * MIB, session="s") as arena:
    out = bytearray(4096)
    assert Store.open(arena, namespace=b"n" * 16).get([b"k" * 20], [out]) == [True]
    assert out == b"x" * 4096
print("passed")
"""


def test_a_small_tmpfs_of_our_own(shm):
    mount = f'mount -t tmpfs -o size=20m none "{shm}" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", FULL_TMPFS, shm]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    assert done.stdout == "passed\n", done.stderr


def test_a_sparse_copy_is_filled_before_use(open_arena, path):
    store = Store.open(open_arena(path), namespace=NAMESPACE)
    put(store, [key(1)], 100_000)
    copy = path.with_name("copy.arena")
    subprocess.run(["cp", "--sparse=always", path, copy], check=True)
    assert copy.stat().st_blocks * 512 < ARENA_BYTES
    again = Store.open(open_arena(copy), namespace=NAMESPACE)
    assert copy.stat().st_blocks * 512 >= ARENA_BYTES
    assert read(again, [key(1)], 100_000) == read(store, [key(1)], 100_000) != [None]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("there", [False, True], ids=["new", "resting"])
def test_a_place_of_somebody_elses_is_refused(path, child, there):
    if there:
        Arena.open(path, ARENA_BYTES, session="s").close()
    path.parent.chmod(0o755)
    answer = (
        child(IMPORTS)
        .wait_ready()
        .ask(
            f"os.setuid(65534)\n"
            f"try: Arena.open({str(path)!r}, {ARENA_BYTES}, session='s')\n"
            f"except Exception as error: print(type(error).__name__, error, flush=True)"
        )
    )
    expected = "ArenaSpaceError arena_path must be a file that can be created and written; got"
    assert answer == f"{expected} {path}: Permission denied"
    assert path.exists() == there


def test_an_arena_on_disk_is_warned_about(open_arena, path, monkeypatch, caplog):
    monkeypatch.setattr(memory, "file_system_of", lambda _: "ext4")
    open_arena(path)
    assert "lies on ext4, not on tmpfs" in caplog.text
    caplog.clear()
    open_arena(path)
    assert not caplog.records


# --- several processes -----------------------------------------------------------------------------------------


def test_six_processes_race_for_one_path(path, child):
    line = (
        f"a = Arena.open({str(path)!r}, {32 * MIB}, session='s'); "
        "print(a.attach(), a.words[7], os.fstat(a._fd).st_ino, flush=True)"
    )
    children = [child(IMPORTS) for _ in range(6)]
    for one in children:
        one.wait_ready()
    for one in children:
        one.send(line)
    seen = [one.answer().split() for one in children]
    assert sorted(int(slot) for slot, *_ in seen) == list(range(6))
    assert len({created for _, created, _ in seen}) == 1
    assert {int(inode) for *_, inode in seen} == {path.stat().st_ino}


def test_a_race_with_those_who_remove_it(path, child):
    """Some create and remove, some create and remember: nobody is left with a file that has no name."""
    children = [child(IMPORTS) for _ in range(3)]
    for at, one in enumerate(children):
        one.wait_ready()
        one.send(
            f"for n in range(8):\n"
            f"    a = Arena.open({str(path)!r}, {ARENA_BYTES}, session='s', populate=False)\n"
            f"    if {at % 2}: a.unlink()\n"
            f"    a.close()\n"
            f"print('done', flush=True)"
        )
    assert [one.answer() for one in children] == ["done"] * 3
    path.unlink(missing_ok=True)


def test_killed_creators_leave_a_usable_path(storm):
    assert "10 rounds" in storm("storm_create.py", "--runs", 10)


def test_the_creators_lock_is_waited_for(path, monkeypatch):
    fd = memory.open_file(path)
    locks.try_lock(fd, locks.Lock.CREATE)
    monkeypatch.setattr(arena_module, "CREATE_TIMEOUT_S", 0.0)
    try:
        with pytest.raises(ArenaBusyError, match="another process has been creating it for 0 s"):
            Arena.open(path, ARENA_BYTES, session="s")
    finally:
        os.close(fd)
    Arena.open(path, ARENA_BYTES, session="s").close()


def test_a_name_that_changes_hands_while_waiting(path, monkeypatch):
    """The creator fails and removes the file; who waited for its lock starts again with the new file."""
    stale = memory.open_file(path)
    path.unlink()
    files = iter([stale])
    real = memory.open_file
    monkeypatch.setattr(memory, "open_file", lambda p: next(files, None) or real(p))
    with Arena.open(path, ARENA_BYTES, session="s"):
        assert path.stat().st_size == ARENA_BYTES
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(stale)


# --- attaching and owning --------------------------------------------------------------------------------------


def test_attach_enters_this_process_once(open_arena, path):
    arena = open_arena(path, session="engine")
    assert arena.attach() == arena.attach() == 0
    pid, start, session, *counts = arena.attached()[0]
    assert (pid, session) == (os.getpid(), arena.session)
    assert start > 0
    assert counts == [0] * 5
    assert arena.workers_alive() == 1
    assert arena.attach_word == fmt.ATTACH_OFFSET // 8
    assert open_arena(path, session="engine").attach() == 1
    assert arena.workers_alive() == 2
    assert arena.strangers() == []


def test_an_unattached_process_has_no_slot(open_arena):
    with pytest.raises(ArenaError, match="this process has not attached"):
        _ = open_arena().attach_word


def test_slots_of_the_dead_are_used_again(open_arena, path, child):
    line = f"a = Arena.open({str(path)!r}, {ARENA_BYTES}, session='engine'); print(a.attach(), flush=True)"
    first = child(IMPORTS).wait_ready()
    assert first.ask(line) == "0"
    arena = open_arena(path)
    assert arena.workers_alive() == 1
    first.kill()
    assert arena.workers_alive() == 0
    assert arena.attach() == 0


def test_a_reused_pid_is_no_worker(open_arena, path):
    arena = open_arena(path)
    arena.attach()
    arena.words[arena.attach_word + 1] += 1
    assert arena.workers_alive() == arena.writes_in_flight() == 0
    assert open_arena(path).attach() == 0


def test_a_full_attach_table_is_refused(open_arena, path):
    arenas = [open_arena(path) for _ in range(fmt.ATTACH_SLOTS + 1)]
    assert [arena.attach() for arena in arenas[:-1]] == list(range(fmt.ATTACH_SLOTS))
    with pytest.raises(ArenaBusyError, match="all 64 attach slots are taken"):
        arenas[-1].attach()
    arenas[10].close()
    assert arenas[-1].attach() == 10


def test_one_owner_among_arenas_of_one_process(open_arena, path):
    first, second = open_arena(path), open_arena(path, session="other")
    store = Store.open(first, namespace=NAMESPACE)
    with pytest.raises(ArenaBusyError, match=rf"in use by another engine \(pid {os.getpid()}\)"):
        Store.open(second, namespace=NAMESPACE)
    with pytest.raises(ArenaBusyError, match="in use by another engine"):
        second.attach()
    with pytest.raises(ArenaBusyError, match="already has an open store"):
        Store.open(first, namespace=NAMESPACE)
    store.close()
    Store.open(second, namespace=NAMESPACE)


def test_workers_of_the_owners_session_may_attach(open_arena, path):
    Store.open(open_arena(path), namespace=NAMESPACE)
    worker = open_arena(path)
    worker.check_owner()
    worker.attach()


def test_a_live_owner_in_another_process(open_arena, path, child):
    owner = child(IMPORTS).wait_ready()
    line = (
        f"a = Arena.open({str(path)!r}, {ARENA_BYTES}, session='old'); "
        "s = Store.open(a, namespace=b'n' * 16); print(a.words[11], flush=True)"
    )
    assert owner.ask(line) == "1"
    arena = open_arena(path, session="new")
    for refused in (arena.check_owner, arena.attach, arena.take_ownership):
        with pytest.raises(
            ArenaBusyError, match=rf"\(pid {owner.pid}\); give this one its own arena_path"
        ):
            refused()
    owner.kill()
    arena.check_owner()
    arena.attach()
    assert arena.take_ownership() == 2
    assert arena.owner() == (os.getpid(), arena_module.own_start_time(), arena.session)


def test_each_owner_has_an_epoch_of_its_own(open_arena, path):
    for epoch in range(1, 4):
        with Arena.open(path, ARENA_BYTES, session="s") as arena:
            store = Store.open(arena, namespace=NAMESPACE)
            (frame,) = store.reserve([key(epoch)], 4096)
            assert frame.generation >> fmt.GENERATION_COUNT_BITS == epoch


# --- private arenas --------------------------------------------------------------------------------------------


@pytest.fixture
def private(shm, monkeypatch):
    monkeypatch.setattr(memory, "private_directory", lambda: shm)
    return shm


def test_private_names_follow_from_the_engine(private):
    first, second = private_arena_path("engine-0"), private_arena_path("engine-1")
    assert first == private_arena_path("engine-0")
    assert first != second
    assert first.parent == private
    assert first.name.startswith(f"kvferry-{os.geteuid()}-")


def test_sweep_removes_what_the_dead_left_and_nothing_else(private, child):
    paths = {name: private_arena_path(name) for name in ("live", "killed", "attached", "begun")}
    others = [
        private / "kvferry-0-mine.arena",
        private / "other",
        private / f"kvferry-{os.geteuid()}-{'0' * 16}.arena.bak",
    ]
    for other in others:
        other.touch(0o600)
    link = private_arena_path("link")
    link.symlink_to(others[1])
    paths["begun"].touch(0o600)
    victim = child(IMPORTS).wait_ready()
    opening = "a = Arena.open({!r}, {}, session='s'); print(flush=True)"
    victim.ask(opening.format(str(paths["killed"]), ARENA_BYTES))
    alive = child(IMPORTS).wait_ready()
    alive.ask(opening.format(str(paths["live"]), ARENA_BYTES))
    with Arena.open(paths["attached"], ARENA_BYTES, session="s"):
        victim.kill()
        assert sorted(sweep_private_arenas()) == sorted([paths["killed"], paths["begun"]])
        assert sweep_private_arenas() == []
    left = {path.name for path in private.iterdir()}
    assert left == {p.name for p in [paths["live"], paths["attached"], link, *others]}
    alive.kill()
    assert sorted(sweep_private_arenas()) == sorted([paths["live"], paths["attached"]])


def test_sweep_spares_an_arena_that_is_being_made(private):
    path = private_arena_path("making")
    fd = memory.open_file(path)
    locks.try_lock(fd, locks.Lock.CREATE)
    assert sweep_private_arenas() == []
    os.close(fd)
    assert sweep_private_arenas() == [path]


def test_creators_and_sweepers_do_not_undo_each_other(private, child):
    """While one process sweeps without pause, whoever opens an arena keeps it under its name."""
    sweeper = child(
        f"from pathlib import Path\nfrom kvferry.kvops.store import memory\n"
        f"memory.private_directory = lambda: Path({str(private)!r})\n"
        "from kvferry.kvops.store.private_arena import sweep_private_arenas\n"
    ).wait_ready()
    path, stop = private_arena_path("engine"), private / "stop"
    sweeper.send(
        f"swept = 0\nwhile not Path({str(stop)!r}).exists():\n    swept += len(sweep_private_arenas())\n"
        "print(swept, flush=True)"
    )
    deadline = time.monotonic() + 1.0
    opened = 0
    while time.monotonic() < deadline:
        with Arena.open(path, ARENA_BYTES, session="s", populate=False) as arena:
            opened += 1
            assert os.path.samestat(os.fstat(arena._fd), path.stat())
    stop.touch()
    # more than were opened, if one was swept before its creator had locked it, and made another
    assert int(sweeper.answer()) > 5
    assert opened > 5
