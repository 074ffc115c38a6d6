"""From a frame's header in the arena to the header page on the disk, and what has to agree on the way back.

Both run once for every blob, so they look at the bytes as they lie; format.py says what each of them is.
"""

import time

import xxhash

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.checksum import Algorithm
from kvferry.kvops.store.frame import Frame

from .format import (
    BLOB_MAGIC,
    CHECKED_BYTES,
    CHECKSUM,
    FOREIGN,
    FORMAT_VERSION,
    PREAMBLE,
    PREAMBLE_BYTES,
    SHAPE,
    STALE,
    frame_header_bytes,
    read_header_page,
)
from .places import Place

_KEY, _NAMESPACE, _KEY_BYTES = PREAMBLE_BYTES + 8, PREAMBLE_BYTES + 44, PREAMBLE_BYTES + 89
_PART_TABLE = PREAMBLE_BYTES + fmt.HEADER_FIXED_BYTES
_STATE_AND_ALGORITHM = bytes([fmt.PartState.READY, Algorithm.XXH3_64])
_NO_READS = bytes(4)
_CHECK_BYTES = 8
digest = xxhash.xxh3_64_intdigest


def write_page(
    page: memoryview, buffer: memoryview, frame: Frame, generation: int, parts: int
) -> None:
    """Write the header page of a ready frame: without state and counts, every part with a checksum.

    Args:
        page: the header area; what lies behind the header in it is left as it is.
        buffer: the arena.
        frame: held by the caller.
        generation: of the place on the disk.
        parts: of the store.
    """
    size = frame_header_bytes(parts)
    start = frame.header
    header = bytearray(buffer[start : start + size])
    header[:8] = bytes(8)
    for at in range(fmt.HEADER_FIXED_BYTES, size, fmt.PART_BYTES):
        header[at + 4 : at + 8] = _NO_READS
        if header[at + 3] == Algorithm.NONE:
            # stored under verify "off": memory is trusted, a disk never is
            rank, state, _, _, offset, num_bytes, _ = fmt.PART.unpack_from(header, at)
            begin = frame.offset + offset
            value = digest(buffer[begin : begin + num_bytes])
            fmt.PART.pack_into(
                header, at, rank, state, Algorithm.XXH3_64, 0, offset, num_bytes, value
            )
    fixed = PREAMBLE.pack(
        BLOB_MAGIC, FORMAT_VERSION, size, generation, frame.blob_bytes, time.time_ns(), 0, 0
    )
    check = digest(fixed + header).to_bytes(_CHECK_BYTES, "little")
    page[: PREAMBLE_BYTES + size] = fixed + check + header


def take_in(
    page: memoryview, buffer: memoryview, frame: Frame, place: Place, parts: int
) -> str | None:
    """Judge a blob that was read into *frame*; if it is the one that was asked for, make its parts ready and return None.

    Args:
        page: the header area as it was read.
        buffer: the arena, with the blob's bytes in the frame.
        frame: what was asked for; reserved, and the caller's.
        place: where it was read.
        parts: of the store.

    Returns:
        None, or which of format.REASONS it can't be used for.
    """
    end = PREAMBLE_BYTES + frame_header_bytes(parts)
    raw = bytes(page[:end])
    magic, version, size, generation, blob_bytes, _, _, _ = PREAMBLE.unpack_from(raw)
    key = frame.key
    is_sound = (
        magic == BLOB_MAGIC
        and version == FORMAT_VERSION
        and size == end - PREAMBLE_BYTES
        and int.from_bytes(raw[CHECKED_BYTES:PREAMBLE_BYTES], "little")
        == digest(raw[:CHECKED_BYTES] + raw[PREAMBLE_BYTES:])
    )
    if not is_sound:
        found = read_header_page(page)
        return found if isinstance(found, str) else SHAPE
    if generation != place.generation:
        return STALE
    is_mine = (
        raw[_KEY : _KEY + len(key)] == key
        and raw[_KEY_BYTES] == len(key)
        and raw[_NAMESPACE : _NAMESPACE + fmt.NAMESPACE_BYTES] == frame.namespace
    )
    if not is_mine:
        return FOREIGN
    part_bytes = frame.blob_bytes // parts
    for rank in range(parts):
        at = _PART_TABLE + rank * fmt.PART_BYTES
        number, _, _, _, offset, num_bytes, value = fmt.PART.unpack_from(raw, at)
        if blob_bytes != frame.blob_bytes or (number, offset, num_bytes) != (
            rank, rank * part_bytes, part_bytes,
        ):  # fmt: skip
            return SHAPE
        begin = frame.offset + offset
        if raw[at + 2 : at + 4] != _STATE_AND_ALGORITHM or value != digest(
            buffer[begin : begin + num_bytes]
        ):
            return CHECKSUM
    table = frame.header + fmt.HEADER_FIXED_BYTES
    buffer[table : table + parts * fmt.PART_BYTES] = raw[_PART_TABLE:]
    return None
