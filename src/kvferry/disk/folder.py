"""Opening a folder of the disk tier for a command: never one that is something else, never in an owner's way."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from kvferry.kvops.errors import DiskError
from kvferry.kvops.store import locks
from kvferry.kvops.store.disk import folder as folders
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.io_threads import ThreadIo

from .progress import Progress

READERS = 4
"""Threads that read and check; checksums are faster than most drives."""

NO_QUOTA = 1 << 62
"""A command makes no room: nothing is evicted while it has the folder."""

_MAGIC = b"KVF"
"""What journals and segments of every version begin with."""

_LOCK_TEXT = re.compile(rb"\d+ \d+ *\n")


def check(folder: Path) -> None:
    """Refuse what is no folder of the disk tier.

    Raises:
        DiskError: it is missing, not a folder of this user, or has neither a file nor a lock that the tier wrote.
    """
    folders.prepare(folder, create=False)
    listing = folders.list_files(folder)
    for path in (*listing.journals.values(), *listing.segments.values()):
        if _head(path, len(_MAGIC)) == _MAGIC:
            return
    if not _LOCK_TEXT.fullmatch(_head(folder / folders.LOCK, 4096)):
        raise DiskError(
            f"{folder} is not a folder of the disk tier: it has no journal and no segment"
        )


def _head(path: Path, size: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        return stream.read(size)
    return b""


def owner(folder: Path) -> int | None:
    """Return the process that uses the folder; None if there is none."""
    try:
        with (folder / folders.LOCK).open("rb") as stream:
            if not locks.is_held(stream.fileno(), locks.Lock.OWNER):
                return None
            return int(stream.read().split()[0])
    except FileNotFoundError:
        return None
    except (IndexError, ValueError):
        return 0


@contextlib.contextmanager
def opened(folder: Path, *, write: bool) -> Iterator[BlobFiles]:
    """Open a folder's blobs for the time of a block, with progress if that takes long.

    Args:
        folder: of the disk tier.
        write: as its owner; without it nothing is changed, and somebody else may be the owner.

    Raises:
        DiskError: it is no such folder. DiskBusyError: *write*, and a live process owns it.
    """
    check(folder)
    io = ThreadIo(threads=1)
    try:
        progress = Progress("reading the journal", is_bytes=True)
        files = BlobFiles.open(
            folder, io, quota_bytes=NO_QUOTA, read_only=not write, on_progress=progress
        )
        progress.close()
        try:
            yield files
        finally:
            files.close()
    finally:
        io.close(10.0)
