"""The folder of a disk tier: whose it is, what lies in it, and where files go that can't be used.

Threads: opening and wiping belong to one thread, which holds the lock.
"""

import contextlib
import dataclasses
import logging
import os
import re
import shutil
import stat
import time
from pathlib import Path

from kvferry.kvops.errors import DiskBusyError, DiskError
from kvferry.kvops.store import locks
from kvferry.kvops.store.file_io import FileIo
from kvferry.kvops.store.liveness import is_alive, own_start_time

from . import journal

logger = logging.getLogger(__name__)

LOCK = "lock"
QUARANTINE = "quarantine"
STATISTICS = "stats.json"
SEGMENT_NAME = re.compile(r"seg-([0-9a-f]{8})\.blobs")
UNFINISHED_NAME = re.compile(r"(index-\d{1,18}\.log|seg-[0-9a-f]{8}\.blobs|stats\.json)\.tmp")

ALIVE_OWNER_WAIT_S = 0.25
DEAD_OWNER_WAIT_S = 5.0
"""How long to wait for an owner that lives, or that was killed and has I/O under way, to let go of its lock."""

_LOCK_BYTES = 64


@dataclasses.dataclass(slots=True)
class Listing:
    """The files of ours in a folder: journals and segments by number, and what was not finished."""

    journals: dict[int, Path] = dataclasses.field(default_factory=dict)
    segments: dict[int, Path] = dataclasses.field(default_factory=dict)
    unfinished: list[Path] = dataclasses.field(default_factory=list)


_HARMLESS = {"lost+found"}
"""What a new file system has in it."""


