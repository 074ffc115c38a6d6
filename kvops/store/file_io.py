"""File I/O behind one small protocol, so that engines can be exchanged and faults injected at one place.

An engine moves bytes between files and memory of this process and says how each request ended. It knows no blobs and
no arena: addresses in, completions out. Whoever submits a request keeps its memory alive, and out of other use, until
the engine has returned it, whatever it decided about it meanwhile: nobody can take an I/O back that a drive has begun.

    submit(requests)                         taken up to the depth and the bytes in flight, never waits
        |  each exactly once
        v
    reap() -> Completion(request, count, errno)
"""

import dataclasses
import enum
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

DIRECT_ALIGNMENT = 4096
"""What addresses, offsets and sizes of direct I/O are multiples of, in bytes."""


class Direction(enum.Enum):
    """Which way the bytes go."""

    READ = "read"
    WRITE = "write"


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One contiguous piece of a file, scattered over pieces of memory.

    Attributes:
        direction: from the file, or into it.
        fd: an open file of this engine.
        offset: where in the file, in bytes.
        pieces: (address, bytes) in memory of this process, one after the other in the file; 64 at the most.
        owner: whatever the submitter wants to find again.
        submitted_s, done_s: monotonic times at which the engine took it and saw it end; 0 before.
    """

    direction: Direction
    fd: int
    offset: int
    pieces: tuple[tuple[int, int], ...]
    owner: object = None
    submitted_s: float = 0.0
    done_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        # a generator would cost more than the rest of a request
        size = 0
        for _, piece in self.pieces:
            size += piece
        return size


@dataclasses.dataclass(slots=True)
class Completion:
    """How a request ended.

    Attributes:
        request: the request; its memory is the submitter's again.
        count: bytes that were moved; fewer than asked for is a failure (the end of the file, a full disk).
        errno: the operating system's error number; 0 for none.
    """

    request: Request
    count: int
    errno: int

    @property
    def ok(self) -> bool:
        """Whether every byte was moved."""
        return self.errno == 0 and self.count == self.request.num_bytes

    @property
    def why(self) -> str:
        """What went wrong, for a log."""
        verb = self.request.direction.value
        if self.errno:
            return f"{verb}: {os.strerror(self.errno)}"
        return f"{verb}: {self.count} of {self.request.num_bytes} bytes"


class FileIo(Protocol):
    """An I/O engine: asynchronous requests, and the few calls on files that go with them.

    All calls on files raise OSError as `os` does. Threads: one thread submits and reaps; the calls on files may come
    from any; `wake` from any. A fork does not carry an engine along.
    """

    name: str
    depth: int
    """Requests in flight at the most."""
    max_inflight_bytes: int
    """Bytes in flight at the most; a single request that is larger goes alone."""

    @property
    def in_flight(self) -> int:
        """Requests taken and not yet reaped."""
        ...

    def submit(self, requests: Sequence[Request]) -> int:
        """Take the leading ones of *requests*, as far as there is room; return how many. Never waits.

        Raises:
            OSError: nothing was taken, and trying again at once will not help.
        """
        ...

    def reap(self, timeout_s: float) -> list[Completion]:
        """Return what has ended; wait up to *timeout_s* for a first one, or until :meth:`wake`."""
        ...

    def wake(self) -> None:
        """Make a :meth:`reap` that waits, or the next one, return at once."""
        ...

    def open(self, path: Path, *, write: bool, create: bool = False, direct: bool = True) -> int:
        """Open a file and return its descriptor, mode 0600, never through a symbolic link.

        Args:
            path: the file; the last part of it must not be a symbolic link.
            write: for reading and writing.
            create: it must not exist yet.
            direct: past the page cache; where the file system refuses that, buffered, with one loud line in a process.
        """
        ...

    def close_file(self, fd: int) -> None:
        """Close a descriptor of :meth:`open`."""
        ...

    def read_now(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Read at once, buffered or aligned; fewer bytes only at the end of the file."""
        ...

    def write_now(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of *data* at once."""
        ...

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve space on the disk for the first *num_bytes* of a file, and make it at least that long."""
        ...

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Make a file exactly that long."""
        ...

    def sync(self, fd: int) -> None:
        """Return when the data, and what is needed to find them, are on the drive."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are on the drive."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, replacing what had it."""
        ...

    def unlink(self, path: Path) -> None:
        """Delete a file; no error if it is gone."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End the engine, waiting for requests in flight; False if some are left, whose memory must then stay."""
        ...
