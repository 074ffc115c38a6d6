"""A vineyard client: every verb of the daemon that has a use on one host; standard library only.

Works against vineyardd 0.24.2. kvferry has no server of its own, and no engine path uses this client yet.

Example:
    >>> client = Client("/run/vineyard.sock")  # doctest: +SKIP
    >>> blob = client.create_blob(5)  # doctest: +SKIP
    >>> blob.view[:] = b"hello"  # doctest: +SKIP
    >>> client.seal([blob.object_id])  # doctest: +SKIP
    >>> bytes(client.get_blob(blob.object_id).view)  # doctest: +SKIP
    b'hello'
"""

import os
from collections.abc import Sequence
from typing import Any, cast

from kvferry.kvops.errors import VineyardStatusError

from . import blob_messages as blobs
from . import daemon_messages as daemon
from .blob import Blob
from .codec import Message
from .fields import Tree
from .named_objects import Names, Objects
from .session import DEFAULT_TIMEOUT_S, Session
from .status import Status
from .streams import Streams

BLOBS_PER_REQUEST = 64
"""Blobs looked up in one message; vineyardd takes longer per blob the more there are (20 us at 64, 34 at 256)."""


class Client(Session):
    """One client of one daemon; see :class:`Session` for connecting, time limits, threads and forks.

    The verbs for blobs and for the daemon itself are here; ``objects``, ``names`` and ``streams`` have the others.
    All raise VineyardStatusError when the daemon refuses, VineyardConnectionError when it is not there,
    VineyardTimeoutError when it does not answer in time. A verb with a list carries it out item by item in the order
    given, in as few round trips as there are; where one item is refused, the others are carried out and the first
    refusal is raised.

    A client holds every blob that it sealed or got, until it releases it or its connection ends.

    Args:
        path: of the daemon's socket. Nothing is connected until the first call.
        timeout_s: of a call, connecting included.
        username: for a daemon that keeps a list of users.
        password: the same.

    Attributes:
        objects: metadata: make, find, label, persist, delete.
        names: of persisted objects.
        streams: blobs handed over one by one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        username: str = "",
        password: str = "",
    ) -> None:
        super().__init__(path, timeout_s=timeout_s, username=username, password=password)
        self._user = (username, password)
        self.objects = Objects(self)
        self.names = Names(self)
        self.streams = Streams(self)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clone(self) -> "Client":
        """Return another client of the same daemon, with a connection of its own."""
        username, password = self._user
        return Client(self.path, timeout_s=self.timeout_s, username=username, password=password)

    def create_blob(self, size: int) -> Blob:
        """Return a new unsealed blob of *size* bytes, which hold whatever was there before."""
        return self.create_blobs([size])[0]

    def create_blobs(self, sizes: Sequence[int], *, one_request: bool = False) -> list[Blob]:
        """Return a new unsealed blob of each size, in order; all or none.

        Args:
            sizes: in bytes.
            one_request: ask for all in one message. That is cheaper, but when vineyardd 0.24.2 runs out of room
                midway it keeps the blobs already made and tells nobody their ids.

        Raises:
            VineyardStatusError: 41, no room.
        """
        requests: list[Message] = [blobs.CreateBufferRequest(size) for size in sizes]
        if one_request and sizes:
            requests = [blobs.CreateBuffersRequest(list(sizes))]
        made: list[Blob] = []
        refusal: VineyardStatusError | None = None
        for reply, views in self.fetch(requests):
            if isinstance(reply, VineyardStatusError):
                refusal = refusal or reply
            elif isinstance(reply, blobs.CreateBufferReply):
                made.append(Blob(reply.id, views[0], reply.created))
            else:
                created = cast(blobs.CreateBuffersReply, reply)
                made.extend(map(Blob, created.ids, views, created.payloads))
        if refusal is not None:
            # the part that did fit is of no use to a caller who asked for everything
            self.batch([blobs.DropBufferRequest(blob.object_id) for blob in made])
            raise refusal
        return made

    def seal(self, object_ids: Sequence[int]) -> None:
        """Make blobs complete: others can find them, and this client holds them."""
        self.call_all([blobs.SealRequest(object_id) for object_id in object_ids])

    def get_blob(
        self, object_id: int, *, unsafe: bool = False, writable: bool = False
    ) -> Blob | None:
        """Return a blob, or None if there is none; as :meth:`get_blobs`."""
        return self.get_blobs([object_id], unsafe=unsafe, writable=writable)[0]

    def get_blobs(
        self, object_ids: Sequence[int], *, unsafe: bool = False, writable: bool = False
    ) -> list[Blob | None]:
        """Return blobs in the order of their ids, None for those that do not exist; this client holds them.

        Args:
            object_ids: which; repeated ones are fine.
            unsafe: those that are not sealed, too.
            writable: give views that can be written to.

        Raises:
            VineyardStatusError: 14, one of them is not sealed.
        """
        found: dict[int, Blob] = {}
        requests = [blobs.GetBuffersRequest(list(part), unsafe) for part in _parts(object_ids)]
        for reply, views in self.fetch(requests):
            if isinstance(reply, VineyardStatusError):
                raise reply
            for payload, view in zip(cast(Any, reply).payloads, views, strict=True):
                shown = view if writable else view.toreadonly()
                found[payload.object_id] = Blob(payload.object_id, shown, payload)
        return [found.get(object_id) for object_id in object_ids]

    def drop_blobs(self, object_ids: Sequence[int]) -> None:
        """Give up blobs, sealed or not, whoever holds them."""
        self.call_all([blobs.DropBufferRequest(object_id) for object_id in object_ids])

    def shrink_blob(self, object_id: int, size: int) -> None:
        """Keep only the first *size* bytes of an unsealed blob."""
        self.call(blobs.ShrinkBufferRequest(object_id, size), blobs.ShrinkBufferReply)

    def hold(self, object_ids: Sequence[int]) -> None:
        """Hold blobs, as sealing and getting them does."""
        self.call_all(
            [blobs.IncreaseReferenceCountRequest(list(part)) for part in _parts(object_ids)]
        )

    def release(self, object_ids: Sequence[int]) -> None:
        """Hold blobs no longer; those that this client does not hold are no error."""
        for reply in self.batch([blobs.ReleaseRequest(object_id) for object_id in object_ids]):
            # vineyardd says so to a client that holds nothing at all
            if isinstance(reply, VineyardStatusError) and reply.code != Status.KEY_ERROR:
                raise reply

    def is_in_use(self, object_id: int) -> bool:
        """Whether any client holds the blob; vineyardd says True of one that does not exist."""
        return self.call(blobs.IsInUseRequest(object_id), blobs.IsInUseReply).is_in_use

    def is_spilled(self, object_id: int) -> bool:
        """Whether the blob is out of memory."""
        return self.call(blobs.IsSpilledRequest(object_id), blobs.IsSpilledReply).is_spilled

    def evict(self, object_ids: Sequence[int], timeout_s: float | None = None) -> None:
        """Move blobs that nobody holds out of memory. vineyardd 0.24.2 does it and never answers: a timeout."""
        self.call(blobs.EvictRequest(list(object_ids)), blobs.EvictReply, timeout_s)

    def load(
        self, object_ids: Sequence[int], *, pin: bool = False, timeout_s: float | None = None
    ) -> None:
        """Bring blobs back into memory, *pin* to stay there. vineyardd 0.24.2 never answers: a timeout."""
        self.call(blobs.LoadRequest(list(object_ids), pin), blobs.LoadReply, timeout_s)

    def unpin(self, object_ids: Sequence[int], timeout_s: float | None = None) -> None:
        """Let pinned blobs leave memory again. vineyardd 0.24.2 never answers: a timeout."""
        self.call(blobs.UnpinRequest(list(object_ids)), blobs.UnpinReply, timeout_s)

    def clear(self) -> None:
        """Delete every object and every blob of the daemon, whoever holds them."""
        self.call(daemon.ClearRequest(), daemon.ClearReply)

    def memory_trim(self) -> bool:
        """Have free memory given back to the system; whether any was."""
        return self.call(daemon.MemoryTrimRequest(), daemon.MemoryTrimReply).trimmed

    def status(self) -> Tree:
        """Return the daemon in numbers: ``memory_usage`` and ``memory_limit`` in bytes, ``ipc_connections``, ..."""
        return self.call(daemon.InstanceStatusRequest(), daemon.InstanceStatusReply).meta

    def cluster(self) -> Tree:
        """Return the daemons of the cluster by name (``i0``, ...)."""
        return self.call(daemon.ClusterMetaRequest(), daemon.ClusterMetaReply).meta

    def debug(self, question: Any) -> Any:
        """Return whatever the daemon's developers let it answer."""
        return self.call(daemon.DebugRequest(question), daemon.DebugReply).result

    def migrate(self, object_id: int) -> int:
        """Return the id of a local copy of another daemon's object; one that is local already is itself."""
        return self.call(
            daemon.MigrateObjectRequest(object_id), daemon.MigrateObjectReply
        ).object_id


def _parts(items: Sequence[int]) -> list[Sequence[int]]:
    return [
        items[start : start + BLOBS_PER_REQUEST]
        for start in range(0, len(items), BLOBS_PER_REQUEST)
    ]
