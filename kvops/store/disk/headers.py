"""From a frame's header in the arena to the one on the disk, and what has to agree on the way back."""

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.checksum import Algorithm, checksum
from kvferry.kvops.store.frame import Frame

from .files import Place
from .format import (
    CHECKSUM,
    FOREIGN,
    SHAPE,
    STALE,
    BlobHeader,
    frame_header_bytes,
    read_header_page,
)


def header_for_disk(buffer: memoryview, frame: Frame, parts: int) -> bytes:
    """Return a ready frame's header as it lies on the disk: without state and counts, every part with a checksum.

    Args:
        buffer: the arena.
        frame: held by the caller.
        parts: of the store.
    """
    header, size = frame.header, frame_header_bytes(parts)
    out = bytearray(buffer[header : header + size])
    out[:8] = bytes(8)
    for at in range(fmt.HEADER_FIXED_BYTES, size, fmt.PART_BYTES):
        rank, state, algorithm, _, offset, num_bytes, value = fmt.PART.unpack_from(out, at)
        if algorithm == Algorithm.NONE:
            # stored under verify "off": memory is trusted, a disk never is
            begin = frame.offset + offset
            algorithm, value = Algorithm.XXH3_64, checksum(buffer[begin : begin + num_bytes])
        fmt.PART.pack_into(out, at, rank, state, algorithm, 0, offset, num_bytes, value)
    return bytes(out)


def check_blob(
    page: memoryview, buffer: memoryview, frame: Frame, place: Place, parts: int
) -> BlobHeader | str:
    """Return the header of a blob that was read into *frame*, or the reason why it is not the one that was asked for.

    Args:
        page: the header area as it was read.
        buffer: the arena, with the blob's bytes in the frame.
        frame: what was asked for.
        place: where it was read.
        parts: of the store.
    """
    found = read_header_page(page)
    if isinstance(found, str):
        return found
    if found.generation != place.generation:
        return STALE
    if found.key != frame.key or found.namespace != frame.namespace:
        return FOREIGN
    size = frame.blob_bytes // parts
    shape = [(part.rank, part.offset, part.num_bytes) for part in found.parts]
    if found.blob_bytes != frame.blob_bytes or shape != [
        (rank, rank * size, size) for rank in range(parts)
    ]:
        return SHAPE
    for part in found.parts:
        begin = frame.offset + part.offset
        if part.algorithm != Algorithm.XXH3_64 or part.checksum != checksum(
            buffer[begin : begin + part.num_bytes]
        ):
            return CHECKSUM
    return found
