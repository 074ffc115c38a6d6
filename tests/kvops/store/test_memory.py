"""Room is asked for before it is taken, and what there is not room for is one sentence."""

import errno
import os
import stat

import pytest

from kvferry.kvops.errors import ArenaMismatchError, ArenaSpaceError
from kvferry.kvops.store import memory

from .chunks import MIB


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A faked cgroup; call it with its files' contents."""

    def make(limit, used, statistics=None):
        for name, text in [("max", limit), ("current", used), ("stat", statistics)]:
            if text is not None:
                (tmp_path / f"memory.{name}").write_text(f"{text}\n")
        files = (tmp_path / "memory.max", tmp_path / "memory.current")
        monkeypatch.setattr(memory, "_cgroup_files", lambda: [files])

    return make


STAT_V2 = "anon 100\nfile 7340032\nshmem 1048576\nactive_file 2097152\ninactive_file 4194304"
STAT_V1 = "cache 9\nactive_file 0\ninactive_file 0\ntotal_active_file 2097152\ntotal_inactive_file 4194304"


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "wanted", "left"),
    [
        pytest.param(100 * MIB, 90 * MIB, None, 11 * MIB, 10, id="over"),
        pytest.param(100 * MIB, 90 * MIB, None, 10 * MIB, None, id="exactly"),
        pytest.param("max", 90 * MIB, None, 20 * MIB, None, id="no-limit-v2"),
        pytest.param((1 << 63) - 4096, 90 * MIB, None, 20 * MIB, None, id="no-limit-v1"),
        pytest.param(100 * MIB, 90 * MIB, STAT_V2, 16 * MIB, None, id="page-cache-v2"),
        pytest.param(100 * MIB, 90 * MIB, STAT_V2, 17 * MIB, 16, id="page-cache-v2-over"),
        pytest.param(100 * MIB, 90 * MIB, STAT_V1, 16 * MIB, None, id="page-cache-v1"),
        pytest.param(100 * MIB, 90 * MIB, "garbage", 11 * MIB, 10, id="unreadable-statistics"),
        pytest.param(100 * MIB, 101 * MIB, None, 1 * MIB, -1, id="beyond-its-limit"),
        pytest.param(100 * MIB, None, None, 11 * MIB, None, id="no-usage-file"),
    ],
)
def test_a_cgroup_must_have_room(cgroup, limit, used, statistics, wanted, left):
    cgroup(limit, used, statistics)
    if left is None:
        memory.check_room(wanted, "here")
        return
    expected = (
        rf"arena_bytes must fit into the cgroup memory limit \(.*\), which has {left} MiB left; "
        rf"got {wanted >> 20} MiB for here"
    )
    with pytest.raises(ArenaSpaceError, match=expected):
        memory.check_room(wanted, "here")


def test_the_machine_must_have_room():
    with pytest.raises(ArenaSpaceError, match="must fit into the machine's available memory"):
        memory.check_room(1 << 60, "here")


def test_without_proc_nothing_is_refused(monkeypatch):
    def nothing(_):
        raise FileNotFoundError

    monkeypatch.setattr(memory.Path, "read_text", nothing)
    memory.check_room(1 << 60, "here")
    assert memory.file_system_of(memory.Path("/dev/shm/x")) == "unknown"


def test_cgroup_of_this_process_is_found():
    pairs = memory._cgroup_files()
    assert all(used.parent == limit.parent for limit, used in pairs)
    memory.check_room(1 << 10, "here")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("before", [0, 8], ids=["empty", "begun"])
def test_a_full_file_system_is_a_sentence(path, monkeypatch, code, before):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    path.write_bytes(b"x" * before)
    fd = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(ArenaSpaceError, match=f"fit into here; got 1 MiB: {os.strerror(code)}"):
            memory.allocate(fd, MIB, "here")
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_a_file_of_full_size_keeps_its_bytes(path, monkeypatch):
    path.write_bytes(b"y" * MIB)
    fd = os.open(path, os.O_RDWR)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_room_left", lambda: [("limit", -1)])
            with pytest.raises(ArenaSpaceError, match="fit into the limit, which has -1 MiB left"):
                memory.allocate(fd, MIB, "here")
        memory.allocate(fd, MIB, "here")
        assert path.read_bytes() == b"y" * MIB
    finally:
        os.close(fd)


