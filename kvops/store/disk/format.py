"""The bytes of a disk tier's folder: whatever two versions, or a crash and the next start, have to agree on.

All integers are little-endian. Format version 1. The folder holds

    lock                owner's pid and start time, text; locked by the owner
    index-<n>.log       the journal: what is where
    seg-<8 hex>.blobs   segments: files of slots of one size
    quarantine/         files that can't be used, each with <name>.reason
    *.tmp               a file that was not finished: of no value

Segment: one page of superblock, then its slots without a gap

Segment superblock
    0   8s   magic          b"KVFSEGM1"
    8   u32  version        FORMAT_VERSION
    12  u32  segment        the number in its name, below MAX_SEGMENTS
    16  u64  slot_bytes     header area and room for a blob, multiple of 4096
    24  u32  slots          how many, at most MAX_SLOTS
    28  u32  header_bytes   header area of a slot, multiple of 4096
    32  u64  created        Unix time, nanoseconds
    40  u64  born           the generation that was next; a record with a lower one means another file of that name
    48  u64  0
    56  u64  check          xxh3-64 of bytes 0..56

Slot: header area (header page), then the bytes of the blob. So a save is one write, a load one read

Header page of a blob
    0   8s   magic          b"KVFBLOB1"
    8   u32  version        FORMAT_VERSION
    12  u32  frame header   H, its size: 96 bytes and 32 for each part
    16  u64  generation     which life of the slot this is
    24  u64  blob_bytes     bytes of all parts
    32  u64  written        Unix time, nanoseconds
    40  u64  0
    48  u64  0
    56  u64  check          xxh3-64 of bytes 0..56 and of the H bytes from 64 on
    64  H    frame header   as in an arena (kvops/store/format.py: key, namespace, tokens, part table), state word 0, and a
                            checksum for every part; its blob offset is the one that it had in memory
    ...      nothing that counts, up to the end of the header area; not covered by the check

The header page is the truth about a slot: the journal only says where to look.

Journal: one header, then records, 64 bytes each

Journal header
    0   8s   magic          b"KVFJRNL1"
    8   u32  version        FORMAT_VERSION
    12  u32  0
    16  u64  epoch          of the owner that began this file
    24  u64  created        Unix time, nanoseconds
    32  24s  0
    56  u64  check          xxh3-64 of bytes 0..56

Journal record
    0   u64  tag_lo         low half of the blob's tag, xxh3-128 of namespace + key
    8   u64  tag_hi         high half
    16  u64  generation     epoch << 40 | count: no two saves share one
    24  u32  segment
    28  u32  slot
    32  u64  blob_bytes
    40  u64  namespace      xxh3-64 of the namespace
    48  u32  time           Unix time of the save, seconds
    52  u8   kind           1 put, 2 remove, 3 quarantine, 4 epoch (an owner began; only generation counts)
    53  u8   reason         index into REASONS
    54  u16  parts
    56  u64  check          xxh3-64 of bytes 0..56

Of the records of one slot the one with the highest generation holds, and of those the last: a put is undone by a later
put of that slot, by a remove, or turned into a quarantine by one of its own generation.
"""

import dataclasses
import struct
import time
from typing import NamedTuple

import xxhash

from kvferry.kvops.store import format as fmt

FORMAT_VERSION = 1
PAGE = fmt.PAGE

SEGMENT_MAGIC = b"KVFSEGM1"
BLOB_MAGIC = b"KVFBLOB1"

SUPERBLOCK_BYTES = PAGE
PREAMBLE_BYTES = 64

MAX_SEGMENTS = 1 << 24
MAX_SLOTS = 1 << 16
"""Of one segment. Both numbers fit, with some bits of the tag, into one word of the index in memory (table.py)."""

GENERATION_COUNT_BITS = 40
EPOCH_BITS = 64 - GENERATION_COUNT_BITS

_PART_COUNT = 90
"""Where a frame header says how many parts it has."""

CHECKED_BYTES = 56
"""Every structure has its check word there."""

_SUPERBLOCK = struct.Struct("<8sIIQIIQQQ")
PREAMBLE = struct.Struct("<8sIIQQQQQ")
_CHECK = struct.Struct("<Q")
_ZERO_WORD = bytes(8)

# what can be wrong with a blob or a file: a closed set, see REASONS
EMPTY = "empty"
MAGIC = "magic"
VERSION = "version"
HEADER = "header"
STALE = "stale"
FOREIGN = "foreign"
SHAPE = "shape"
CHECKSUM = "checksum"
TRUNCATED = "truncated"
UNREADABLE = "unreadable"
OTHER = "other"

