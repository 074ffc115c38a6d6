"""The client's verbs for streams: blobs handed one by one from a writer to a reader."""

from typing import cast

from kvferry.kvops.errors import VineyardStatusError

from . import stream_messages as messages
from .blob import Blob
from .session import Session
from .status import Status


class Streams:
    """Streams of one daemon, each belonging to an object. Errors as in :class:`Client`.

    Each end needs a client of its own: :meth:`pull` holds up every other call of its client until there is a chunk.

    Threads: as the session's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(self, object_id: int) -> None:
        """Make a stream of an object."""
        self._session.call(messages.CreateStreamRequest(object_id), messages.CreateStreamReply)

    def open_reader(self, object_id: int) -> None:
        """Become the stream's reader.

        Raises:
            VineyardStatusError: 45, it has one; 12, there is no such stream.
        """
        request = messages.OpenStreamRequest(object_id, messages.READ_MODE)
        self._session.call(request, messages.OpenStreamReply)

    def open_writer(self, object_id: int) -> None:
        """Become the stream's writer; refused as :meth:`open_reader`."""
        request = messages.OpenStreamRequest(object_id, messages.WRITE_MODE)
        self._session.call(request, messages.OpenStreamReply)

    def next_chunk(self, object_id: int, size: int, timeout_s: float | None = None) -> Blob:
        """Publish the chunk before and return a new one to write, of *size* bytes; waits for memory."""
        request = messages.GetNextStreamChunkRequest(object_id, size)
        ((reply, views),) = self._session.fetch([request], timeout_s)
        if isinstance(reply, VineyardStatusError):
            raise reply
        payload = cast(messages.GetNextStreamChunkReply, reply).buffer
        return Blob(payload.object_id, views[0], payload)

    def push(self, object_id: int, chunk: int) -> None:
        """Publish a blob or an object made elsewhere as the next chunk."""
        request = messages.PushNextStreamChunkRequest(object_id, chunk)
        self._session.call(request, messages.PushNextStreamChunkReply)

    def pull(self, object_id: int, timeout_s: float | None = None) -> int | None:
        """Return the next chunk's id, None after the last; waits for one.

        Raises:
            VineyardStatusError: 43, the writer gave up.
        """
        request = messages.PullNextStreamChunkRequest(object_id)
        try:
            return self._session.call(request, messages.PullNextStreamChunkReply, timeout_s).chunk
        except VineyardStatusError as refusal:
            if refusal.code == Status.STREAM_DRAINED:
                return None
            raise

    def stop(self, object_id: int, *, failed: bool = False) -> None:
        """Publish the last chunk and end the stream; *failed* tells the reader that the writer gave up."""
        self._session.call(messages.StopStreamRequest(object_id, failed), messages.StopStreamReply)

    def drop(self, object_id: int) -> None:
        """Forget the stream and the chunks that nobody has pulled."""
        self._session.call(messages.DropStreamRequest(object_id), messages.DropStreamReply)
