"""The journal: an append-only file that says which slot holds which blob, so that opening reads one file, not all slots.

    append(records)      behind the last one; what a failed append left there is cut off, or overwritten
    sync()               what was appended is on the drive
    rewrite(chunks)      index-<n+1>.log.tmp, sync, rename, sync of the folder, unlink index-<n>.log

A crash between these steps leaves an unfinished .tmp, which is worth nothing, or both numbers, of which the higher is
complete. Reading passes over records whose check does not hold. Bytes: format.py.
"""

import contextlib
import errno
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.kvops.store.file_io import FileIo

from . import records as rec

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""How much of a journal is read at a time: 65,536 records."""

SLACK_RECORDS = 1024
"""Records that are dead before a rewrite is worth its while: 64 KiB."""

NAME = re.compile(r"index-(\d{1,18})\.log")

Records = npt.NDArray[np.void]


def path_of(folder: Path, number: int) -> Path:
    """Return the path of journal *number*."""
    return folder / f"index-{number}.log"


def read_records(
    io: FileIo, fd: int, num_bytes: int, on_progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[Records, int]]:
    """Yield the sound records of a journal, in order and in chunks, each with where its last one ends.

    Args:
        io: through which to read.
        fd: the journal.
        num_bytes: how long it is.
        on_progress: told (bytes read, *num_bytes*) after each chunk.
    """
    at = rec.JOURNAL_HEADER_BYTES
    while at + rec.RECORD_BYTES <= num_bytes:
        want = min(READ_BYTES, num_bytes - at) // rec.RECORD_BYTES * rec.RECORD_BYTES
        data = io.read_now(fd, want, at)
        whole = memoryview(data)[: len(data) // rec.RECORD_BYTES * rec.RECORD_BYTES]
        if not whole:
            # it became shorter while we read
            return
        records = np.frombuffer(whole, dtype=rec.RECORD_DTYPE)
        sound = np.flatnonzero(records["check"] == np.array(rec.digests_of(whole), np.uint64))
        if len(sound):
            yield records[sound], at + (int(sound[-1]) + 1) * rec.RECORD_BYTES
        at += len(whole)
        if on_progress is not None:
            on_progress(min(at, num_bytes), num_bytes)


class Journal:
    """The journal that is being written. Made by :meth:`create`, or of one that was read.

    Attributes:
        number: the one in its name.
        end: bytes of it that count.
        unsynced: whether something was appended since the last sync.

    Threads: the caller's lock.
    """

    def __init__(self, io: FileIo, folder: Path, number: int, fd: int, end: int) -> None:
        self._io = io
        self._folder = folder
        self.number = number
        self.fd = fd
        self.end = end
        self.unsynced = False
        # bytes behind the end that a failed append may have left
        self._is_dirty = False

    @classmethod
    def create(
        cls, io: FileIo, folder: Path, number: int, epoch: int, chunks: Iterable[bytes] = ()
    ) -> "Journal":
        """Begin journal *number* with *chunks* of records; it is on the drive when this returns.

        Raises:
            OSError: it could not be made; nothing is left of it.
        """
        fd, end = _write_whole(io, folder, number, epoch, chunks)
        return cls(io, folder, number, fd, end)

    @property
    def records(self) -> int:
        """How many there are, dead ones included."""
        return (self.end - rec.JOURNAL_HEADER_BYTES) // rec.RECORD_BYTES

    def append(self, records: bytes) -> None:
        """Add *records*.

        Raises:
            OSError: none of them counts.
        """
        if self._is_dirty:
            # else a shorter append could leave the rest of a longer one behind itself, which would count again
            self._io.truncate(self.fd, self.end)
            self._is_dirty = False
        try:
            self._io.write_now(self.fd, records, self.end)
        except OSError:
            self._cut()
            raise
        self.end += len(records)
        self.unsynced = True

    def take_back(self, num_bytes: int) -> None:
        """Undo the last append of *num_bytes*."""
        self.end -= num_bytes
        self._cut()

    def _cut(self) -> None:
        self._is_dirty = True
        with contextlib.suppress(OSError):
            self._io.truncate(self.fd, self.end)
            self._is_dirty = False

    def sync(self) -> None:
        """Return when all records are on the drive.

        Raises:
            OSError: they may or may not be.
        """
        if self.unsynced:
            self._io.sync(self.fd)
            self.unsynced = False

    def is_wasteful(self, live: int) -> bool:
        """Return whether more than half of the records, and more than 64 KiB, are dead if *live* are not."""
        dead = self.records - live
        return dead > SLACK_RECORDS and dead > live

    def rewrite(self, epoch: int, chunks: Iterable[bytes]) -> None:
        """Replace the file by one that holds *chunks* of records, and is on the drive.

        Raises:
            OSError: the old one is still in use, whole.
        """
        fd, end = _write_whole(self._io, self._folder, self.number + 1, epoch, chunks)
        old, self.fd, self.end = self.fd, fd, end
        self.number += 1
        self.unsynced = self._is_dirty = False
        # what is left of the old one is found, and superseded, at the next opening
        with contextlib.suppress(OSError):
            self._io.close_file(old)
        with contextlib.suppress(OSError):
            self._io.unlink(path_of(self._folder, self.number - 1))

    def close(self) -> None:
        """Close the file; what was not synced is left to the kernel."""
        self._io.close_file(self.fd)


def _write_whole(
    io: FileIo, folder: Path, number: int, epoch: int, chunks: Iterable[bytes]
) -> tuple[int, int]:
    """Write a journal under another name first; return its descriptor and its length."""
    path = path_of(folder, number)
    unfinished = path.with_name(path.name + ".tmp")
    io.unlink(unfinished)
    fd = io.open(unfinished, write=True, create=True, direct=False)
    try:
        end = rec.JOURNAL_HEADER_BYTES
        io.write_now(fd, rec.pack_journal_header(epoch), 0)
        for chunk in chunks:
            io.write_now(fd, chunk, end)
            end += len(chunk)
        io.sync(fd)
        io.rename(unfinished, path)
    except BaseException:
        _forget(io, fd, unfinished)
        raise
    try:
        io.sync_folder(folder)
    except OSError:
        _forget(io, fd, path)
        raise
    return fd, end


def _forget(io: FileIo, fd: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        io.close_file(fd)
    with contextlib.suppress(OSError):
        io.unlink(path)


def full() -> OSError:
    """Return the error of a journal that has no room left in the quota."""
    return OSError(errno.ENOSPC, "the journal of the disk tier has used up its share of the quota")
