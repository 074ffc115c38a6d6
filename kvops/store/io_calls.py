"""The calls on files that every engine shares: open, size, sync, rename, and small reads and writes at once.

Direct I/O wants addresses, offsets and sizes in whole pages. Whether a file system takes part in it shows at different
moments: at open (EINVAL), or at the first transfer (overlay), or never, because it says yes and copies anyway (tmpfs).
So the first file that is opened on each is tried out with one page.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from .file_io import DIRECT_ALIGNMENT

logger = logging.getLogger(__name__)

ZEROS_BYTES = 1 << 20
"""How much is written at a time where a file system cannot reserve room."""

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

# st_dev -> whether it takes direct I/O; the lock lets only one thread find out, and say so
_direct_on: dict[int, bool] = {}
_direct_lock = threading.Lock()


class FileCalls:
    """The synchronous half of :class:`FileIo`.

    Threads: any; a file's own calls are as ordered as the caller orders them.
    Ownership: descriptors belong to the caller, also when the engine is closed.
    """

    def open(self, path: Path, *, write: bool, create: bool = False, direct: bool = True) -> int:
        """Open a file, see :meth:`FileIo.open`."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if direct:
                _go_direct(fd, path, write=write)
        except OSError:
            os.close(fd)
            raise
        return fd

    def close_file(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def read_now(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Read at once; fewer bytes only at the end of the file."""
        if num_bytes == 0 or not is_direct(fd):
            return _read_fully(fd, num_bytes, offset)
        first, last = _whole_pages(offset, num_bytes)
        with _pages(last - first) as pages:
            got = _read_pages(fd, pages, first)
            return bytes(pages[offset - first : min(got, offset - first + num_bytes)])

    def write_now(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of *data* at once.

        A direct file takes whole pages: what else is in the first and the last one is read and written back, so no
        request for those pages may be in flight.
        """
        if not data or not is_direct(fd):
            return _write_fully(fd, memoryview(data), offset)
        first, last = _whole_pages(offset, len(data))
        size = os.fstat(fd).st_size
        with _pages(last - first) as pages:
            if (first, last) != (offset, offset + len(data)) and first < size:
                _read_pages(fd, pages, first)
            pages[offset - first : offset - first + len(data)] = data
            _write_fully(fd, pages, first)
        if last > max(size, offset + len(data)):
            os.ftruncate(fd, max(size, offset + len(data)))
        return None

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve room for the first *num_bytes* of a file; after an error it is as long as before.

        Where the file system cannot reserve, zeros are written behind the end; holes before it stay holes.
        """
        size = os.fstat(fd).st_size
        try:
            # posix_fallocate would write single bytes where the file system cannot, which a direct file refuses
            while _fallocate(fd, 0, 0, num_bytes) != 0:
                number = ctypes.get_errno()
                if number == errno.EOPNOTSUPP:
                    return self._write_zeros(fd, size, num_bytes)
                if number != errno.EINTR:
                    raise OSError(number, os.strerror(number))
        except OSError:
            if size < num_bytes:
                os.ftruncate(fd, size)
            raise
        return None

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Make a file exactly that long."""
        os.ftruncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        """Return when the data and the length are on the drive."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are on the drive."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # some network file systems have nothing to write for a folder, and say so like this
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, replacing what had it."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        """Delete a file; no error if it is gone."""
        path.unlink(missing_ok=True)

    def _write_zeros(self, fd: int, start: int, end: int) -> None:
        zeros = bytes(min(ZEROS_BYTES, max(0, end - start)))
        for offset in range(start, end, ZEROS_BYTES):
            self.write_now(fd, zeros[: end - offset], offset)


def is_direct(fd: int) -> bool:
    """Return whether an open file bypasses the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _set_direct(fd: int, direct: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def _go_direct(fd: int, path: Path, *, write: bool) -> None:
    """Make a file direct, unless its file system has refused that, or does so now."""
    device = os.fstat(fd).st_dev
    with _direct_lock:
        if device not in _direct_on:
            _direct_on[device] = _try_direct(fd, path, write=write)
        elif not _direct_on[device]:
            return
        if _direct_on[device]:
            try:
                _set_direct(fd, True)
            except OSError as error:
                # one that takes part may still refuse a file: a compressed or encrypted one
                if error.errno != errno.EINVAL:
                    raise
                _direct_on[device] = False
            else:
                return
        logger.warning(
            "the file system of %s refuses direct I/O: its files are read and written through the page cache, which "
            "is slower and takes memory; use a folder on a local ext4 or xfs file system",
            path.parent,
        )


def _try_direct(fd: int, path: Path, *, write: bool) -> bool:
    """Move one page of a nameless file if there can be one, else read one of *fd*."""
    spare = -1
    if write:
        # without O_TMPFILE, or with a full disk, the file itself has to do
        with contextlib.suppress(OSError):
            spare = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.ftruncate(spare, DIRECT_ALIGNMENT)
    try:
        tried = fd if spare < 0 else spare
        _set_direct(tried, True)
        with _pages(DIRECT_ALIGNMENT) as page:
            if spare >= 0:
                os.pwritev(spare, [page], 0)
            os.preadv(tried, [page], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        # a full or failing disk says nothing about direct I/O; the next transfer will say it again
        logger.debug("direct I/O on %s could not be tried: %s", path.parent, error)
        return True
    else:
        return True
    finally:
        if spare >= 0:
            os.close(spare)
        else:
            _set_direct_quietly(fd)


def _set_direct_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        _set_direct(fd, False)


@contextlib.contextmanager
def _pages(num_bytes: int) -> Iterator[memoryview]:
    """Lend zeroed memory that begins at a page."""
    with mmap.mmap(-1, num_bytes) as pages, memoryview(pages) as view:
        yield view


def _whole_pages(offset: int, num_bytes: int) -> tuple[int, int]:
    end = offset + num_bytes
    return offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT, -(
        -end // DIRECT_ALIGNMENT
    ) * DIRECT_ALIGNMENT


def _read_pages(fd: int, pages: memoryview, offset: int) -> int:
    got = 0
    while got < len(pages):
        count = os.preadv(fd, [pages[got:]], offset + got)
        got += count
        # an odd count is the end of the file, and direct I/O would refuse to go on from there
        if count == 0 or count % DIRECT_ALIGNMENT:
            break
    return got


def _read_fully(fd: int, num_bytes: int, offset: int) -> bytes:
    pieces: list[bytes] = []
    left = num_bytes
    while left > 0 and (piece := os.pread(fd, left, offset + num_bytes - left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _write_fully(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
