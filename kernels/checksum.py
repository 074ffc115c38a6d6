"""Check a blob: bytes → one 64-bit number that the copy kernels compute on the way.

The bytes of a blob are read as 16-byte vectors, numbered by their place in the blob, the last one padded
with zeros. A vector is two little-endian 64-bit words; each is folded to 32 bits:

    digest(word) = low half + FOLD * high half            mod 2**32
    key(v)       = KEY ** v                               mod 2**32
    checksum     = SEED + sum over v of key(v) * (MIX_0 * digest(word 0) + MIX_1 * digest(word 1))
                                                          mod 2**64

A sum, so programs may add their shares in any order; a power, so the key of a tile's first vector times
the key of a lane is the key of that lane's vector, wherever the tile starts. Price in a kernel: two
multiply-adds for the digests, one multiplication for the key, two wide multiplications and their
additions for each 16 bytes; the static report counts them.

What it detects:

* any single flipped bit, always: FOLD is odd, so the digest changes, by less than 2**32; keys are odd, so
  the product is not divisible by 2**32 more than the digest's change is;
* two vectors that changed places: the change is the difference of two keys, which is not 0 below 2**30
  vectors, times that of the weighted digests. Both are small enough never to vanish mod 2**64 if the
  digests of one word differ; if those of both do, the chance is that of the next line. Digests of
  different words agree with a chance of 2**-32 each;
* blocks that changed places at a distance of ``d`` vectors, with a chance of 2**(tz(d) - 62) to miss it, tz
  the trailing zeros of ``d``: 2**-45 for blocks of 2 MiB;
* any other change, with a chance of 2**-64 to miss it if the changed bits are random; within a single
  64-bit word 2**-32, because a word counts by its digest;
* a blob of zeros, because its checksum is SEED, and a frame header of zeros holds 0.

It guards against faults, not against an author of collisions.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

FOLD = 0x9E3779B1
"""Weight of a word's high half in its digest; odd."""

KEY = 747796405
"""Base of the keys; 5 mod 8, so its powers run through 2**30 odd numbers before one repeats."""

MIX_0, MIX_1 = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
"""Weights of the first and the second word of a vector; odd."""

SEED = 0x6A09E667F3BCC909
"""Checksum of nothing and of zeros."""

VECTOR_BYTES = 16
"""Positions count in vectors of this many bytes."""

_MASK = (1 << 64) - 1
_STRETCH = 1 << 16
"""Vectors whose keys are kept: 1 MiB of bytes at a time stays in the cache."""

Bytes = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""What a checksum can be taken of."""


def checksum_bytes(buffer: Bytes, position: int = 0) -> int:
    """Return the checksum of a blob of which *buffer* is all that was moved.

    Args:
        buffer: contiguous bytes.
        position: where they start in the blob, in bytes; a multiple of 8.

    Returns:
        0..2**64 - 1.

    Raises:
        ValueError: *position* is not a multiple of 8.
    """
    return (SEED + checksum_share(buffer, position)) & _MASK


def checksum_share(buffer: Bytes, position: int) -> int:
    """Return what *buffer* adds to the checksum of its blob.

    Shares add up: the checksum is ``SEED`` plus the shares of all pieces, mod 2**64.

    Args:
        buffer: contiguous bytes; its length is a multiple of 8, unless it ends its blob.
        position: where they start in the blob, in bytes; a multiple of 8.

    Raises:
        ValueError: *position* is not a multiple of 8.
    """
    if position < 0 or position % 8:
        raise ValueError(f"position must be a multiple of 8, not negative; got {position}")
    data = np.frombuffer(buffer, dtype=np.uint8)
    if position % VECTOR_BYTES:
        # the second half of a vector: its own weight, and the rest starts on a vector
        head = int(_digests(data[:8])[0]) * MIX_1 * pow(KEY, position // VECTOR_BYTES, 1 << 32)
        return (head + checksum_share(data[8:], position + 8)) & _MASK
    total = 0
    for start in range(0, data.size, _STRETCH * VECTOR_BYTES):
        digests = _digests(data[start : start + _STRETCH * VECTOR_BYTES]).astype(np.uint64)
        first, second = digests[0::2], digests[1::2]
        keys = lane_keys(_STRETCH)[: first.size]
        first_key = np.uint32(pow(KEY, (position + start) // VECTOR_BYTES, 1 << 32))
        wide = (keys * first_key).astype(np.uint64)
        total += int(np.dot(first, wide)) * MIX_0
        total += int(np.dot(second, wide[: second.size])) * MIX_1
    return total & _MASK


def _digests(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return the digest of every 8 bytes, the last ones padded with zeros: ``[words]`` uint32."""
    if data.size % 8:
        data = np.concatenate((data, np.zeros(-data.size % 8, np.uint8)))
    halves = data.view(np.dtype("<u4"))
    return halves[0::2] + halves[1::2] * np.uint32(FOLD)


@lru_cache(maxsize=16)
def lane_keys(count: int) -> npt.NDArray[np.uint32]:
    """Return the keys of vectors ``0..count - 1``: ``[count]`` uint32, read only."""
    keys = np.ones(count, np.uint32)
    filled = 1
    while filled < count:
        more = min(filled, count - filled)
        keys[filled : filled + more] = keys[:more] * np.uint32(pow(KEY, filled, 1 << 32))
        filled += more
    keys.flags.writeable = False
    return keys


def position_keys(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return the key of the vector at each byte position: ``[n]`` uint32 for ``[n]`` int64."""
    keys = [pow(KEY, position // VECTOR_BYTES, 1 << 32) for position in positions.tolist()]
    return np.array(keys, dtype=np.uint32)
