"""Messages as classes: how one is declared, found by its wire name, written and read.

A message is a ``NamedTuple`` whose fields have the types of fields.py, under :func:`reply` or :func:`request`::

    @reply("exists_reply")
    class ExistsReply(NamedTuple):
        exists: Flag = False

    @request("exists_request", ExistsReply, repeatable=True)
    class ExistsRequest(NamedTuple):
        id: ObjectId

A field without a default is required. Fields that a message does not know are ignored, as the stock daemon and
client do. Where the wire's form is not one member per field, ``read`` and ``write`` replace the derived ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, get_type_hints

from kvferry.kvops.errors import VineyardProtocolError

from .fields import Kind, Tree

Message = tuple[Any, ...]
_Class = TypeVar("_Class", bound=type)
_Read = Callable[[Tree], Message]
_Write = Callable[[Any], str]
_ABSENT = object()


class Codec(NamedTuple):
    """How one message is written and read.

    Attributes:
        wire_name: the value of ``type``.
        message: the class.
        read: from the parsed JSON object to the message; raises VineyardProtocolError.
        write: from the message to its JSON text.
        reply: class of the answer; None for a reply, and for the one request that gets no answer.
        repeatable: whether carrying the request out twice is as good as once.
    """

    wire_name: str
    message: type
    read: _Read
    write: _Write
    reply: type | None = None
    repeatable: bool = False


REQUESTS: dict[str, Codec] = {}
"""Every request, by wire name."""

REPLIES: dict[str, Codec] = {}
"""Every reply, by wire name."""

CODECS: dict[type, Codec] = {}
"""Both, by class."""


def reply(
    wire_name: str, *, read: _Read | None = None, write: _Write | None = None
) -> Callable[[_Class], _Class]:
    """Register the decorated class as the reply called *wire_name*."""
    return _register(REPLIES, wire_name, None, False, read, write)


def request(
    wire_name: str,
    answer: type | None,
    *,
    repeatable: bool = False,
    read: _Read | None = None,
    write: _Write | None = None,
) -> Callable[[_Class], _Class]:
    """Register the decorated class as the request called *wire_name*, answered by *answer*.

    Args:
        wire_name: the value of ``type``.
        answer: class of the reply, or None if the daemon sends none.
        repeatable: True if a client may send it again when it cannot know whether it was carried out.
        read: replaces the reader derived from the fields.
        write: replaces the writer derived from the fields.
    """
    return _register(REQUESTS, wire_name, answer, repeatable, read, write)


def _register(
    table: dict[str, Codec],
    wire_name: str,
    answer: type | None,
    repeatable: bool,
    read: _Read | None,
    write: _Write | None,
) -> Callable[[_Class], _Class]:
    def add(message: _Class) -> _Class:
        codec = Codec(
            wire_name,
            message,
            read or _reader(message),
            write or _writer(message, wire_name),
            answer,
            repeatable,
        )
        table[wire_name] = CODECS[message] = codec
        return message

    return add


def _kinds(message: type) -> list[tuple[str, Kind]]:
    hints = get_type_hints(message, include_extras=True)
    return [(name, hint.__metadata__[0]) for name, hint in hints.items()]


def _reader(message: type) -> _Read:
    defaults = getattr(message, "_field_defaults", {})
    fields = [(name, kind.check, defaults.get(name, _ABSENT)) for name, kind in _kinds(message)]
    make: Callable[..., Message] = message

    def read(tree: Tree) -> Message:
        values = []
        for name, check, default in fields:
            value = tree.get(name, _ABSENT)
            if value is not _ABSENT:
                values.append(check(name, value))
            elif default is not _ABSENT:
                values.append(default)
            else:
                raise VineyardProtocolError(f"{name} must be there; {tree['type']} came without")
        return make(*values)

    return read


def _writer(message: type, wire_name: str) -> _Write:
    head = f'{{"type":"{wire_name}"'
    members = [(f',"{name}":', kind.render) for name, kind in _kinds(message)]
    if not members:
        bare = head + "}"
        return lambda _: bare

    def write(filled: Message) -> str:
        parts = [head]
        for (name, render), value in zip(members, filled, strict=True):
            parts.append(name)
            parts.append(render(value))
        parts.append("}")
        return "".join(parts)

    return write
