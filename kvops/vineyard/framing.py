"""Frames: how messages lie on the socket, in both directions.

::

    offset 0   u64 little endian   length of the text in bytes
    offset 8   length bytes        one JSON object, UTF-8, no NUL at the end

After a reply that announces file descriptors (``fd`` or ``fds``, see payload.py) the server sends one extra byte for
each of them, the *carrier*: its value means nothing, the descriptor is attached to it (fds.py). Requests and replies
alternate strictly; a client may send several requests before it reads the replies, which come in the same order.

No I/O here: bytes go in, messages come out.
"""

from struct import Struct

from kvferry.kvops.errors import VineyardProtocolError

_HEADER = Struct("<Q")

HEADER_BYTES = _HEADER.size

REQUEST_LIMIT_BYTES = 16 << 20
"""What a server of ours accepts unless told otherwise; a request of 64 Ki blobs fits four times."""

REPLY_LIMIT_BYTES = 256 << 20
"""What a client accepts; vineyardd has this limit for both directions."""

_COMPACT_BYTES = 1 << 16


def frame(text: bytes) -> bytes:
    """Return *text* as it goes on the socket."""
    return _HEADER.pack(len(text)) + text


class FrameReader:
    """Cuts a stream of bytes, arriving in pieces of any size, into messages.

    Holds at most *limit_bytes* and one piece: a header that announces more is an error at once.

    Args:
        limit_bytes: longest text accepted.

    Threads: one at a time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._buffer = bytearray()
        self._start = 0

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Append bytes as they came from the socket."""
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = 0
        elif self._start > _COMPACT_BYTES:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += piece

    def next_frame(self) -> bytes | None:
        """Return the text of the next message; None while it is incomplete.

        Raises:
            VineyardProtocolError: the header announces more than the limit. The stream cannot be read on.
        """
        held = len(self._buffer) - self._start
        if held < HEADER_BYTES:
            return None
        (length,) = _HEADER.unpack_from(self._buffer, self._start)
        if length > self._limit:
            raise VineyardProtocolError(
                f"a message must have at most {self._limit} bytes; its header says {length}"
            )
        if held < HEADER_BYTES + length:
            return None
        begin = self._start + HEADER_BYTES
        self._start = begin + length
        return bytes(memoryview(self._buffer)[begin : self._start])

    def skip_carriers(self, count: int) -> bool:
        """Step over the bytes that carried *count* descriptors; False, with nothing done, while some are missing."""
        if len(self._buffer) - self._start < count:
            return False
        self._start += count
        return True

    @property
    def pending_bytes(self) -> int:
        """Bytes fed and not yet given out: not zero when a stream ends means it was cut off."""
        return len(self._buffer) - self._start
