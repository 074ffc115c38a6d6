"""Where an arena's memory comes from: a memfd or a file, reserved to the last byte before it is used.

A sparse file on a full tmpfs kills the process that touches it (SIGBUS), and a cgroup at its limit kills whom the
kernel likes. So room is asked for first, then allocated, then mapped and touched.
"""

import ctypes
import errno
import logging
import mmap
import os
import stat
import time
from pathlib import Path

from kvferry.kvops.errors import ArenaMismatchError, ArenaSpaceError

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""Fault all pages in, for writing (Linux 5.14); not among the constants of Python's mmap before 3.15."""

POPULATE_PIECE_BYTES = 256 << 20
PROGRESS_AFTER_S = 2.0


def private_directory() -> Path:
    """Return the tmpfs directory for arenas that belong to one engine."""
    return Path("/dev/shm")


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds *path* ("tmpfs", "ext4", ...); "unknown" without /proc."""
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    where = str(path.resolve().parent)
    for line in lines:
        fields = line.split(" ")
        mount = fields[4].replace("\\040", " ")
        inside = where == mount or where.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[fields.index("-") + 1]
    return kind


def open_file(path: Path) -> int:
    """Open or create an arena file, and refuse one that another user could have planted.

    Raises:
        ArenaSpaceError: the file can't be opened or created here.
        ArenaMismatchError: it is a link, no regular file, somebody else's, or open to others.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ArenaMismatchError(
                f"arena_path must not be a symbolic link; got {path}"
            ) from None
        raise ArenaSpaceError(
            f"arena_path must be a file that can be created and written; got {path}: {error.strerror}"
        ) from None
    status = os.fstat(fd)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a regular file"
    elif status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}, this process runs as {os.geteuid()}"
    elif status.st_mode & 0o077:
        problem = f"its mode {stat.S_IMODE(status.st_mode):04o} lets others in (expected 0600)"
    if problem:
        os.close(fd)
        raise ArenaMismatchError(f"arena_path must be a private arena file; got {path}: {problem}")
    return fd


def check_room(num_bytes: int, where: str) -> None:
    """Refuse *num_bytes* that the machine's memory or this process's cgroup cannot hold.

    Raises:
        ArenaSpaceError: naming the limit, what it has left, and what was asked.
    """
    for limit, left in _room_left():
        if num_bytes > left:
            raise ArenaSpaceError(
                f"arena_bytes must fit into the {limit}, which has {left >> 20} MiB left; got "
                f"{-(-num_bytes >> 20)} MiB for {where}"
            )


def _room_left() -> list[tuple[str, int]]:
    room: list[tuple[str, int]] = []
    try:
        room.extend(
            ("machine's available memory", int(line.split()[1]) << 10)
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
    except OSError as error:
        logger.debug("no /proc/meminfo: %s", error)
    for limit_file, used_file in _cgroup_files():
        try:
            limit, used = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError as error:
            logger.debug("no cgroup limit in %s: %s", limit_file, error)
            continue
        # version 1 writes "no limit" as a number near 2^63
        if limit != "max" and int(limit) < 1 << 60:
            left = int(limit) - int(used) + _page_cache(used_file.with_name("memory.stat"))
            room.append((f"cgroup memory limit ({limit_file})", left))
    return room


def _page_cache(stat_file: Path) -> int:
    """Return the bytes of files (not tmpfs) that a cgroup holds and gives up when it needs memory."""
    try:
        fields = dict(line.split(" ", 1) for line in stat_file.read_text().splitlines())
    except (OSError, ValueError) as error:
        logger.debug("no cgroup statistics in %s: %s", stat_file, error)
        return 0
    # version 1 counts children only in the total_ fields
    names = ("active_file", "inactive_file")
    return sum(int(fields.get(f"total_{name}", fields.get(name, "0"))) for name in names)


def _cgroup_files() -> list[tuple[Path, Path]]:
    root = Path("/sys/fs/cgroup")
    pairs = [(root / "memory.max", root / "memory.current")]
    pairs.append((root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"))
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, name = line.split(":", 2)
            if number == "0" and name != "/":
                own = root / name.lstrip("/")
                pairs.append((own / "memory.max", own / "memory.current"))
    except OSError as error:
        logger.debug("no /proc/self/cgroup: %s", error)
    return pairs


def begin(fd: int, mark: bytes, where: str) -> None:
    """Write the first bytes of a new file.

    Raises:
        ArenaSpaceError: there is not one page left, or this file system takes no writes (hugetlbfs).
    """
    try:
        os.pwrite(fd, mark, 0)
    except OSError as error:
        raise ArenaSpaceError(
            f"arena_path must be a file that can be written; got {where}: {error.strerror}"
        ) from None


def allocate(fd: int, num_bytes: int, where: str) -> None:
    """Give *fd* exactly *num_bytes*, all of them backed by memory (or disk blocks).

    Raises:
        ArenaSpaceError: there is less room than that; a file that was empty is left empty.
    """
    status = os.fstat(fd)
    already = status.st_blocks * 512
    try:
        check_room(max(0, num_bytes - already), where)
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
    except ArenaSpaceError:
        if status.st_size < num_bytes:
            os.ftruncate(fd, 0)
        raise
    except OSError as error:
        if status.st_size < num_bytes:
            os.ftruncate(fd, 0)
        raise ArenaSpaceError(
            f"arena_bytes must fit into {where}; got {num_bytes >> 20} MiB: {error.strerror}"
        ) from None


class Mapping:
    """A shared mapping of a whole file, with the views that the store works on.

    Attributes:
        buffer: all bytes, writable.
        words: the same bytes as unsigned 64-bit integers.
        address: where the mapping begins in this process.
        num_bytes: its length.

    Ownership: the views die with :meth:`close`; so must every array made from them.
    """

    def __init__(self, fd: int, num_bytes: int, *, populate: bool = True) -> None:
        self.num_bytes = num_bytes
        self._mmap = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if populate:
            self._populate()
        self.buffer = memoryview(self._mmap)
        self.words = self.buffer.cast("Q")
        anchor = ctypes.c_char.from_buffer(self._mmap)
        self.address = ctypes.addressof(anchor)
        # the anchor pins the mapping against close(); the views above do the same and are released
        del anchor

    def _populate(self) -> None:
        begin = said = time.monotonic()
        for offset in range(0, self.num_bytes, POPULATE_PIECE_BYTES):
            size = min(POPULATE_PIECE_BYTES, self.num_bytes - offset)
            try:
                self._mmap.madvise(MADV_POPULATE_WRITE, offset, size)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    # before Linux 5.14: pages are there (allocated), they fault in one by one
                    return
                self._mmap.close()
                raise ArenaSpaceError(
                    f"arena_bytes must be memory that can be touched; got {self.num_bytes >> 20} MiB: "
                    f"{error.strerror}"
                ) from None
            now = time.monotonic()
            if now - said > PROGRESS_AFTER_S:
                said = now
                done = offset + size
                logger.info(
                    "mapping the arena: %d of %d MiB after %.0f s",
                    done >> 20, self.num_bytes >> 20, now - begin,
                )  # fmt: skip

    def close(self) -> None:
        """Unmap; views handed out earlier must not be used again."""
        self.words.release()
        self.buffer.release()
        try:
            self._mmap.close()
        except BufferError:
            # somebody's array still points here: the memory goes when that array does
            logger.debug("arena mapping outlives its arena: an array still refers to it")
