"""What every engine does alike: how much may be in flight, and how requests look to the kernel."""

import ctypes
import errno
import itertools
import struct
from collections.abc import Sequence

from .file_io import Direction, Request
from .io_calls import FileCalls

MAX_PIECES = 64
"""Pieces of memory in one request; the kernel would take 1024."""

IOVEC = struct.Struct("=QQ")
"""The kernel's struct iovec on a 64-bit machine: address, bytes."""

_ROWS = [struct.Struct(f"={2 * count}Q") for count in range(MAX_PIECES + 1)]
"""So many iovecs, in one call."""

SECTOR_BYTES = 512
"""A direct transfer that ends off a multiple of this has met the end of the file."""

# called through ctypes, which lets go of the interpreter lock; os.preadv would need a buffer object for each piece
_libc = ctypes.CDLL(None, use_errno=True)
_CALLS = {Direction.READ: _libc.preadv, Direction.WRITE: _libc.pwritev}
for _call in _CALLS.values():
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t


class Bounded:
    """How much an engine has in flight, and may have.

    Args:
        depth: requests in flight at the most.
        max_inflight_bytes: bytes in flight at the most; a single request that is larger goes alone.

    Threads: one thread submits and reaps.
    """

    def __init__(self, depth: int, max_inflight_bytes: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1; got {depth}")
        if max_inflight_bytes < 1:
            raise ValueError(f"max_inflight_bytes must be at least 1; got {max_inflight_bytes}")
        self.depth = depth
        self.max_inflight_bytes = max_inflight_bytes
        self.closed = False
        self._count = 0
        self._bytes = 0

    @property
    def in_flight(self) -> int:
        """Requests taken and not yet reaped."""
        return self._count

    def _admit(self, requests: Sequence[Request]) -> int:
        """Count the leading requests that there is room for as in flight; return how many.

        Raises:
            OSError: the engine is closed.
            ValueError: a request has too many pieces.
        """
        if self.closed:
            raise OSError(errno.ESHUTDOWN, "the I/O engine is closed")
        taken, total = 0, self._bytes
        for request in requests[: self.depth - self._count]:
            if len(request.pieces) > MAX_PIECES:
                raise ValueError(
                    f"a request must have at most {MAX_PIECES} pieces; got {len(request.pieces)}"
                )
            more = total + size_of(request)
            if more > self.max_inflight_bytes and self._count + taken > 0:
                break
            taken, total = taken + 1, more
        self._count += taken
        self._bytes = total
        return taken

    def _forget(self, request: Request) -> None:
        self._count -= 1
        self._bytes -= size_of(request)


class Engine(Bounded, FileCalls):
    """Base of the engines that do the I/O themselves."""


class Iovecs:
    """A row of iovecs in memory that stays where it is.

    Attributes:
        address: where the first one is.
    """

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = (ctypes.c_char * (IOVEC.size * MAX_PIECES))()
        self.address = ctypes.addressof(self._memory)

    def fill(self, pieces: tuple[tuple[int, int], ...], skip: int = 0) -> int:
        """Describe *pieces* without their first *skip* bytes; return how many iovecs that takes."""
        memory, pack = self._memory, IOVEC.pack_into
        if not skip:
            _ROWS[len(pieces)].pack_into(memory, 0, *itertools.chain.from_iterable(pieces))
            return len(pieces)
        count = 0
        for address, num_bytes in pieces:
            if skip >= num_bytes > 0:
                skip -= num_bytes
                continue
            pack(memory, count * 16, address + skip, num_bytes - skip)
            count += 1
            skip = 0
        return count


def size_of(request: Request) -> int:
    """Return the bytes of all pieces; a loop, at a third of the price of a sum, several times a request."""
    total = 0
    for _, num_bytes in request.pieces:
        total += num_bytes
    return total


def transfer(request: Request, iovecs: Iovecs, count: int = 0) -> tuple[int, int]:
    """Do a request in this thread, from byte *count* on; return how many bytes were moved in all, and the error number."""
    call = _CALLS[request.direction]
    while True:
        pieces = iovecs.fill(request.pieces, count)
        moved = call(request.fd, iovecs.address, pieces, request.offset + count)
        if moved < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                return count, number
            continue
        count += moved
        if not goes_on(request, count, moved):
            return count, 0


def goes_on(request: Request, count: int, moved: int) -> bool:
    """Return whether a transfer that just moved *moved* bytes, *count* in all, is to be continued.

    A limit inside the kernel leaves whole sectors, and there is more to move. What ends between them is the end of the
    file, from where direct I/O refuses to go on.
    """
    return moved > 0 and moved % SECTOR_BYTES == 0 and count < size_of(request)
