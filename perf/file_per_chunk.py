"""The rival: one file for each chunk, as vLLM's file-system tier keeps them, made anew from its description.

A chunk is written to a temporary file and renamed to its digest, in folders named by the digest's first letters. 16
threads; each gets its share beforehand, which costs less than a queue. No index (a lookup asks the file system), no
limit, no checksum, no fsync. Buffered, or direct where the file system allows it.
"""

import ctypes
import errno
import hashlib
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
from perf.raw_disk import in_threads, pages

THREADS = 16

_libc = ctypes.CDLL(None, use_errno=True)


class FilePerChunk:
    """Chunks in files of their own.

    Args:
        folder: where; made at the first write.
        size: of a chunk, bytes, a multiple of 4096.
        count: chunks.
    """

    def __init__(self, folder: Path, size: int, count: int) -> None:
        self.folder, self.size, self.count = folder, size, count
        names = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(count)]
        self.paths = [folder / name[:2] / name[2:4] / name for name in names]

    def write(self, memory: mmap.mmap, direct: bool = False, sync: bool = False) -> None:
        """Write every chunk; with *sync*, each is on the drive before it gets its name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        view, size = memoryview(memory), self.size

        def work(first: int) -> None:
            for number in range(first, self.count, THREADS):
                path = self.paths[number]
                os.makedirs(path.parent, exist_ok=True)
                part = f"{path}_{first}.tmp"
                fd = os.open(part, flags, 0o600)
                try:
                    if os.writev(fd, [view[number * size : (number + 1) * size]]) != size:
                        raise OSError(errno.ENOSPC, "a chunk was written in part")
                    if sync:
                        os.fdatasync(fd)
                finally:
                    os.close(fd)
                os.replace(part, path)

        in_threads(work, THREADS)

    def read(self, memory: mmap.mmap, direct: bool = False) -> None:
        """Read every chunk to its place in *memory*."""
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        view, size = memoryview(memory), self.size

        def work(first: int) -> None:
            for number in range(first, self.count, THREADS):
                fd = os.open(self.paths[number], flags)
                try:
                    if os.readv(fd, [view[number * size : (number + 1) * size]]) != size:
                        raise OSError(errno.EIO, "a chunk was read in part")
                finally:
                    os.close(fd)

        in_threads(work, THREADS)

    def write_first_pages(self) -> None:
        """Make every file, with one page in it, as if that were its header."""
        for number, path in enumerate(self.paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(number.to_bytes(8, "little") * 512)

    def settle(self) -> bool:
        """Bring every file to the drive and out of the page cache; return whether the last one has left it."""
        fd = os.open(self.folder, os.O_RDONLY)
        # one commit for all of them; it takes whatever else this file system holds along
        _libc.syncfs(fd)
        os.close(fd)
        is_gone = True
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if path is self.paths[-1]:
                is_gone = _is_out_of_cache(fd, self.size)
            os.close(fd)
        return is_gone

    def matches(self, memory: mmap.mmap) -> bool:
        """Whether every file holds its chunk."""
        view, size = memoryview(memory), self.size
        found = pages(size)
        for number, path in enumerate(self.paths):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                if os.preadv(fd, [found], 0) != size:
                    return False
            finally:
                os.close(fd)
            if view[number * size : (number + 1) * size] != found:
                return False
        return True

    def remove(self) -> None:
        """Delete all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_out_of_cache(fd: int, size: int) -> bool:
    # asked of the map, since reading "only if it is there" would fetch it
    with mmap.mmap(fd, size, access=mmap.ACCESS_COPY) as view:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        there = np.ones(-(-size // mmap.PAGESIZE), np.uint8)
        failed = _libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(there.ctypes.data)
        )
    return not failed and not (there & 1).any()


def scan_names(folder: Path) -> list[str]:
    """Return the names of all chunks."""
    return [name for _, _, names in os.walk(folder) for name in names]


def scan_headers(folder: Path) -> dict[str, bytes]:
    """Return the first page of every chunk: what a name does not tell."""
    found = {}
    for here, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(here, name), os.O_RDONLY)
            found[name] = os.pread(fd, 4096, 0)
            os.close(fd)
    return found
