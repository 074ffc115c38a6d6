"""Which engine: the one that was asked for, or the one that reads faster from this folder.

Small blobs decide: at 64 KiB a queue in the kernel costs one thread what worker threads cost eight, at 2 MiB the drive
is the limit.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from .file_io import Direction, FileIo, Request
from .io_aio import AioIo
from .io_calls import is_direct
from .io_threads import ThreadIo

logger = logging.getLogger(__name__)

NAMES = ("auto", "aio", "threads")
"""Engines by name; "auto" measures."""

MEASURE_S = 0.2
"""How long is read in all, in seconds."""

PATIENCE_S = 2.0
"""How long a drive may take to answer at all."""

PIECE_BYTES = 64 << 10
FILE_BYTES = 4 << 20

ROUNDS = 2
"""How often each engine gets its turn; the best counts, since a busy machine only ever makes it slower."""

THREADS_LEAD = 1.1
"""Threads must be so much faster to be chosen: they cost more of the interpreter, which the engine's thread wants."""


# engines that a drive keeps from ending, and with them the memory that it may still write into
_stuck: list[FileIo] = []


def open_io(
    name: str, folder: Path, depth: int = 32, max_inflight_bytes: int = 256 << 20
) -> FileIo:
    """Open an I/O engine for the files in a folder, and say which in one line.

    Args:
        name: one of :data:`NAMES`.
        folder: where the files will be; it must exist. "auto" has a nameless file of 4 MiB in it for 0.3 s.
        depth: requests in flight at the most.
        max_inflight_bytes: bytes in flight at the most.

    Raises:
        ValueError: *name* is none of them, or a bound is not positive.
        OSError: "aio" was asked for and is not there. "auto" takes threads instead.

    Ownership: the caller closes the engine.
    """
    if name not in NAMES:
        raise ValueError(f"io engine must be one of {', '.join(NAMES)}; got {name!r}")
    reason = "as set"
    if name == "auto":
        name, reason = choose(folder, depth)
    io: FileIo = _open(name, depth, max_inflight_bytes)
    logger.info("disk I/O by %s (%s), up to %d requests in flight", io.name, reason, depth)
    return io


def choose(folder: Path, depth: int) -> tuple[str, str]:
    """Return the better engine's name for files in *folder*, and why, in words."""
    deadline = time.monotonic() + MEASURE_S
    with contextlib.ExitStack() as stack:
        try:
            engines = [stack.enter_context(_closing(name, depth)) for name in ("aio", "threads")]
            fd = stack.enter_context(_measured_file(engines[0], folder))
            if not is_direct(fd):
                return "threads", f"{folder} takes no direct I/O"
            rates = _measure(engines, fd, deadline)
        except OSError as error:
            # whatever is wrong with the disk is for those to say who want to store something there
            return "threads", f"not measured: {error}"
    winner = "threads" if rates["threads"] > THREADS_LEAD * rates["aio"] else "aio"
    both = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
    return winner, f"read {both} in pieces of {PIECE_BYTES >> 10} KiB"


def _open(name: str, depth: int, max_inflight_bytes: int) -> AioIo | ThreadIo:
    if name == "aio":
        return AioIo(depth, max_inflight_bytes)
    return ThreadIo(depth, max_inflight_bytes)


@contextlib.contextmanager
def _closing(name: str, depth: int) -> Iterator[FileIo]:
    io = _open(name, depth, FILE_BYTES)
    try:
        yield io
    finally:
        if not io.close(PATIENCE_S):
            _stuck.append(io)


@contextlib.contextmanager
def _measured_file(io: FileIo, folder: Path) -> Iterator[int]:
    path = folder / f".measure-{os.getpid()}-{secrets.token_hex(4)}"
    fd = io.open(path, write=True, create=True)
    try:
        # nameless from here on: also a process that is killed leaves nothing behind
        io.unlink(path)
        io.allocate(fd, FILE_BYTES)
        io.write_now(fd, bytes(FILE_BYTES), 0)
        yield fd
    finally:
        io.close_file(fd)


def _measure(engines: list[FileIo], fd: int, deadline: float) -> dict[str, float]:
    """Return bytes per second of each engine, by name."""
    turns = [io for _ in range(ROUNDS) for io in engines]
    best = dict.fromkeys((io.name for io in engines), 0.0)
    memory = mmap.mmap(-1, FILE_BYTES)
    for number, io in enumerate(turns):
        left = max(0.0, deadline - time.monotonic()) / (len(turns) - number)
        best[io.name] = max(best[io.name], _rate(io, fd, memory, left))
    return best


def _rate(io: FileIo, fd: int, memory: mmap.mmap, seconds: float) -> float:
    """Read with a full queue; return bytes per second."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # each request keeps the memory for as long as the engine keeps the request
    waiting = [
        Request(Direction.READ, fd, offset, ((address + offset, PIECE_BYTES),), memory)
        for offset in range(0, FILE_BYTES, PIECE_BYTES)
    ]
    if seconds <= 0:
        raise TimeoutError(
            errno.ETIMEDOUT, "the disk is too slow, or too busy, to be measured in time"
        )
    start = now = time.monotonic()
    moved = 0
    while io.in_flight or now < start + seconds:
        if now < start + seconds:
            waiting = waiting[io.submit(waiting) :]
        for completion in io.reap(PATIENCE_S):
            if not completion.ok:
                raise OSError(completion.errno or errno.EIO, "a read did not succeed")
            moved += completion.count
            waiting.append(completion.request)
        now = time.monotonic()
        if now > start + seconds + PATIENCE_S:
            raise TimeoutError(errno.ETIMEDOUT, f"reads did not end within {PATIENCE_S:.0f} s")
    return moved / (now - start)
