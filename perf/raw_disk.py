"""The roof of a disk: blocks of one preallocated file, read or written directly, in order, and nothing else.

Two ways, of which a benchmark takes the faster one: threads that each have one block in the kernel, and a queue of Linux
AIO. No headers, no index, no checksums, no allocation while it runs.
"""

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

PAGE = 4096
THREADS = 16
"""At the most; more only add switches on the machines that this was tried on."""

_SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_IOCB = np.dtype([
    ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
    ("address", "<u8"), ("num_bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("eventfd", "<u4"),
])  # fmt: skip


def pages(size: int) -> mmap.mmap:
    """Return anonymous memory of *size* bytes, all of it there, page-aligned as direct I/O wants it."""
    memory = mmap.mmap(-1, size)
    np.frombuffer(memory, np.uint8)[:] = 0
    return memory


class RawFile:
    """A file of equal blocks, and memory of the same shape.

    Args:
        path: made, with all its space, at the first use.
        size: of a block, bytes.
        count: blocks.
        depth: blocks in flight.
    """

    def __init__(self, path: Path, size: int, count: int, depth: int) -> None:
        self.path, self.size, self.count, self.depth = path, size, count, depth
        self._fd = -1
        self._context = ctypes.c_ulong(0)

    @property
    def fd(self) -> int:
        """The open file."""
        if self._fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
            self._fd = os.open(self.path, flags, 0o600)
            os.posix_fallocate(self._fd, 0, self.size * self.count)
        return self._fd

    def close(self) -> None:
        """Close and delete it."""
        if self._context.value:
            _check(_syscall(_SYSCALLS[platform.machine()][1], self._context))
            self._context.value = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink()

    def by_threads(self, memory: mmap.mmap, write: bool) -> None:
        """Move every block; each thread takes every n-th one."""
        view, fd, size = memoryview(memory), self.fd, self.size
        call: Callable[..., int] = os.pwritev if write else os.preadv
        each = min(self.depth, THREADS)

        def work(first: int) -> None:
            for number in range(first, self.count, each):
                at = number * size
                if call(fd, [view[at : at + size]], at) != size:
                    raise OSError(f"block {number} was moved in part")

        in_threads(work, each)

    def by_aio(self, memory: mmap.mmap, write: bool) -> None:
        """Move every block through one queue of the kernel; a place in it is filled as soon as it is free."""
        _, _, getevents, submit = _SYSCALLS[platform.machine()]
        context = self._queue()
        size, count, depth = self.size, self.count, self.depth
        start = np.frombuffer(memory, np.uint8).ctypes.data
        blocks = np.zeros(count, _IOCB)
        numbers = np.arange(count)
        blocks["data"], blocks["opcode"], blocks["fd"] = numbers, int(write), self.fd
        blocks["address"], blocks["num_bytes"] = start + numbers * size, size
        blocks["offset"] = numbers * size
        pointers = blocks.ctypes.data + numbers.astype(np.uint64) * _IOCB.itemsize
        events = np.zeros((depth, 4), np.int64)
        asked = done = 0
        while done < count:
            if asked < count and asked - done < depth:
                some = min(depth - (asked - done), count - asked)
                where = ctypes.c_void_p(pointers.ctypes.data + asked * 8)
                asked += _check(_syscall(submit, context, ctypes.c_long(some), where))
            got = _check(
                _syscall(getevents, context, ctypes.c_long(1), ctypes.c_long(depth),
                         ctypes.c_void_p(events.ctypes.data), None)
            )  # fmt: skip
            if not (events[:got, 2] == size).all():
                raise OSError(f"results {set(events[:got, 2].tolist())} of blocks of {size}")
            done += got

    def _queue(self) -> ctypes.c_ulong:
        # made once: to end one takes the kernel milliseconds
        if not self._context.value:
            setup = _SYSCALLS[platform.machine()][0]
            _check(_syscall(setup, self.depth, ctypes.byref(self._context)))
        return self._context


def in_threads(work: Callable[[int], None], threads: int) -> None:
    """Run *work* with 0, 1, ... in as many threads; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def same_bytes(fd: int, places: Sequence[int], memory: mmap.mmap, size: int) -> bool:
    """Whether the blocks of *fd* at *places* are those of *memory*, read past the page cache."""
    block = pages(size)
    view = memoryview(memory)
    return all(
        os.preadv(fd, [block], place) == size and view[n * size : (n + 1) * size] == block
        for n, place in enumerate(places)
    )


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
