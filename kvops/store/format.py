"""The bytes of an arena: every structure that two processes, or two versions, have to agree on.

All integers are little-endian. Offsets count from the start of the arena. Format version 1:

    0           superblock           4096 bytes
    4096        attach table         64 slots x 64 bytes
    8192        span table           slab_count x 32 bytes, rounded up to 4096
    ...         first index          INDEX_SLOTS_MIN slots x 16 bytes
    data        slabs                slab_count x slab_bytes, 4096-aligned

Superblock
    0   8s   magic          b"KVFERRY1" once formatted, b"KVFERRY?" while being formatted
    8   u32  version        FORMAT_VERSION
    12  u32  check          xxh32 of bytes 16..64
    16  u64  arena_bytes    size of the file
    24  u64  slab_bytes
    32  u64  slab_count
    40  u64  data           offset of slab 0
    48  u64  span_table     offset of the span table
    56  u64  created        Unix time, nanoseconds
    64  u64  index_sequence odd while the two fields below change
    72  u64  index          offset of the index
    80  u64  index_slots    a power of two
    88  u64  epoch          counts owners; the upper bits of every generation
    96  u64  owner_pid      0 when nobody ever owned it
    104 u64  owner_start    start time of that process, in clock ticks since boot
    112 u64  owner_session  digest of the owner's session name (an engine id)
    120 u64  attach_sequence counts entries into the attach table

Attach slot: one process that has mapped the arena to read or write blobs
    0   u64  pid            0: the slot is free
    8   u64  start          start time of that process
    16  u64  session
    24  u64  writes_begun   parts whose writing began, ever
    32  u64  writes_done    parts whose writing ended, ever; begun - done are being written now
    40  u64  reads_begun
    48  u64  reads_done
    56  u64  frames_bad     frames that this process found corrupt, ever

Span table entry, one for each slab. A span is a run of slabs that hold frames of one size
    0   u32  kind           0 free, 1 first slab of a span of frames, 2 a further slab, 3 first slab of an index
    4   u32  slabs          slabs in the span
    8   u64  frame_bytes    multiple of 4096
    16  u32  frame_count
    20  u32  header_bytes   size of one frame header, multiple of 64
    24  u64  unused

A span begins with its frame headers (frame_count x header_bytes, rounded up to 4096); its frames follow.

Frame header
    0   u64  state word     generation << 8 | state
    8   36s  key            the engine's block hash, then the group id (u32, big-endian); zero-padded
    44  16s  namespace
    60  u32  tokens         tokens of the chunk
    64  u64  blob           offset of the blob
    72  u64  blob_bytes     bytes of all parts
    80  u32  time           Unix time of the reservation, seconds
    84  u32  magic          HEADER_MAGIC
    88  u8   version        FORMAT_VERSION
    89  u8   key_bytes      bytes of the key that count, 20..36
    90  u16  part_count
    92  u32  check          xxh32 of bytes 8..92
    96  part table, 32 bytes each

Part: the share of one rank
    0   u16  rank
    2   u8   state          0 empty, 1 ready, 2 failed
    3   u8   algorithm      of the checksum: 0 none, 1 xxh3-64
    4   u32  reads_done     loads of this part that ended, in this generation
    8   u64  offset         from the start of the blob
    16  u64  bytes
    24  u64  checksum

Index slot (open addressing, linear probing; an index is derived from the headers and can be rebuilt)
    0   u64  tag            xxh3-64 of namespace + key; 0 empty, 1 deleted (a tag below 2 is raised to 2)
    8   u64  place          header offset / 64 << 24 | low 24 bits of the generation

Who writes what: the owner writes everything but the attach slots (each process its own) and, in a frame that it
gave to a rank, that rank's part and the step from READY to BAD. A state word, and the first word of a part, change
by one aligned 8-byte store, last; this relies on x86-64 store order (stores become visible in program order).
"""

import enum
import struct

import xxhash

FORMAT_VERSION = 1
MAGIC = b"KVFERRY1"
MAGIC_UNFINISHED = b"KVFERRY?"
HEADER_MAGIC = 0x4D52464B
PAGE = 4096
"""Alignment of blobs and of the data area, in bytes: the unit of direct I/O and of host registration."""

SUPERBLOCK_BYTES = 4096
ATTACH_OFFSET = 4096
ATTACH_SLOTS = 64
ATTACH_BYTES = 64
SPAN_TABLE_OFFSET = 8192
SPAN_ENTRY_BYTES = 32
INDEX_SLOT_BYTES = 16
INDEX_SLOTS_MIN = 4096
HEADER_FIXED_BYTES = 96
PART_BYTES = 32
MAX_PARTS = 1024

