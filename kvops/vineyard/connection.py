"""One connection to a vineyard daemon: requests out, replies in, in order, each within its time.

The socket blocks, with the kernel's own timeouts on it, so that a deadline costs no system call. A batch is sent in
bursts while earlier bursts are being answered. What is under way never exceeds IN_FLIGHT_BYTES: the daemon stops
reading while it writes a reply, and two sides that both wait for room would wait for ever.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from kvferry.kvops.errors import (
    VineyardConnectionError,
    VineyardProtocolError,
    VineyardStatusError,
    VineyardTimeoutError,
)

from .codec import CODECS, Message
from .daemon_messages import CLIENT_VERSION, ExitRequest, RegisterReply, RegisterRequest
from .fds import Mappings, ReceivedDescriptors
from .framing import REPLY_LIMIT_BYTES, FrameReader, frame
from .payload import Payload
from .wire import decode_reply, descriptors_after, encode

IN_FLIGHT_BYTES = 32 << 10
"""Request bytes on their way; a socket's send buffer takes several times as much."""

_BURST_REQUESTS = 32
_READ_BYTES = 64 << 10
_TIMEVAL = struct.Struct("ll")
_MAX_PATH_BYTES = 107


class Connection:
    """A registered connection.

    Args:
        path: of the daemon's socket.
        mappings: where received memory is mapped; outlives the connection.
        timeout_s: for connecting and registering.
        username, password: for a daemon that keeps a list of users.

    Attributes:
        registered: what the daemon said of itself.
        is_settled: no reply is outstanding, so that the connection can be used. An exchange that raises leaves it
            False, except when a request could not be written and nothing was sent.
        has_sent: in the last exchange the kernel took bytes, so that the daemon may have carried out something.

    Raises:
        VineyardConnectionError: nobody listens there, or it is no daemon with blobs.
        VineyardTimeoutError: it did not register the client in time.
        VineyardStatusError: it refused the client.

    Threads: one at a time. Ownership: the socket; *mappings* stay the caller's.
    """

    def __init__(
        self,
        path: str,
        mappings: Mappings,
        timeout_s: float,
        username: str = "",
        password: str = "",
    ) -> None:
        self._mappings = mappings
        self._frames = FrameReader(REPLY_LIMIT_BYTES)
        self._descriptors = ReceivedDescriptors()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._send_timeout_s = self._receive_timeout_s = 0.0
        self._pid = os.getpid()
        self.is_settled = True
        self.has_sent = False
        self.path = path
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise VineyardConnectionError(
                f"the path of a socket must have at most {_MAX_PATH_BYTES} bytes; got {path!r}"
            )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # the kernel's send timeout is connect's as well: a daemon whose backlog is full holds nobody up
            self._set_send_timeout(timeout_s)
            self._socket.connect(path)
            register = RegisterRequest(CLIENT_VERSION, username=username, password=password)
            reply = self.exchange([register], timeout_s)[0]
            if isinstance(reply, VineyardStatusError):
                raise reply
            self.registered = cast(RegisterReply, reply)
            if not self.registered.store_match:
                raise VineyardConnectionError(f"{path} must be a daemon with blobs; it is not")
        except OSError as error:
            self.close()
            raise _connect_error(path, error) from error
        except BaseException:
            self.close()
            raise

    @property
    def is_mine(self) -> bool:
        """False in a child that inherited the connection by a fork, where using it would garble both."""
        return self._pid == os.getpid()

    def exchange(
        self, requests: Sequence[Message], timeout_s: float
    ) -> list[Message | VineyardStatusError]:
        """Send *requests* and return their replies, in order; a refused one is an error in its place.

        Args:
            requests: of any kinds, all of which have replies.
            timeout_s: for all of them together.

        Raises:
            VineyardTimeoutError: a reply is late. The connection cannot be used any more.
            VineyardConnectionError: the daemon is gone; the same.
            VineyardProtocolError: a reply makes no sense; the same.
        """
        bursts = list(_cut_into_bursts([frame(encode(request)) for request in requests]))
        deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._set_send_timeout(timeout_s)
        self._set_receive_timeout(timeout_s)
        replies: list[Message | VineyardStatusError] = []
        answered = sent = 0
        self.has_sent = self.is_settled = False
        for burst, count in bursts:
            # the daemon reads no more than its replies leave it room to write: only what surely fits into the
            # socket's buffer may be sent while replies are outstanding
            ahead = 0 if len(burst) > IN_FLIGHT_BYTES // 2 else _BURST_REQUESTS
            if sent - answered > ahead:
                self._receive(requests, replies, sent - ahead, deadline)
                answered = len(replies)
            self._send(burst, deadline)
            sent += count
        self._receive(requests, replies, sent, deadline)
        if self._frames.pending_bytes:
            raise VineyardProtocolError(
                f"a daemon must answer once; {self._frames.pending_bytes} bytes came on top"
            )
        self.is_settled = True
        return replies

    def close(self, *, say_goodbye: bool = False) -> None:
        """Close the socket; in the process that opened it the daemon then drops what the connection held."""
        if say_goodbye and self.is_mine:
            # politeness only: the daemon sees the end of the stream anyway
            with contextlib.suppress(OSError):
                self._socket.send(frame(encode(ExitRequest())), socket.MSG_DONTWAIT)
        self._socket.close()
        self._descriptors.close()

    def _receive(
        self,
        requests: Sequence[Message],
        replies: list[Message | VineyardStatusError],
        until: int,
        deadline: float,
    ) -> None:
        while len(replies) < until:
            expected = CODECS[type(requests[len(replies)])].reply
            assert expected is not None
            text = self._frames.next_frame()
            while text is None:
                self._fill(deadline)
                text = self._frames.next_frame()
            try:
                reply: Message = decode_reply(text, expected)
            except VineyardStatusError as refusal:
                replies.append(refusal)
                continue
            announced = descriptors_after(reply)
            if announced:
                self._map(reply, announced, deadline)
            replies.append(reply)

    def _map(self, reply: Any, announced: list[int], deadline: float) -> None:
        sizes = {payload.store_fd: payload.map_size for payload in payloads_of(reply)}
        while not self._frames.skip_carriers(len(announced)):
            self._fill(deadline)
        for store_fd in announced:
            if store_fd not in sizes:
                raise VineyardProtocolError(
                    f"descriptors must belong to blobs of their reply; {store_fd} does not"
                )
            self._mappings.add(store_fd, self._descriptors.take(), sizes[store_fd])

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._socket.send(rest) :]
                self.has_sent = True
                if rest and time.monotonic() > deadline:
                    raise self._late()
        except BlockingIOError:
            raise self._late() from None
        except OSError as error:
            raise VineyardConnectionError(f"the daemon at {self.path} is gone: {error}") from error

    def _fill(self, deadline: float) -> None:
        try:
            size = self._descriptors.read(self._socket, self._buffer)
        except BlockingIOError:
            raise self._late() from None
        except OSError as error:
            raise VineyardConnectionError(f"the daemon at {self.path} is gone: {error}") from error
        if not size:
            raise VineyardConnectionError(f"the daemon at {self.path} closed the connection")
        self._frames.feed(self._buffer[:size])
        # the kernel starts its clock at every read: a daemon that sends a byte now and then must not hold us
        left_s = deadline - time.monotonic()
        if left_s < 0:
            raise self._late()
        if left_s < 0.9 * self._receive_timeout_s:
            self._set_receive_timeout(left_s)

    def _late(self) -> VineyardTimeoutError:
        return VineyardTimeoutError(
            f"the daemon at {self.path} did not answer within {self._timeout_s:.3g} s"
        )

    def _set_send_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._send_timeout_s:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
            self._send_timeout_s = timeout_s

    def _set_receive_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._receive_timeout_s:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
            self._receive_timeout_s = timeout_s


