"""From frame headers in the arena to header pages on the disk, and what has to agree on the way back.

Both happen to every blob, so they happen to many at a time: a page is a row of 64-bit words here, and a step is one for
all rows. format.py says what the words are.
"""

import operator
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.checksum import Algorithm

from .format import (
    BLOB_MAGIC,
    CHECKED_BYTES,
    CHECKSUM,
    FOREIGN,
    FORMAT_VERSION,
    PREAMBLE_BYTES,
    SHAPE,
    STALE,
    frame_header_bytes,
    read_header_page,
)
from .jobs import Move, place_of

Words = npt.NDArray[np.uint64]

# in words; of a page, and of a part in it
_MAGIC, _SIZE, _GENERATION, _BLOB_BYTES, _WRITTEN, _CHECK = 0, 1, 2, 3, 4, CHECKED_BYTES // 8
_FRAME = PREAMBLE_BYTES // 8
_PARTS = _FRAME + fmt.HEADER_FIXED_BYTES // 8
_STATE, _OFFSET, _NUM_BYTES, _VALUE = range(4)
_PART_WORDS = fmt.PART_BYTES // 8

_LOW = 0xFFFF_FFFF
_ALL = 0xFFFF_FFFF_FFFF_FFFF
_ALGORITHM_SHIFT = 24
_MADE_READY = int(fmt.PartState.READY) << 16 | int(Algorithm.XXH3_64) << _ALGORITHM_SHIFT
"""How the first word of a part on the disk differs from that of a part that was just reserved."""

# key, namespace, magic, version and counts of a frame header; not state, tokens, place, time and check
_SAME_IN_HEADER = [0, *[_ALL] * 6, _LOW, 0, 0, _LOW << 32, _LOW]
_SAME_IN_PART = [_LOW, _ALL, _ALL, 0]

_GENERATION_OF = operator.attrgetter("place.generation")
_HEADER_OF = operator.attrgetter("frame.slot.header")

digest = xxhash.xxh3_64_intdigest


def page_words(parts: int) -> int:
    """Return how many words of a header page count."""
    return (PREAMBLE_BYTES + frame_header_bytes(parts)) // 8


def _first_words(parts: int) -> tuple[int, int]:
    (magic,) = np.frombuffer(BLOB_MAGIC, np.uint64).tolist()
    return magic, FORMAT_VERSION | frame_header_bytes(parts) << 32