def test_allocated_bytes_are_backed(path):
    fd = memory.open_file(path)
    try:
        memory.allocate(fd, MIB, "here")
        assert os.fstat(fd).st_blocks * 512 >= MIB
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    finally:
        os.close(fd)


def test_views_show_the_same_bytes(path):
    fd = memory.open_file(path)
    memory.allocate(fd, MIB, "here")
    mapping = memory.Mapping(fd, MIB)
    try:
        mapping.buffer[8:16] = bytes(range(8))
        assert mapping.words[1] == int.from_bytes(range(8), "little")
        assert os.pread(fd, 8, 8) == bytes(range(8))
        assert memory.ctypes.string_at(mapping.address + 8, 8) == bytes(range(8))
    finally:
        mapping.close()
        os.close(fd)


def test_memory_that_cannot_be_touched_is_a_sentence(path, monkeypatch):
    class Unpopulated(memory.mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    fd = memory.open_file(path)
    memory.allocate(fd, MIB, "here")
    monkeypatch.setattr(memory.mmap, "mmap", Unpopulated)
    try:
        with pytest.raises(ArenaSpaceError, match="must be memory that can be touched; got 1 MiB"):
            memory.Mapping(fd, MIB)
    finally:
        os.close(fd)


def test_kernels_without_populate_map_all_the_same(path, monkeypatch):
    class Old(memory.mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    fd = memory.open_file(path)
    memory.allocate(fd, MIB, "here")
    monkeypatch.setattr(memory.mmap, "mmap", Old)
    mapping = memory.Mapping(fd, MIB)
    mapping.words[3] = 7
    mapping.close()
    os.close(fd)
    assert path.read_bytes()[24:32] == (7).to_bytes(8, "little")


def test_a_mapping_outlives_its_close_while_an_array_points_there(path):
    fd = memory.open_file(path)
    memory.allocate(fd, MIB, "here")
    mapping = memory.Mapping(fd, MIB)
    still = memory.ctypes.c_char.from_buffer(mapping._mmap)
    mapping.close()
    os.close(fd)
    still.value = b"z"
    assert path.read_bytes()[:1] == b"z"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(
            lambda p: (p.with_name("real").touch(0o600), p.symlink_to(p.with_name("real"))),
            ArenaMismatchError, "must not be a symbolic link", id="symlink",
        ),
        pytest.param(
            lambda p: p.symlink_to(p.with_name("nothing")),
            ArenaMismatchError, "must not be a symbolic link", id="dangling-symlink",
        ),
        pytest.param(lambda p: p.mkdir(), ArenaSpaceError, "Is a directory", id="directory"),
        pytest.param(os.mkfifo, ArenaMismatchError, "it is not a regular file", id="fifo"),
        pytest.param(lambda p: p.touch(0o644), ArenaMismatchError, "its mode 0644 lets others in", id="mode-644"),
        pytest.param(lambda p: p.touch(0o660), ArenaMismatchError, "its mode 0660 lets others in", id="mode-660"),
    ],
)  # fmt: skip
def test_a_planted_file_is_refused(path, make, error, message):
    old = os.umask(0)
    try:
        make(path)
    finally:
        os.umask(old)
    with pytest.raises(error, match=message):
        memory.open_file(path)


def test_a_folder_that_is_not_there_is_a_sentence(path):
    with pytest.raises(
        ArenaSpaceError, match=r"must be a file that can be created .* No such file"
    ):
        memory.open_file(path.parent / "no" / "such.arena")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses_file_is_refused(path):
    path.touch(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(
        ArenaMismatchError, match="it belongs to user 65534, this process runs as 0"
    ):
        memory.open_file(path)


def test_a_folder_that_cannot_be_written_is_a_sentence(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(memory.os, "open", refuse)
    with pytest.raises(
        ArenaSpaceError, match=r"must be a file that can be created .* Permission denied"
    ):
        memory.open_file(path)


def test_file_system_is_that_of_the_innermost_mount(tmp_path, monkeypatch):
    table = (
        "1 0 0:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:2 / /mnt/a\\040b rw shared:1 - tmpfs none rw\n"
        "3 1 0:3 / /mnt rw - xfs /dev/b rw\n"
    )
    monkeypatch.setattr(memory.Path, "read_text", lambda _: table)
    assert memory.file_system_of(memory.Path("/mnt/a b/x")) == "tmpfs"
    assert memory.file_system_of(memory.Path("/mnt/abc/x")) == "xfs"
    assert memory.file_system_of(memory.Path("/home/x")) == "ext4"
