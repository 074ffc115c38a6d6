"""What a resting arena holds: the headers are the truth, everything else is made from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import format as fmt
from .arena import Arena
from .spans import Span, read_spans


@dataclass(frozen=True, slots=True)
class Found:
    """One frame as its header tells it.

    Attributes:
        header, offset: where header and frame are.
        state: READY only if the header's check holds and every part is ready; WRITING; BAD for anything else in use.
        generation, key, namespace, blob_bytes, time: from the header.
    """

    header: int
    offset: int
    state: fmt.State
    generation: int
    key: bytes
    namespace: bytes
    blob_bytes: int
    time: int


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
    elif sane and word & 0xFF == fmt.State.READY and parts_ready(buffer, header, parts):
        state = fmt.State.READY
    return Found(header, offset, state, word >> 8, key[:key_bytes], namespace, blob_bytes, when)


def parts_ready(buffer: memoryview, header: int, part_count: int) -> bool:
    """Return whether every part of the frame at *header* is ready."""
    first = header + fmt.HEADER_FIXED_BYTES + 2
    last = first + part_count * fmt.PART_BYTES
    return all(buffer[at] == fmt.PartState.READY for at in range(first, last, fmt.PART_BYTES))


def census(view: "np.ndarray[Any, np.dtype[np.uint8]]") -> dict[str, Any]:
    """Count frames by state, bytes in use and slabs by use, from the raw bytes of an arena."""
    buffer = view.data
    _, _, _, _, slab_bytes, slab_count, data, span_table, _ = fmt.SUPERBLOCK.unpack_from(buffer, 0)
    frames = {state.name.lower(): 0 for state in fmt.State}
    used_bytes = 0
    slabs = {"frames": 0, "index": 0}
    for span in read_spans(buffer, span_table, slab_bytes, slab_count, data):
        if span.size is None:
            slabs["index"] += span.slabs
            continue
        slabs["frames"] += span.slabs
        size = span.size.header_bytes
        heads = view[span.headers : span.headers + span.frame_count * size]
        states = heads.reshape(span.frame_count, size)[:, 0]
        for state in fmt.State:
            count = int(np.count_nonzero(states == state))
            frames[state.name.lower()] += count
            if state in (fmt.State.READY, fmt.State.WRITING):
                used_bytes += count * span.size.frame_bytes
    slabs["free"] = slab_count - slabs["frames"] - slabs["index"]
    return {"frames": frames, "used_bytes": used_bytes, "slabs": slabs}