REASONS = (
    "", EMPTY, MAGIC, VERSION, HEADER, STALE, FOREIGN, SHAPE, CHECKSUM, TRUNCATED, UNREADABLE, OTHER,
)  # fmt: skip
"""Why something on disk is not used; the place of a reason is its number in a journal record.

empty: zeros, nothing was ever written there · magic: not made by kvferry · version: made by a later one · header: check,
sizes or part table do not fit · stale: a sound header, of another save into that slot · foreign: a sound header, of
another blob; a segment with another number than its name says · shape: other sizes than expected · checksum: the bytes
of a part are not those that were saved · truncated: the file is shorter than it should be · unreadable: the drive
reported an error, or it is no regular file · other: none of these.
"""


class Part(NamedTuple):
    """One rank's share of a blob, as the header page tells it: *num_bytes* from *offset* in the blob on."""

    rank: int
    state: int
    algorithm: int
    offset: int
    num_bytes: int
    checksum: int


@dataclasses.dataclass(slots=True)
class BlobHeader:
    """A sound header page.

    Attributes:
        generation: which life of the slot it belongs to; the reader compares it with what the journal said.
        blob_bytes: bytes of all parts. written: Unix time of the save, nanoseconds.
        key, namespace, tokens: of the chunk.
        parts: they cover the blob without a gap, in the order of their ranks, and are all ready.
        frame_header: as an arena wants it, state word 0.
    """

    generation: int
    blob_bytes: int
    written: int
    key: bytes
    namespace: bytes
    tokens: int
    parts: tuple[Part, ...]
    frame_header: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Superblock:
    """A sound segment superblock; the module's docstring names the fields."""

    segment: int
    slot_bytes: int
    slots: int
    header_bytes: int
    created: int
    born: int

    @property
    def file_bytes(self) -> int:
        """How long the file is."""
        return SUPERBLOCK_BYTES + self.slots * self.slot_bytes


def blob_tag(namespace: bytes, key: bytes) -> tuple[int, int]:
    """Return what a blob is known by on disk: both halves, low first, of xxh3-128 of *namespace* and *key*."""
    whole = xxhash.xxh3_128_intdigest(namespace + key)
    return whole & 0xFFFF_FFFF_FFFF_FFFF, whole >> 64


def namespace_tag(namespace: bytes) -> int:
    """Return the number that stands for a namespace in the journal."""
    return xxhash.xxh3_64_intdigest(namespace)


def reason_code(reason: str) -> int:
    """Return the number of *reason*; what is not in the closed set counts as "other"."""
    return REASONS.index(reason if reason in REASONS else OTHER)


def reason_name(code: int) -> str:
    """Return what *code* means."""
    return REASONS[code] if code < len(REASONS) else OTHER


def frame_header_bytes(parts: int) -> int:
    """Return the size of a frame header with *parts* parts as it lies on disk, without what rounds it up in memory."""
    return fmt.HEADER_FIXED_BYTES + parts * fmt.PART_BYTES


def header_area(parts: int) -> int:
    """Return the size of a slot's header area for a blob of *parts* parts: one page up to 123 of them."""
    return fmt.round_up(PREAMBLE_BYTES + fmt.header_bytes(parts), PAGE)


def slot_bytes_for(blob_bytes: int, parts: int) -> int:
    """Return the size of the slot of such a blob."""
    return header_area(parts) + fmt.round_up(blob_bytes, PAGE)


# --- header page -------------------------------------------------------------------------------------------------


def pack_header_page(
    buffer: memoryview | bytearray,
    at: int,
    *,
    generation: int,
    blob_bytes: int,
    frame_header: bytes | memoryview,
) -> None:
    """Write the whole header area of a blob into *buffer* at *at*.

    Args:
        buffer: has :func:`header_area` of room from *at* on; all of them are written.
        at: where the area begins.
        generation: of the :class:`Place` that the blob goes to.
        blob_bytes: bytes of all parts.
        frame_header: as it is in the arena, with a checksum for every part; its state word is left out.

    Raises:
        ValueError: the header has a size that no frame header has.
    """
    count = int.from_bytes(frame_header[_PART_COUNT : _PART_COUNT + 2], "little")
    size = frame_header_bytes(count)
    if not 0 < count <= fmt.MAX_PARTS or len(frame_header) < size:
        raise ValueError(
            f"frame_header must be {size} bytes for its {count} parts (1 to {fmt.MAX_PARTS}); got {len(frame_header)}"
        )
    frame = _ZERO_WORD + bytes(frame_header[8:size])
    fixed = PREAMBLE.pack(
        BLOB_MAGIC, FORMAT_VERSION, size, generation, blob_bytes, time.time_ns(), 0, 0
    )
    used = fixed + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed + frame)) + frame
    area = fmt.round_up(len(used), PAGE)
    buffer[at : at + area] = used.ljust(area, b"\0")


