"""A blob as a client holds it."""

from typing import NamedTuple

from .payload import Payload


class Blob(NamedTuple):
    """Bytes in the daemon's shared memory.

    Attributes:
        object_id: its id.
        view: its bytes, without a copy; writable if the blob was just made or asked for that way. It stays readable
            when the client is closed and the daemon is gone; what it shows once the blob is *released or deleted* is
            up to the daemon (vineyardd reuses the memory at once, whoever looks at it).
        payload: where the bytes are.
    """

    object_id: int
    view: memoryview
    payload: Payload