def _timeval(seconds: float) -> bytes:
    # zero would mean no timeout at all
    return _TIMEVAL.pack(*divmod(max(1, int(seconds * 1_000_000)), 1_000_000))


def payloads_of(reply: Any) -> list[Payload]:
    """Return the places of blobs that a reply tells of."""
    payloads: list[Payload] | None = getattr(reply, "payloads", None)
    if payloads is not None:
        return payloads
    for field in ("created", "buffer"):
        payload = getattr(reply, field, None)
        if isinstance(payload, Payload):
            return [payload]
    return []


def _cut_into_bursts(frames: list[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield frames joined into bursts of half of IN_FLIGHT_BYTES at most, and how many each joins.

    A frame longer than that makes a burst of its own.
    """
    burst: list[bytes] = []
    size = 0
    for one in frames:
        if burst and (size + len(one) > IN_FLIGHT_BYTES // 2 or len(burst) == _BURST_REQUESTS):
            yield b"".join(burst), len(burst)
            burst, size = [], 0
        burst.append(one)
        size += len(one)
    if burst:
        yield b"".join(burst), len(burst)


def _connect_error(path: str, error: OSError) -> VineyardConnectionError:
    if isinstance(error, FileNotFoundError):
        why = "there is no such socket: is the daemon running?"
    elif isinstance(error, ConnectionRefusedError):
        why = "nobody listens on it any more: the daemon has died"
    elif isinstance(error, BlockingIOError):
        why = "it does not accept connections in time"
    else:
        why = str(error)
    return VineyardConnectionError(f"cannot connect to vineyard at {path}: {why}")