def read_header_page(page: bytes | bytearray | memoryview) -> BlobHeader | str:
    """Return what the header area of a slot says, or which of :data:`REASONS` it says nothing for.

    Whether it is the blob that was looked for, generation and tag, is for the caller to compare.
    """
    if len(page) < PREAMBLE_BYTES:
        return TRUNCATED
    magic, version, size, generation, blob_bytes, written, _, _ = PREAMBLE.unpack_from(page)
    if magic != BLOB_MAGIC:
        return MAGIC if any(page[:PREAMBLE_BYTES]) else EMPTY
    if version > FORMAT_VERSION:
        return VERSION
    if version < 1 or not frame_header_bytes(1) <= size <= frame_header_bytes(fmt.MAX_PARTS):
        return HEADER
    if PREAMBLE_BYTES + size > len(page):
        return TRUNCATED
    frame = bytes(page[PREAMBLE_BYTES : PREAMBLE_BYTES + size])
    (check,) = _CHECK.unpack_from(page, CHECKED_BYTES)
    if check != xxhash.xxh3_64_intdigest(bytes(page[:CHECKED_BYTES]) + frame):
        return HEADER
    return _read_frame_header(frame, generation, blob_bytes, written)


def _read_frame_header(
    frame: bytes, generation: int, blob_bytes: int, written: int
) -> BlobHeader | str:
    """Judge a frame header whose bytes are those that were written; a writer may still have been wrong."""
    body = fmt.HEADER_BODY.unpack_from(frame, 8)
    key, namespace, tokens, _, stored_bytes, _, magic, version, key_bytes, count = body
    sane = (
        magic == fmt.HEADER_MAGIC
        and version == fmt.FORMAT_VERSION
        and stored_bytes == blob_bytes
        and fmt.KEY_BYTES_MIN <= key_bytes <= fmt.KEY_BYTES_MAX
        and 0 < count <= fmt.MAX_PARTS
        and frame_header_bytes(count) == len(frame)
    )
    if not sane:
        return HEADER
    parts = []
    end = 0
    for number in range(count):
        rank, state, algorithm, _, offset, num_bytes, checksum = fmt.PART.unpack_from(
            frame, fmt.HEADER_FIXED_BYTES + number * fmt.PART_BYTES
        )
        if rank != number or offset != end or state != fmt.PartState.READY:
            return HEADER
        end += num_bytes
        parts.append(Part(rank, state, algorithm, offset, num_bytes, checksum))
    if end != blob_bytes:
        return HEADER
    return BlobHeader(
        generation, blob_bytes, written, key[:key_bytes], namespace, tokens, tuple(parts), frame
    )


# --- segment -----------------------------------------------------------------------------------------------------


def pack_superblock(block: Superblock) -> bytes:
    """Return the first page of a segment."""
    fixed = _SUPERBLOCK.pack(
        SEGMENT_MAGIC, FORMAT_VERSION, block.segment, block.slot_bytes, block.slots,
        block.header_bytes, block.created, block.born, 0,
    )  # fmt: skip
    return with_check(fixed).ljust(SUPERBLOCK_BYTES, b"\0")


def read_superblock(page: bytes) -> Superblock | str:
    """Return what the first page of a segment says, or which of :data:`REASONS` it says nothing for."""
    if len(page) < SUPERBLOCK_BYTES:
        return TRUNCATED
    fields = _SUPERBLOCK.unpack_from(page)
    magic, version, segment, slot_bytes, slots, header_bytes, created, born, _ = fields
    if magic != SEGMENT_MAGIC:
        return MAGIC if any(page) else EMPTY
    if version > FORMAT_VERSION:
        return VERSION
    sane = (
        version == FORMAT_VERSION
        and check_holds(page)
        and segment < MAX_SEGMENTS
        and 0 < slots <= MAX_SLOTS
        and 0 < header_bytes < slot_bytes
        and not (header_bytes % PAGE or slot_bytes % PAGE)
    )
    if not sane:
        return HEADER
    return Superblock(segment, slot_bytes, slots, header_bytes, created, born)


# --- all three ----------------------------------------------------------------------------------------------------


def with_check(fixed: bytes) -> bytes:
    """Return *fixed*, 56 bytes, with its check word behind it."""
    return fixed + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed))


def check_holds(data: bytes) -> bool:
    """Return whether the check word of the first 64 bytes is theirs."""
    (check,) = _CHECK.unpack_from(data, CHECKED_BYTES)
    return bool(check == xxhash.xxh3_64_intdigest(data[:CHECKED_BYTES]))
