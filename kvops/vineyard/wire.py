"""Vineyard's messages: text in, message out, and the reverse; for a client and for a server. No I/O.

::

    client   frame(encode(SealRequest(id)))                  →  socket  →  decode_request(text)   server
    client   decode_reply(text, SealReply)  ← raises or      ←  socket  ←  frame(encode(SealReply()))
                                            VineyardStatusError         or frame(encode_error(14, "..."))

Frames and lengths: framing.py. Fields and defaults of every message: blob_messages.py, object_messages.py,
stream_messages.py, daemon_messages.py. Places of blobs: payload.py. Codes: status.py.

Whatever the text, the outcome is a message whose fields are checked, or a VineyardProtocolError; the work is linear in
the length of the text.
"""

from json.encoder import encode_basestring_ascii
from typing import TypeVar, cast

from kvferry.kvops.errors import VineyardProtocolError, VineyardStatusError

from . import blob_messages, daemon_messages, object_messages, stream_messages
from .codec import CODECS, REPLIES, REQUESTS, Message
from .fields import MAX_TEXT_CHARS, Tree, parse_object, refuse
from .status import Status

__all__ = [
    "NOT_SERVED",
    "blob_messages",
    "daemon_messages",
    "decode_reply",
    "decode_request",
    "descriptors_after",
    "encode",
    "encode_error",
    "object_messages",
    "stream_messages",
]

_Reply = TypeVar("_Reply")

NOT_SERVED = frozenset(
    {
        "create_disk_buffer_request",
        "create_gpu_buffer_request",
        "get_gpu_buffers_request",
        "create_remote_buffer_request",
        "create_remote_buffers_request",
        "get_remote_buffers_request",
        "release_blobs_with_rdma_request",
        "create_buffer_by_plasma_request",
        "get_buffers_by_plasma_request",
        "plasma_seal_request",
        "plasma_release_request",
        "plasma_delete_data_request",
        "make_arena_request",
        "finalize_arena_request",
        "new_session_request",
        "delete_session_request",
        "move_buffers_ownership_request",
        "request_fd_request",
        "acquire_lock_request",
        "release_lock_request",
    }
)
"""Requests of vineyard that have no use on one host: disks, devices, networks, sessions, Plasma, locks."""


def encode(message: Message) -> bytes:
    """Return the text of a request or a reply.

    Raises:
        VineyardProtocolError: its metadata holds something that JSON has no form for.
    """
    # ASCII: the writers escape everything else
    return CODECS[type(message)].write(message).encode("ascii")


def encode_error(code: int, reason: str) -> bytes:
    """Return the text of the reply that says no; *reason* is cut where a message would become too long."""
    # a lone surrogate, from a path or a name that was no UTF-8, would make the whole reply unreadable
    kept = reason[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()
    return f'{{"code":{int(code)},"message":{encode_basestring_ascii(kept)}}}'.encode("ascii")


def decode_request(text: bytes) -> Message:
    """Return the request in *text*: one of the classes called ``...Request``.

    Raises:
        VineyardStatusError: a well-formed request that is not served; carries the code to answer with.
        VineyardProtocolError: anything else that is wrong; to be answered with code 1.
    """
    tree = parse_object(text)
    wire_name = tree.get("type")
    if type(wire_name) is not str:
        raise VineyardProtocolError("Invalid message: no 'type' field")
    codec = REQUESTS.get(wire_name)
    if codec is None:
        if wire_name in NOT_SERVED:
            raise VineyardStatusError(Status.NOT_IMPLEMENTED, f"{wire_name} is not served here")
        raise VineyardStatusError(Status.INVALID, f"Got unexpected command: {wire_name:.80}")
    return codec.read(tree)


def decode_reply(text: bytes, expected: type[_Reply]) -> _Reply:
    """Return the reply in *text*, which answers a request for *expected*.

    Raises:
        VineyardStatusError: the daemon answered with a code.
        VineyardProtocolError: it is no such reply; what follows on the connection cannot be trusted.
    """
    tree = parse_object(text)
    if "code" in tree:
        _raise_code(tree)
    codec = CODECS[cast(type, expected)]
    if tree.get("type") != codec.wire_name or codec.wire_name not in REPLIES:
        raise refuse("the reply's type", f"{codec.wire_name!r}", tree.get("type"))
    return cast(_Reply, codec.read(tree))


def descriptors_after(reply: Message) -> list[int]:
    """Return the numbers whose descriptors follow *reply* on the socket, in their order there."""
    fds: list[int] | None = getattr(reply, "fds", None)
    if fds is not None:
        return fds
    fd: int = getattr(reply, "fd", -1)
    return [fd] if fd >= 0 else []


def _raise_code(tree: Tree) -> None:
    code, reason = tree["code"], tree.get("message", "")
    if type(code) is not int or not 0 <= code < 1 << 31:
        raise refuse("code", "a number", code)
    # as the stock client does, zero is no error
    if code:
        raise VineyardStatusError(code, reason if type(reason) is str else "")
