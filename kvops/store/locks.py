"""Locks on an arena file that the kernel drops when their holder dies.

Open-file-description locks on single bytes past the end of the data: they belong to the open file, not to the process,
so that two arenas in one process do not undo each other's locks.
"""

import contextlib
import enum
import errno
import fcntl
import struct
import time
from collections.abc import Iterator

from kvferry.kvops.errors import ArenaBusyError

_FLOCK = struct.Struct("hhqqi4x")
_FIRST_BYTE = 1 << 62
POLL_S = 0.005


class Lock(enum.IntEnum):
    """Which byte is locked."""

    CREATE = 0
    """Held while the file is made or removed."""

    ATTACHED = 1
    """Shared by every process that maps the arena."""

    OWNER = 2
    """Held by the one process that writes index and headers."""


def _request(lock: Lock, kind: int) -> bytes:
    return _FLOCK.pack(kind, 0, _FIRST_BYTE + lock, 1, 0)


def try_lock(fd: int, lock: Lock, *, shared: bool = False) -> bool:
    """Take *lock* if nobody else holds it; return whether it was taken."""
    try:
        fcntl.fcntl(
            fd, fcntl.F_OFD_SETLK, _request(lock, fcntl.F_RDLCK if shared else fcntl.F_WRLCK)
        )
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, lock: Lock) -> None:
    """Give *lock* back; no error if it was not held."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(lock, fcntl.F_UNLCK))


def is_held(fd: int, lock: Lock) -> bool:
    """Return whether somebody else holds *lock*."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(lock, fcntl.F_WRLCK))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


@contextlib.contextmanager
def hold(fd: int, lock: Lock, *, timeout_s: float, what: str) -> Iterator[None]:
    """Hold *lock* within a block of code.

    Raises:
        ArenaBusyError: *timeout_s* seconds passed while somebody else held it.
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd, lock):
        if time.monotonic() > deadline:
            raise ArenaBusyError(f"{what}: another process has held its lock for {timeout_s:.0f} s")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        unlock(fd, lock)
