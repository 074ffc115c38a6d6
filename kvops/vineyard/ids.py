"""Object ids: 64-bit numbers in requests and replies, ``"o"`` and 16 hex digits inside metadata.

A blob's id has bit 63 set, an object's has not. Below it: 41 bits of milliseconds, 10 bits of instance, 12 bits
of sequence. Nobody takes an id apart; that two are never equal is all that matters.
"""

import re
import time

from kvferry.kvops.errors import VineyardProtocolError

BLOB_BIT = 1 << 63
"""Set in the id of a blob."""

EMPTY_BLOB = BLOB_BIT
"""The blob of no bytes: it always exists, is sealed, has no memory and is never deleted."""

INVALID_ID = (1 << 64) - 1
"""No object. As a blob's id in ``get_data_request`` it stands for the daemon's whole memory."""

_SEQUENCE_BITS = 12
_INSTANCE_BITS = 10
_TIMESTAMP_BITS = 41
_WRITTEN = re.compile(r"o[0-9a-fA-F]{1,16}")


def is_blob(object_id: int) -> bool:
    """Whether *object_id* names a blob (bytes) and not an object (metadata)."""
    return object_id & BLOB_BIT != 0


def format_id(object_id: int) -> str:
    """Return an id as metadata writes it: ``o688b13f551800023``."""
    return f"o{object_id:016x}"


def parse_id(text: object) -> int:
    """Return the number behind ``o688b13f551800023``.

    Raises:
        VineyardProtocolError: *text* is not written like that.
    """
    if type(text) is not str or not _WRITTEN.fullmatch(text):
        raise VineyardProtocolError(f"an id must be 'o' and 16 hex digits; got {text!r:.80}")
    return int(text[1:], 16)


class IdMaker:
    """Makes ids that this process never makes again, as long as the clock does not stand still.

    Args:
        instance: 0 to 1023, which daemon of a cluster this is; local ones are 0.

    Threads: one at a time.
    """

    def __init__(self, instance: int = 0) -> None:
        self._instance = (instance & (1 << _INSTANCE_BITS) - 1) << _SEQUENCE_BITS
        self._last = 0

    def object_id(self) -> int:
        """Return a new id for an object or a signature."""
        return self._next() & ~BLOB_BIT

    def blob_id(self) -> int:
        """Return a new id for a blob."""
        return self._next() | BLOB_BIT

    def _next(self) -> int:
        # time and sequence as one counter: it runs ahead of the clock when more than 4096 ids are made in a
        # millisecond or the clock is set back, where a sequence taken modulo 4096 would repeat itself
        now = (time.time_ns() // 1_000_000 & (1 << _TIMESTAMP_BITS) - 1) << _SEQUENCE_BITS
        self._last = max(self._last + 1, now)
        milliseconds, sequence = divmod(self._last, 1 << _SEQUENCE_BITS)
        shift = _SEQUENCE_BITS + _INSTANCE_BITS
        return milliseconds << shift | self._instance | sequence