def prepare(folder: Path, *, create: bool) -> None:
    """Make the folder if asked to, and refuse one that somebody else could write to.

    Raises:
        DiskError: it is missing, a symbolic link, no folder, another user's, open to other users' writing, or holds
            files of somebody else and none of ours.
    """
    if create and not os.path.lexists(folder):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"the disk tier's folder {folder} can't be made: {error}") from error
    try:
        found = folder.lstat()
    except FileNotFoundError:
        raise DiskError(f"the disk tier's folder {folder} does not exist") from None
    if stat.S_ISLNK(found.st_mode):
        raise DiskError(
            f"the disk tier's folder {folder} must not be a symbolic link; name its target"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise DiskError(f"the disk tier's folder {folder} must be a folder, and is something else")
    if found.st_uid != os.geteuid():
        raise DiskError(
            f"the disk tier's folder {folder} must belong to this user ({os.geteuid()}); it is user {found.st_uid}'s"
        )
    if found.st_mode & 0o022:
        raise DiskError(
            f"the disk tier's folder {folder} must not be writable by others; chmod 700 it, or use another"
        )
    if create:
        names = {path.name for path in folder.iterdir()} - _HARMLESS
        if names and LOCK not in names:
            raise DiskError(
                f"the disk tier's folder {folder} must be empty, or one that kvferry made; it holds {min(names)!r}"
            )


def take_lock(io: FileIo, folder: Path) -> int:
    """Become the folder's owner; return the descriptor that holds the lock, and drops it when it is closed.

    The kernel drops the lock of an owner that died, so a lock file that is left behind means nothing.

    Raises:
        DiskBusyError: a live process owns the folder.
        OSError: the lock file can't be made.
    """
    path = folder / LOCK
    try:
        fd = io.open(path, write=True, create=True, direct=False)
    except FileExistsError:
        fd = io.open(path, write=True, direct=False)
    try:
        begin = time.monotonic()
        while not locks.try_lock(fd, locks.Lock.OWNER):
            pid, start = _owner(io.read_now(fd, _LOCK_BYTES, 0))
            wait_s = ALIVE_OWNER_WAIT_S if is_alive(pid, start) else DEAD_OWNER_WAIT_S
            if time.monotonic() - begin > wait_s:
                raise DiskBusyError(
                    f"the disk tier's folder {folder} is in use by another process (pid {pid}); "
                    "give this one its own folder, or end that one"
                )
            time.sleep(locks.POLL_S)
        # of one length always, so that a reader never sees half of it
        text = f"{os.getpid()} {own_start_time()}".ljust(_LOCK_BYTES - 1) + "\n"
        io.write_now(fd, text.encode(), 0)
    except BaseException:
        io.close_file(fd)
        raise
    return fd


def _owner(text: bytes) -> tuple[int, int]:
    try:
        pid, start = text.split()
        return int(pid), int(start)
    except ValueError:
        return 0, 0


def list_files(folder: Path) -> Listing:
    """Return what lies in *folder*; names that are not ours are not looked at."""
    found = Listing()
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if match := journal.NAME.fullmatch(entry.name):
                found.journals[int(match[1])] = path
            elif match := SEGMENT_NAME.fullmatch(entry.name):
                found.segments[int(match[1], 16)] = path
            elif UNFINISHED_NAME.fullmatch(entry.name):
                found.unfinished.append(path)
    return found


def is_regular(path: Path) -> bool:
    """Return whether *path* is a plain file, and no link to one."""
    return stat.S_ISREG(path.lstat().st_mode)


def quarantine(io: FileIo, folder: Path, path: Path, reason: str) -> None:
    """Move a file that can't be used out of the way, and say why in a file beside it.

    Raises:
        OSError: it is where it was.
    """
    there = folder / QUARANTINE
    there.mkdir(mode=0o700, exist_ok=True)
    target, number = there / path.name, 0
    while os.path.lexists(target):
        number += 1
        target = there / f"{path.name}.{number}"
    io.rename(path, target)
    logger.warning("disk tier: %s can't be used (%s): moved to %s", path, reason, target)
    note = target.with_name(target.name + ".reason")
    with contextlib.suppress(OSError):
        io.unlink(note)
        fd = io.open(note, write=True, create=True, direct=False)
        try:
            io.write_now(fd, f"{reason}\n{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
        finally:
            io.close_file(fd)


def quarantined_files(folder: Path) -> list[tuple[Path, int]]:
    """Return the files in quarantine, the oldest first, each with the bytes that it takes on the disk."""
    try:
        with os.scandir(folder / QUARANTINE) as entries:
            found = [
                (entry.stat(follow_symlinks=False), Path(entry.path))
                for entry in entries
                if not entry.name.endswith(".reason")
            ]
    except FileNotFoundError:
        return []
    found.sort(key=lambda pair: pair[0].st_mtime)
    return [(path, status.st_blocks * 512) for status, path in found]


def quarantined_bytes(folder: Path) -> int:
    """Return what the files in quarantine take on the disk."""
    return sum(size for _, size in quarantined_files(folder))


def used_bytes(folder: Path) -> int:
    """Return what journals and segments, finished or not, take on the disk, as the file system counts it."""
    found = list_files(folder)
    total = 0
    for path in [*found.journals.values(), *found.segments.values(), *found.unfinished]:
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def delete_quarantined(io: FileIo, path: Path, why: str) -> None:
    """Delete a file in quarantine and its reason; say so.

    Raises:
        OSError: it is still there.
    """
    logger.warning("disk tier: deleting %s (%s)", path, why)
    _delete(io, path)
    io.unlink(path.with_name(path.name + ".reason"))


def _delete(io: FileIo, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # somebody made a folder where a file of ours should be
        shutil.rmtree(path)
    else:
        io.unlink(path)


def wipe(io: FileIo, folder: Path) -> dict[str, int]:
    """Delete everything of ours in a folder that nobody owns, whatever version made it; leave the rest.

    Returns:
        files and bytes that were deleted. The lock file stays: somebody may be waiting for it.

    Raises:
        DiskError: the folder can't be used.
        DiskBusyError: a live process owns it.
        OSError: something could not be deleted.
    """
    prepare(folder, create=False)
    fd = take_lock(io, folder)
    try:
        found = list_files(folder)
        paths = [*found.journals.values(), *found.segments.values(), *found.unfinished]
        paths += [folder / STATISTICS]
        with contextlib.suppress(FileNotFoundError):
            paths += [folder / QUARANTINE / name for name in os.listdir(folder / QUARANTINE)]
        counts = {"files": 0, "bytes": 0}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                counts["bytes"] += path.lstat().st_blocks * 512
                _delete(io, path)
                counts["files"] += 1
        with contextlib.suppress(OSError):
            os.rmdir(folder / QUARANTINE)
        io.sync_folder(folder)
    finally:
        io.close_file(fd)
    return counts