def _frame_headers(
    words: Words, moves: Sequence[Move], parts: int
) -> tuple[npt.NDArray[np.intp], Words]:
    """Return where each frame's header is in the arena's *words*, and a copy of each."""
    starts = np.fromiter(map(_HEADER_OF, moves), np.intp, len(moves)) // 8
    columns = np.arange(frame_header_bytes(parts) // 8)
    return starts, words[starts[:, None] + columns]


def _generations(moves: Sequence[Move]) -> Words:
    return np.fromiter(map(_GENERATION_OF, moves), np.uint64, len(moves))


def _checks(pages: Words) -> list[int]:
    """Return the check word that each page should have."""
    raw, size = pages.tobytes(), 8 * pages.shape[1]
    return [
        digest(raw[at : at + CHECKED_BYTES] + raw[at + PREAMBLE_BYTES : at + size])
        for at in range(0, len(raw), size)
    ]


def make_pages(arena: Arena, moves: Sequence[Move], parts: int) -> Words:
    """Return the header pages of ready frames: without state and counts, every part with a checksum.

    Args:
        arena: with the frames, held by the caller.
        moves: what is to be saved, with its places on the disk.
        parts: of the store.
    """
    pages = np.zeros((len(moves), page_words(parts)), np.uint64)
    pages[:, _MAGIC], pages[:, _SIZE] = _first_words(parts)
    pages[:, _GENERATION] = _generations(moves)
    pages[:, _BLOB_BYTES] = np.array([move.frame.blob_bytes for move in moves], np.uint64)
    pages[:, _WRITTEN] = time.time_ns()
    _, pages[:, _FRAME:] = _frame_headers(arena.array.view(np.uint64), moves, parts)
    pages[:, _FRAME] = 0
    table = pages[:, _PARTS:].reshape(len(moves), parts, _PART_WORDS)
    table[..., _STATE] &= np.uint64(_LOW)
    without = table[..., _STATE] >> np.uint64(_ALGORITHM_SHIFT) == int(Algorithm.NONE)
    # stored under verify "off": memory is trusted, a disk never is
    for row, rank in np.argwhere(without).tolist():
        part = table[row, rank]
        begin = moves[row].frame.offset + int(part[_OFFSET])
        part[_VALUE] = digest(arena.buffer[begin : begin + int(part[_NUM_BYTES])])
        part[_STATE] |= np.uint64(int(Algorithm.XXH3_64) << _ALGORITHM_SHIFT)
    pages[:, _CHECK] = np.array(_checks(pages), np.uint64)
    return pages


def take_in(areas: Words, arena: Arena, moves: Sequence[Move], parts: int) -> list[str | None]:
    """Judge blobs that were read into frames; make the parts of each one ready that is what was asked for.

    Args:
        areas: header areas as they were read, of each move at its page.
        arena: with the blobs' bytes in the frames, which are reserved, and the caller's.
        moves: what was asked for, with the places where it was read.
        parts: of the store.

    Returns:
        for each None, or which of format.REASONS it can't be used for.
    """
    words, buffer = arena.array.view(np.uint64), arena.buffer
    pages = areas[:, : page_words(parts)][[move.page for move in moves]]
    magic, size = _first_words(parts)
    starts, reserved = _frame_headers(words, moves, parts)
    compared = np.array(_SAME_IN_HEADER + _SAME_IN_PART * parts, np.uint64)
    differs = np.array([0] * (_PARTS - _FRAME) + [_MADE_READY, 0, 0, 0] * parts, np.uint64)
    blob_bytes = [move.frame.blob_bytes for move in moves]
    agrees = (
        (pages[:, _MAGIC] == magic)
        & (pages[:, _SIZE] == size)
        & (pages[:, _GENERATION] == _generations(moves))
        & (pages[:, _BLOB_BYTES] == np.array(blob_bytes, np.uint64))
        & (pages[:, _CHECK] == np.array(_checks(pages), np.uint64))
        & ((pages[:, _FRAME:] ^ reserved) & compared == differs).all(axis=1)
    ).tolist()
    values = pages[:, _PARTS + _VALUE :: _PART_WORDS].tolist()
    reasons: list[str | None] = []
    for row, move in enumerate(moves):
        reason = None
        if agrees[row]:
            at, part_bytes = move.frame.slot.offset, blob_bytes[row] // parts
            for value in values[row]:
                if digest(buffer[at : at + part_bytes]) != value:
                    reason = CHECKSUM
                at += part_bytes
        else:
            reason = _why_not(areas[move.page].tobytes(), move)
        reasons.append(reason)
    sound = [reason is None for reason in reasons]
    if True in sound:
        first = starts[sound][:, None] + (_PARTS - _FRAME)
        columns = np.arange(parts * _PART_WORDS)
        words[first + columns] = pages[sound, _PARTS:]
    return reasons


def _why_not(page: bytes, move: Move) -> str:
    """Return why a header page is not the one that was asked for."""
    found = read_header_page(page)
    if isinstance(found, str):
        return found
    if found.generation != place_of(move).generation:
        return STALE
    if (found.key, found.namespace) != (move.frame.key, move.frame.namespace):
        return FOREIGN
    if any(part.algorithm != Algorithm.XXH3_64 for part in found.parts):
        return CHECKSUM
    return SHAPE


def mark_failed(arena: Arena, move: Move, parts: int) -> None:
    """Say in a frame that nothing more comes: one that a reset left behind is freed by that."""
    first = move.frame.header + fmt.HEADER_FIXED_BYTES + 2
    for rank in range(parts):
        arena.buffer[first + rank * fmt.PART_BYTES] = fmt.PartState.FAILED
