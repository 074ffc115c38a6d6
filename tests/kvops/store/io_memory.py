"""Memory for requests: pieces on pages of their own, poison in them and guards between them; and driving an engine."""

import contextlib
import ctypes
import mmap
import os
import time

from kvferry.kvops.store.file_io import Direction, Request

PAGE = 4096
POISON = 0xA5
DEADLINE_S = 20.0


class Memory:
    """Pages full of poison, from which pieces are cut with at least a page between them."""

    def __init__(self, num_bytes):
        self.map = mmap.mmap(-1, num_bytes)
        self.map.write(bytes([POISON]) * num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.used = []
        self._next = PAGE

    def pieces(self, *sizes):
        cut = []
        for size in sizes:
            cut.append((self.address + self._next, size))
            self.used.append((self._next, size))
            self._next += -(-size // PAGE) * PAGE + PAGE
        assert self._next <= len(self.map)
        return tuple(cut)

    def put(self, pieces, data):
        for address, size in pieces:
            at = address - self.address
            self.map[at : at + size], data = data[:size], data[size:]
        assert not data

    def get(self, pieces):
        starts = [(address - self.address, size) for address, size in pieces]
        return b"".join(self.map[at : at + size] for at, size in starts)

    def check_guards(self):
        """Nothing was written outside of the pieces."""
        bytes_now = bytearray(self.map[:])
        for at, size in self.used:
            bytes_now[at : at + size] = bytes([POISON]) * size
        assert bytes_now.count(POISON) == len(bytes_now)


def read(fd, offset, pieces, owner=None):
    return Request(Direction.READ, fd, offset, pieces, owner)


def write(fd, offset, pieces, owner=None):
    return Request(Direction.WRITE, fd, offset, pieces, owner)


def reap_all(io, count=None):
    """Everything in flight (or *count*), each exactly once."""
    completions = []
    deadline = time.monotonic() + DEADLINE_S
    while io.in_flight if count is None else len(completions) < count:
        assert time.monotonic() < deadline, f"{io.in_flight} requests did not end"
        completions += io.reap(1.0)
    assert len({id(completion.request) for completion in completions}) == len(completions)
    return completions


def run(io, *requests):
    """Submit all, reap all; completions in the order of the requests."""
    todo, completions = list(requests), []
    while todo or io.in_flight:
        todo = todo[io.submit(todo) :]
        completions += io.reap(1.0)
    found = {id(completion.request): completion for completion in completions}
    assert len(found) == len(completions) == len(requests)
    return [found[id(request)] for request in requests]


def open_fds():
    """Descriptors of this process, and what they are."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        # the one that lists them is gone by now
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found
