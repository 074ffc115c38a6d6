"""Requests and replies about streams: blobs handed one by one from a writer to a reader.

A stream belongs to an object (type ``vineyard::ByteStream`` and the like). It is opened once for reading and once for
writing. Each chunk that the writer asks for publishes the one before; ``stop_stream`` publishes the last.
"""

from typing import NamedTuple

from .codec import reply, request
from .fields import Descriptor, Flag, Number, ObjectId, Size
from .payload import PayloadField

READ_MODE = 1
WRITE_MODE = 2


@reply("create_stream_reply")
class CreateStreamReply(NamedTuple):
    """Done."""


@request("create_stream_request", CreateStreamReply)
class CreateStreamRequest(NamedTuple):
    """Make a stream of an object."""

    object_id: ObjectId


@reply("open_stream_reply")
class OpenStreamReply(NamedTuple):
    """Done."""


@request("open_stream_request", OpenStreamReply)
class OpenStreamRequest(NamedTuple):
    """Become the stream's reader (mode 1) or writer (mode 2); a second one of a kind is refused (45)."""

    object_id: ObjectId
    mode: Number


@reply("get_next_stream_chunk_reply")
class GetNextStreamChunkReply(NamedTuple):
    """A chunk to write.

    Attributes:
        buffer: where it is.
        fd: ``buffer.store_fd`` if its descriptor follows, else -1.
    """

    buffer: PayloadField
    fd: Descriptor = -1


@request("get_next_stream_chunk_request", GetNextStreamChunkReply)
class GetNextStreamChunkRequest(NamedTuple):
    """Writer: publish the chunk before, and give me one of *size* bytes. Answered when there is memory for it."""

    id: ObjectId
    size: Size


@reply("push_next_stream_chunk_reply")
class PushNextStreamChunkReply(NamedTuple):
    """Done."""


@request("push_next_stream_chunk_request", PushNextStreamChunkReply)
class PushNextStreamChunkRequest(NamedTuple):
    """Writer: publish a blob or an object made elsewhere."""

    id: ObjectId
    chunk: ObjectId


@reply("pull_next_stream_chunk_reply")
class PullNextStreamChunkReply(NamedTuple):
    """The chunk's id."""

    chunk: ObjectId


@request("pull_next_stream_chunk_request", PullNextStreamChunkReply)
class PullNextStreamChunkRequest(NamedTuple):
    """Reader: the next chunk. Answered when there is one, or with 42 after the last, or 43 if the writer failed."""

    id: ObjectId


@reply("stop_stream_reply")
class StopStreamReply(NamedTuple):
    """Done."""


@request("stop_stream_request", StopStreamReply)
class StopStreamRequest(NamedTuple):
    """Writer: that was all (*failed* False), or I give up (True)."""

    id: ObjectId
    failed: Flag


@reply("drop_stream_reply")
class DropStreamReply(NamedTuple):
    """Done."""


@request("drop_stream_request", DropStreamReply)
class DropStreamRequest(NamedTuple):
    """Forget the stream and the chunks that nobody has pulled."""

    id: ObjectId
