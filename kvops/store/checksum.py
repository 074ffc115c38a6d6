"""Checksums of parts: xxh3-64, made when a part is committed and compared when it is read."""

import enum

import xxhash

from . import format as fmt

SAMPLE_EVERY = 16
"""With "sampled", one of so many reads is checked."""

CHECKSUM_WORD = (fmt.HEADER_FIXED_BYTES + 24) // 8
"""The first part's checksum, in words from the start of the frame header."""


class Algorithm(enum.IntEnum):
    """What the checksum field of a part holds."""

    NONE = 0
    XXH3_64 = 1


class Verify(enum.Enum):
    """When a blob that is read is compared with its checksum. OFF makes none either."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    OFF = "off"

    def wants(self, number: int) -> bool:
        """Return whether read *number* is to be checked."""
        return self is Verify.ALWAYS or (self is Verify.SAMPLED and number % SAMPLE_EVERY == 0)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the xxh3-64 checksum of *data*."""
    return xxhash.xxh3_64_intdigest(data)


def empty_parts(blob_bytes: int, part_count: int) -> bytes:
    """Return the part table of a frame that was just reserved."""
    size = blob_bytes // part_count
    return b"".join(
        fmt.PART.pack(rank, fmt.PartState.EMPTY, Algorithm.NONE, 0, rank * size, size, 0)
        for rank in range(part_count)
    )
