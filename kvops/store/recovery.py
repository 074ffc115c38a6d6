"""What a resting arena holds: the headers are the truth, everything else is made from them."""

from collections.abc import Iterator
from dataclasses import dataclass

from . import format as fmt
from .arena import Arena
from .spans import Span

_PART_READY = int(fmt.PartState.READY)
"""As a plain number: an enum compares slowly, and this is looked at for every blob."""


@dataclass(frozen=True, slots=True)
class Found:
    """One frame as its header tells it.

    Attributes:
        header, offset: where header and frame are.
        state: READY only if the header's check holds and every part is ready and where it should be; WRITING; BAD for
            anything else in use.
        generation, key, namespace, blob_bytes, time, parts: from the header.
    """

    header: int
    offset: int
    state: fmt.State
    generation: int
    key: bytes
    namespace: bytes
    blob_bytes: int
    time: int
    parts: int


def scan(arena: Arena, span: Span) -> Iterator[Found]:
    """Yield the frames of *span* that are not free."""
    if span.size is None:
        return
    for header, offset in span.slots():
        word = arena.words[header // 8]
        state = word & 0xFF
        if state != fmt.State.FREE:
            yield _read(arena.buffer, header, offset, span.size.frame_bytes, word)


def _read(buffer: memoryview, header: int, offset: int, frame_bytes: int, word: int) -> Found:
    body = buffer[header + 8 : header + 8 + fmt.HEADER_BODY.size]
    key, namespace, _, blob, blob_bytes, when, magic, version, key_bytes, parts = (
        fmt.HEADER_BODY.unpack(body)
    )
    (check,) = fmt.CHECK.unpack_from(buffer, header + fmt.HEADER_CHECK)
    sane = (
        magic == fmt.HEADER_MAGIC
        and version == fmt.FORMAT_VERSION
        and check == fmt.check_of(body)
        and blob == offset
        and blob_bytes <= frame_bytes
        and fmt.KEY_BYTES_MIN <= key_bytes <= fmt.KEY_BYTES_MAX
        and 0 < parts <= fmt.MAX_PARTS
    )
    state = fmt.State.BAD
    if word & 0xFF == fmt.State.WRITING:
        state = fmt.State.WRITING
    elif (
        sane
        and word & 0xFF == fmt.State.READY
        and parts_ready(buffer, header, parts)
        and _parts_in_place(buffer, header, parts, blob_bytes)
    ):
        state = fmt.State.READY
    return Found(
        header, offset, state, word >> 8, key[:key_bytes], namespace, blob_bytes, when, parts
    )


def parts_ready(buffer: memoryview, header: int, part_count: int) -> bool:
    """Return whether every part of the frame at *header* is ready."""
    first = header + fmt.HEADER_FIXED_BYTES + 2
    if part_count == 1:
        return buffer[first] == _PART_READY
    last = first + part_count * fmt.PART_BYTES
    return all(buffer[at] == _PART_READY for at in range(first, last, fmt.PART_BYTES))


def _parts_in_place(buffer: memoryview, header: int, part_count: int, blob_bytes: int) -> bool:
    """Return whether the part table says what it said when the frame was reserved: the check does not cover it."""
    size, rest = divmod(blob_bytes, part_count)
    places = (
        fmt.PART.unpack_from(buffer, header + fmt.HEADER_FIXED_BYTES + n * fmt.PART_BYTES)
        for n in range(part_count)
    )
    return not rest and all(
        (rank, offset, num_bytes) == (n, n * size, size)
        for n, (rank, _, _, _, offset, num_bytes, _) in enumerate(places)
    )