MIN_ARENA_BYTES = 16 << 20
MIN_SLAB_BYTES = 256 << 10
MAX_SLAB_BYTES = 32 << 20

GROUP_BYTES = 4
KEY_BYTES_MIN = 16 + GROUP_BYTES
KEY_BYTES_MAX = 32 + GROUP_BYTES
NAMESPACE_BYTES = 16

SUPERBLOCK = struct.Struct("<8sII6Q")
GEOMETRY = struct.Struct("<6Q")
OWNER = struct.Struct("<3Q")
ATTACH = struct.Struct("<8Q")
SPAN_ENTRY = struct.Struct("<IIQIIQ")
HEADER_BODY = struct.Struct("<36s16sIQQIIBBH")
"""Bytes 8..92 of a frame header."""

PART = struct.Struct("<HBBIQQQ")
CHECK = struct.Struct("<I")
BODY_CHECK_AND_PART = struct.Struct("<84sIHBBIQQQ")
"""A header's packed body, its check word, and its first part: everything behind the state word."""

PLACE_GENERATION_BITS = 24
PLACE_GENERATION_MASK = (1 << PLACE_GENERATION_BITS) - 1
"""The low bits of an index entry's second word: which life of the frame it means."""

HEADER_CHECK = 92
"""Where the check word is in a header."""

HEADER_BLOB_WORD = 64 // 8
"""Which word of a header is the offset of the blob."""

INDEX_SEQUENCE_WORD = 64 // 8
INDEX_OFFSET_WORD = 72 // 8
INDEX_SLOTS_WORD = 80 // 8
EPOCH_WORD = 88 // 8
ATTACH_SEQUENCE_WORD = 120 // 8
ATTACH_BAD_WORD = 56 // 8
OWNER_OFFSET = 96

GENERATION_COUNT_BITS = 36
"""Generations are epoch << 36 | count, so that none is ever used twice, whatever was lost in a crash."""

EPOCH_BITS = 56 - GENERATION_COUNT_BITS
"""A state word leaves 56 bits for a generation."""

TOKENS_MAX = (1 << 32) - 1
"""The most that a header's token count holds."""


class State(enum.IntEnum):
    """What a frame holds."""

    FREE = 0
    WRITING = 1
    READY = 2
    BAD = 3


class PartState(enum.IntEnum):
    """What one rank's share of a frame holds."""

    EMPTY = 0
    READY = 1
    FAILED = 2


class SpanKind(enum.IntEnum):
    """What a slab is used for."""

    FREE = 0
    FRAMES = 1
    CONTINUATION = 2
    INDEX = 3


def round_up(value: int, unit: int) -> int:
    """Return the least multiple of *unit* that is not below *value*."""
    return -(-value // unit) * unit


def header_bytes(part_count: int) -> int:
    """Return the size of a frame header with *part_count* parts, in bytes."""
    return round_up(HEADER_FIXED_BYTES + part_count * PART_BYTES, 64)


def slab_bytes_for(arena_bytes: int) -> int:
    """Return the slab size of an arena: about 1/128 of it, a power of two, 256 KiB to 32 MiB."""
    size = 1 << ((arena_bytes // 128).bit_length() - 1)
    return max(MIN_SLAB_BYTES, min(MAX_SLAB_BYTES, size))


def check_of(body: bytes | memoryview) -> int:
    """Return the check word of a header body or a superblock's geometry."""
    return xxhash.xxh32_intdigest(body)


def key_tag(namespace: bytes, key: bytes) -> int:
    """Return the index tag of *key* in *namespace*; never 0 or 1, which mean empty and deleted."""
    return max(2, xxhash.xxh3_64_intdigest(namespace + key))


def check_key(key: bytes) -> None:
    """Refuse what is not a chunk key.

    Raises:
        ValueError: *key* is not 16 to 32 bytes of block hash followed by 4 bytes of group id.
    """
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise ValueError(
            f"key must be 16 to 32 bytes of block hash and {GROUP_BYTES} bytes of group id; got {len(key)} bytes"
        )


def check_namespace(namespace: bytes) -> None:
    """Refuse what is not a namespace.

    Raises:
        ValueError: *namespace* is not 16 bytes.
    """
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"namespace must be {NAMESPACE_BYTES} bytes; got {len(namespace)}")


def check_tokens(tokens: int) -> None:
    """Refuse a number of tokens that a header can't hold.

    Raises:
        ValueError: it is negative or too large.
    """
    if not 0 <= tokens <= TOKENS_MAX:
        raise ValueError(f"tokens must be 0 to {TOKENS_MAX}; got {tokens}")


def make_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of the chunk that ends with the block of *block_hash*, in KV cache group *group*."""
    key = block_hash + group.to_bytes(GROUP_BYTES, "big")
    check_key(key)
    return key
