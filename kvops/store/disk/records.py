"""Journal header and records, to and from bytes; format.py says what they look like."""

import enum
import struct
import time

import numpy as np
import xxhash

from .format import (
    CHECKED_BYTES,
    EMPTY,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    TRUNCATED,
    VERSION,
    check_holds,
    with_check,
)
from .places import Place

JOURNAL_MAGIC = b"KVFJRNL1"
RECORD_BYTES = 64
JOURNAL_HEADER_BYTES = RECORD_BYTES

_JOURNAL_HEADER = struct.Struct("<8sIIQQ24x")
_RECORD = struct.Struct("<QQQIIQQIBBH")
_CHECK = struct.Struct("<Q")

RECORD_DTYPE = np.dtype(
    [
        ("tag_lo", "<u8"),
        ("tag_hi", "<u8"),
        ("generation", "<u8"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("blob_bytes", "<u8"),
        ("namespace", "<u8"),
        ("time", "<u4"),
        ("kind", "u1"),
        ("reason", "u1"),
        ("parts", "<u2"),
        ("check", "<u8"),
    ]
)
"""A journal record for numpy."""


class Kind(enum.IntEnum):
    """What a journal record says."""

    PUT = 1
    REMOVE = 2
    QUARANTINE = 3
    EPOCH = 4


def pack_journal_header(epoch: int) -> bytes:
    """Return the first 64 bytes of a journal."""
    return with_check(_JOURNAL_HEADER.pack(JOURNAL_MAGIC, FORMAT_VERSION, 0, epoch, time.time_ns()))


def read_journal_header(head: bytes) -> int | str:
    """Return the epoch in a journal's header, or which of :data:`REASONS` it can't be used for."""
    if len(head) < JOURNAL_HEADER_BYTES:
        return TRUNCATED
    magic, version, _, epoch, _ = _JOURNAL_HEADER.unpack_from(head)
    if magic != JOURNAL_MAGIC:
        return MAGIC if any(head) else EMPTY
    if version > FORMAT_VERSION:
        return VERSION
    return int(epoch) if version == FORMAT_VERSION and check_holds(head) else HEADER


def pack_record(
    tag: tuple[int, int],
    generation: int,
    segment: int,
    slot: int,
    *,
    kind: Kind,
    blob_bytes: int = 0,
    namespace: int = 0,
    seconds: int = 0,
    reason: int = 0,
    parts: int = 0,
) -> bytes:
    """Return one journal record; *seconds* is Unix time, *namespace* its tag."""
    return with_check(
        _RECORD.pack(
            *tag, generation, segment, slot, blob_bytes, namespace, seconds, kind, reason, parts
        )
    )


def pack_put(place: Place, namespace: int, seconds: int) -> bytes:
    """Return the record of a blob that was saved; *namespace* is a tag."""
    low, high = place.tag
    fixed = _RECORD.pack(
        low, high, place.generation, place.segment, place.slot, place.blob_bytes, namespace, seconds, Kind.PUT, 0,
        place.parts,
    )  # fmt: skip
    return fixed + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed))


def seal_records(records: memoryview) -> None:
    """Write the check word of each of the 64-byte records in *records*."""
    digest, pack = xxhash.xxh3_64_intdigest, _CHECK.pack_into
    for at in range(0, len(records), RECORD_BYTES):
        pack(records, at + CHECKED_BYTES, digest(records[at : at + CHECKED_BYTES]))


def digests_of(records: memoryview) -> list[int]:
    """Return the check word that each of the 64-byte records in *records* should have."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(records[at : at + CHECKED_BYTES]) for at in range(0, len(records), RECORD_BYTES)]
