"""File descriptors over the socket, and the memory behind them.

A descriptor rides on one byte of its own, the carrier (framing.py), sent after the reply that announces it. On
Linux a read that reaches a carrier ends with it; bytes before it, from other messages, may come in the same read. So
descriptors are collected in the order they arrive and taken in the order the replies announce them.

``store_fd`` numbers belong to one connection: after a reconnect the same number may mean another file.
"""

import array
import contextlib
import mmap
import os
import socket
from collections import deque
from collections.abc import Iterable
from weakref import WeakValueDictionary

from kvferry.kvops.errors import VineyardProtocolError

from .payload import MAP_GAP_BYTES, Payload

_INT_BYTES = array.array("i").itemsize
_MAX_PER_READ = 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_PER_READ * _INT_BYTES)
_CARRIER = b"\0"
_MAX_WAITING = 256


def send_descriptor(connection: socket.socket, fd: int) -> None:
    """Send one descriptor with its carrier; by a call of its own, as the stock client needs it.

    Raises:
        OSError: the connection is gone, or timed out.
    """
    connection.sendmsg([_CARRIER], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


class SentDescriptors:
    """What a server must remember of one connection: which files' descriptors it has sent.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._sent: set[int] = set()

    def announce(self, payloads: Iterable[Payload]) -> list[int]:
        """Return the files of *payloads* not sent before, in order of first use; they count as sent from now on."""
        new = []
        for payload in payloads:
            if payload.data_size and payload.store_fd not in self._sent:
                self._sent.add(payload.store_fd)
                new.append(payload.store_fd)
        return new


class ReceivedDescriptors:
    """Descriptors that have arrived and that no reply has claimed yet.

    Threads: one at a time. Ownership: holds them until :meth:`take` or :meth:`close`.
    """

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()

    def read(self, connection: socket.socket, buffer: memoryview) -> int:
        """Read into *buffer* as ``recv_into`` does, and keep the descriptors that come along.

        Raises:
            OSError: as ``recv_into`` does.
            VineyardProtocolError: more descriptors than any daemon sends.
        """
        size, ancillary, flags, _ = connection.recvmsg_into(
            [buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) // _INT_BYTES * _INT_BYTES])
                self._waiting.extend(numbers)
        if flags & socket.MSG_CTRUNC or len(self._waiting) > _MAX_WAITING:
            raise VineyardProtocolError(
                f"a daemon must send one descriptor per byte; got {len(self._waiting)} at once"
            )
        return size

    def take(self) -> int:
        """Return the oldest; the caller closes it.

        Raises:
            VineyardProtocolError: a reply announced one, and its carrier came without.
        """
        if not self._waiting:
            raise VineyardProtocolError("a descriptor must follow this reply; none came")
        return self._waiting.popleft()

    def close(self) -> None:
        """Close what nobody took."""
        while self._waiting:
            os.close(self._waiting.popleft())


class Mappings:
    """Shared memory of a daemon, mapped once per file however many connections lead to it.

    Threads: one at a time. Ownership: a mapping lives as long as its number is known here or a view of it exists; after
    a daemon's death its memory is held by views only.
    """

    def __init__(self) -> None:
        self._by_store_fd: dict[int, mmap.mmap] = {}
        # weak: the same file again costs no second mapping, another daemon's is not kept alive
        self._by_file: WeakValueDictionary[tuple[int, int], mmap.mmap] = WeakValueDictionary()

    def add(self, store_fd: int, fd: int, map_size: int) -> None:
        """Map the file behind *fd*, which is closed, as *store_fd* of this connection.

        Args:
            store_fd: its number in the daemon.
            fd: its descriptor here.
            map_size: what the payload says.

        Raises:
            VineyardProtocolError: the file is smaller than *map_size* says, or cannot be mapped.
        """
        size = map_size - MAP_GAP_BYTES
        try:
            about = os.fstat(fd)
            # touching a page past the end of the file would kill this process
            if size <= 0 or about.st_size < size:
                raise VineyardProtocolError(
                    f"file {store_fd} must have {size} bytes; it has {about.st_size}"
                )
            # the mapping keeps the file alive, so that its number is not given to another one
            identity = (about.st_dev, about.st_ino)
            known = self._by_file.get(identity)
            if known is None or known.closed or len(known) < size:
                known = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                self._by_file[identity] = known
            self._by_store_fd[store_fd] = known
        except (OSError, ValueError, OverflowError) as error:
            raise VineyardProtocolError(f"file {store_fd} cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def view(self, payload: Payload) -> memoryview:
        """Return the bytes of a blob, writable.

        Raises:
            VineyardProtocolError: its file was never sent on this connection, or is too small for it.
        """
        if not payload.data_size:
            return memoryview(bytearray())
        mapping = self._by_store_fd.get(payload.store_fd)
        end = payload.data_offset + payload.data_size
        if mapping is None or end > len(mapping):
            raise VineyardProtocolError(
                f"blob o{payload.object_id:016x} must lie in a file that was sent;"
                f" it ends at byte {end} of file {payload.store_fd}"
            )
        return memoryview(mapping)[payload.data_offset : end]

    def close(self) -> None:
        """Forget the numbers of a connection, and unmap what no view uses; the rest goes with its last view."""
        for mapping in self._by_store_fd.values():
            # a mapping that has views refuses
            with contextlib.suppress(BufferError):
                mapping.close()
        self._by_store_fd.clear()
