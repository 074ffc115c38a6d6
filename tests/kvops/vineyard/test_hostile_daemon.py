"""A client against daemons that answer wrong, late, in pieces or not at all: an error in time, and nothing left open."""

import contextlib
import mmap
import os
import socket
import threading
import time

import pytest

from kvferry.kvops.errors import (
    VineyardConnectionError,
    VineyardError,
    VineyardProtocolError,
    VineyardStatusError,
    VineyardTimeoutError,
)
from kvferry.kvops.vineyard import blob_messages as blobs
from kvferry.kvops.vineyard import daemon_messages
from kvferry.kvops.vineyard import object_messages as objects
from kvferry.kvops.vineyard.client import Client
from kvferry.kvops.vineyard.connection import IN_FLIGHT_BYTES
from kvferry.kvops.vineyard.fds import SentDescriptors, send_descriptor
from kvferry.kvops.vineyard.framing import REQUEST_LIMIT_BYTES, FrameReader, frame
from kvferry.kvops.vineyard.payload import EMPTY_PAYLOAD, MAP_GAP_BYTES, Payload
from kvferry.kvops.vineyard.wire import decode_request, encode, encode_error

FILE_BYTES = 8192
STORE_FD = 77
WELCOME = daemon_messages.RegisterReply("", "", 0, 0, "0.24.2")


class Script:
    """A daemon that answers each request with what *answer* makes of it.

    ``answer(request, connection)`` returns bytes to send as they are, a reply, a status code, or None to close.
    """

    def __init__(self, folder, answer):
        self.path = folder / "s.sock"
        self.file = os.memfd_create("kvferry-script")
        os.ftruncate(self.file, FILE_BYTES)
        os.pwrite(self.file, bytes(range(256)) * (FILE_BYTES // 256), 0)
        self.requests = []
        self.welcomes = 0
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        self._open = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection):
        reader = FrameReader(REQUEST_LIMIT_BYTES)
        with contextlib.suppress(OSError), connection:
            while piece := connection.recv(1 << 16):
                reader.feed(piece)
                while (text := reader.next_frame()) is not None:
                    request = decode_request(text)
                    if isinstance(request, daemon_messages.RegisterRequest):
                        self.welcomes += 1
                        connection.sendall(frame(encode(WELCOME)))
                        continue
                    if isinstance(request, daemon_messages.ExitRequest):
                        return
                    self.requests.append(request)
                    answer = self._answer(request, connection)
                    if answer is None:
                        return
                    if isinstance(answer, int):
                        answer = frame(encode_error(answer, "no"))
                    elif not isinstance(answer, bytes):
                        answer = frame(encode(answer))
                    connection.sendall(answer)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        os.close(self.file)


@pytest.fixture
def script(short_path):
    started = []
    before = set(os.listdir("/proc/self/fd"))

    def start(answer, timeout_s=20.0):
        daemon = Script(short_path, answer)
        client = Client(daemon.path, timeout_s=timeout_s)
        started.append((daemon, client))
        return daemon, client

    yield start
    for daemon, client in started:
        client.close()
        daemon.close()
    assert set(os.listdir("/proc/self/fd")) == before


def place(
    object_id=1 << 63 | 1, offset=0, size=16, map_size=FILE_BYTES + MAP_GAP_BYTES, fd=STORE_FD
):
    return Payload(object_id, fd, offset, size, map_size)


def created(payload, fd=-1):
    return frame(encode(blobs.CreateBufferReply(payload.object_id, payload, fd)))


SEALED = frame(encode(blobs.SealReply()))

WRONG = {
    "another reply": frame(encode(blobs.DropBufferReply())),
    "no JSON": frame(b"hello"),
    "empty text": frame(b""),
    "a header too large": b"\xff" * 8,
    "one reply too many": SEALED * 2,
    "bytes on top": SEALED + b"x",
    "a code that is no number": frame(b'{"code":"14"}'),
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_nonsense_is_an_error_and_the_next_call_starts_over(script, answer):
    answers = [answer, SEALED]
    daemon, client = script(lambda request, connection: answers.pop(0))
    with pytest.raises(VineyardProtocolError):
        client.seal([5])
    assert not client.is_connected
    client.seal([5])
    assert daemon.welcomes == client.connects == 2


def test_a_reply_in_single_bytes_is_understood(script):
    def answer(request, connection):
        for byte in SEALED[:-1]:
            connection.sendall(bytes([byte]))
        return SEALED[-1:]

    _, client = script(answer)
    client.seal([5])


def test_a_daemon_that_drips_is_given_up_in_time(script):
    stop = threading.Event()

    def answer(request, connection):
        for byte in frame(b" " * 10_000):
            connection.sendall(bytes([byte]))
            if stop.wait(0.02):
                break
        return

    _, client = script(answer, timeout_s=0.4)
    began = time.monotonic()
    with pytest.raises(VineyardTimeoutError):
        client.seal([5])
    assert time.monotonic() - began < 10
    stop.set()


def test_a_daemon_that_never_answers_is_given_up_in_time(script):
    daemon, client = script(lambda request, connection: b"", timeout_s=20)
    began = time.monotonic()
    with pytest.raises(VineyardTimeoutError):
        client.evict([5], timeout_s=0.2)
    assert time.monotonic() - began < 10
    assert daemon.requests == [blobs.EvictRequest([5])]


def test_a_daemon_that_reads_nothing_does_not_hold_the_sender(short_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "s.sock"))
        listener.listen(1)
        client = Client(short_path / "s.sock", timeout_s=0.3)
        began = time.monotonic()
        with pytest.raises(VineyardTimeoutError):
            client.seal([5])
        assert time.monotonic() - began < 10
        client.close()


def test_a_question_is_asked_again_when_the_connection_breaks(script):
    answers = [None, objects.ExistsReply(True)]
    daemon, client = script(lambda request, connection: answers.pop(0))
    assert client.connect().version == "0.24.2"
    assert client.objects.exist([5]) == [True]
    assert daemon.requests == [objects.ExistsRequest(5)] * 2
    assert client.connects == 2


def test_a_deed_is_not_done_twice_when_the_connection_breaks(script):
    answers = [None, created(EMPTY_PAYLOAD)]
    daemon, client = script(lambda request, connection: answers.pop(0))
    client.connect()
    with pytest.raises(VineyardConnectionError, match=r"closed the connection|is gone"):
        client.create_blob(10)
    assert daemon.requests == [blobs.CreateBufferRequest(10)]
    client.create_blob(0)


def test_a_refusal_in_a_batch_keeps_its_place(script):
    answers = [SEALED, 12, SEALED]
    _, client = script(lambda request, connection: answers.pop(0))
    replies = client.batch([blobs.SealRequest(n) for n in range(3)])
    assert [type(reply) for reply in replies] == [
        blobs.SealReply,
        VineyardStatusError,
        blobs.SealReply,
    ]


def test_blobs_refused_midway_are_given_back(script):
    def answer(request, connection):
        if isinstance(request, blobs.DropBufferRequest):
            return blobs.DropBufferReply()
        if request.size == 3:
            return 41
        return created(EMPTY_PAYLOAD._replace(object_id=request.size))

    daemon, client = script(answer)
    with pytest.raises(VineyardStatusError, match="code 41"):
        client.create_blobs([1, 2, 3, 4])
    drops = [
        request.id for request in daemon.requests if isinstance(request, blobs.DropBufferRequest)
    ]
    assert drops == [1, 2, 4]


# descriptors


def test_memory_is_mapped_when_its_descriptor_comes(script):
    sent = []

    def answer(request, connection):
        payload = place(offset=len(sent) * 16)
        announced = STORE_FD if not sent else -1
        connection.sendall(created(payload, announced))
        if not sent:
            send_descriptor(connection, daemon.file)
        sent.append(request)
        return b""

    daemon, client = script(answer)
    assert bytes(client.create_blob(16).view) == bytes(range(16))
    assert bytes(client.create_blob(16).view) == bytes(range(16, 32))


def test_a_carrier_glued_to_the_next_reply_is_found(script):
    # the kernel ends a read at a carrier, so that its bytes and those before it may come as one piece
    def answer(request, connection):
        if isinstance(request, blobs.SealRequest):
            return SEALED
        connection.sendall(SEALED if request.size == 1 else b"")
        connection.sendall(created(place(), STORE_FD))
        send_descriptor(connection, daemon.file)
        return b""

    daemon, client = script(answer)
    requests = [blobs.SealRequest(1), blobs.CreateBufferRequest(16), blobs.SealRequest(1)]
    (_, none), (_, views), (_, _) = client.fetch(requests)
    assert (none, bytes(views[0])) == ([], bytes(range(16)))


BROKEN = {
    "a carrier without a descriptor": lambda daemon, connection: created(place(), STORE_FD) + b"x",
    "a file never sent": lambda daemon, connection: created(place()),
    "a descriptor of another blob": lambda daemon, connection: created(place(), STORE_FD + 1) + b"x",
    "a blob beyond the mapping": lambda daemon, connection: with_descriptor(
        daemon, connection, place(size=FILE_BYTES, map_size=FILE_BYTES * 2 + MAP_GAP_BYTES)
    ),
    "a file shorter than promised": lambda daemon, connection: with_descriptor(
        daemon, connection, place(map_size=1 << 40)
    ),
    "a pipe": lambda daemon, connection: with_descriptor(daemon, connection, place(), pipe=True),
    "many descriptors at once": lambda daemon, connection: many_descriptors(daemon, connection),
}  # fmt: skip


def with_descriptor(daemon, connection, payload, *, pipe=False):
    connection.sendall(created(payload, STORE_FD))
    if pipe:
        ends = os.pipe()
        send_descriptor(connection, ends[0])
        for end in ends:
            os.close(end)
    else:
        send_descriptor(connection, daemon.file)
    return b""


def many_descriptors(daemon, connection):
    socket.send_fds(connection, [SEALED], [daemon.file] * 100)
    return b""


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_broken_descriptors_are_an_error_and_are_closed(script, answer):
    daemon, client = script(lambda request, connection: answer(daemon, connection))
    with pytest.raises(VineyardProtocolError):
        client.create_blob(16)
    with pytest.raises(VineyardError):
        client.create_blob(16)


def test_a_server_announces_a_file_once():
    sent = SentDescriptors()
    assert sent.announce([place(fd=5), EMPTY_PAYLOAD, place(fd=3), place(fd=5)]) == [5, 3]
    assert sent.announce([place(fd=3), place(fd=9)]) == [9]


# what is under way


def test_a_batch_never_has_more_under_way_than_fits(script):
    longest = 0

    def answer(request, connection):
        nonlocal longest
        # asked of the kernel: bytes that wait to be read here
        waiting = (
            len(connection.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            if more(connection)
            else 0
        )
        longest = max(longest, waiting)
        return objects.ExistsReply(True)

    def more(connection):
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""

    _, client = script(answer)
    assert client.objects.exist(list(range(3000))) == [True] * 3000
    assert longest <= IN_FLIGHT_BYTES


def test_paths_that_cannot_be_are_explained(short_path):
    with pytest.raises(VineyardConnectionError, match="no such socket"):
        Client(short_path / "nothing").status()
    with pytest.raises(VineyardConnectionError, match="at most 107 bytes"):
        Client(short_path / ("x" * 200)).status()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(short_path / "dead"))
    listener.close()
    with pytest.raises(VineyardConnectionError, match="nobody listens"):
        Client(short_path / "dead").status()
    with pytest.raises(ValueError, match="timeout_s must be a positive"):
        Client("x", timeout_s=0)


def test_a_daemon_without_blobs_is_refused(short_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.WELCOME", WELCOME._replace(store_match=False))
    daemon = Script(short_path, lambda request, connection: None)
    with pytest.raises(VineyardConnectionError, match="must be a daemon with blobs"):
        Client(daemon.path).status()
    daemon.close()


def test_views_outlive_everything(script):
    daemon, client = script(
        lambda request, connection: with_descriptor(daemon, connection, place())
    )
    view = client.create_blob(16).view
    client.close()
    view[:2] = b"ok"
    with mmap.mmap(daemon.file, FILE_BYTES) as file:
        assert file[:2] == b"ok"
