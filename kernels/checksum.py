"""Check a blob: bytes → one 64-bit number that the copy kernels compute on the way.

The bytes of a blob are read as 16-byte vectors, numbered by their place in the blob, the last one padded
with zeros. A vector is four little-endian 32-bit numbers:

    digest(v) = n0 + FOLD * n1 + FOLD**2 * n2 + FOLD**3 * n3    mod 2**32
    key(v)    = KEY ** v                                        mod 2**32
    checksum  = SEED + sum over v of key(v) * digest(v)         mod 2**64

A sum, so programs may add their shares in any order; a power, so the key of a tile's first vector times
the key of a lane is the key of that lane's vector, wherever the tile starts. Price in a kernel, for each
16 bytes: three multiply-adds for the digest, one multiplication for the key, one wide multiplication and
its addition; the static report counts them.

What it detects:

* any single flipped bit, always: FOLD is odd, so the digest changes; its change and the key, both below
  2**32 and not 0, have a product that is not 0 mod 2**64;
* flipped bits in two vectors, one in each: always in a blob of up to 93 MiB. Products could only cancel
  where the ratio of two keys is that of two changes, and no two vectors nearer than that have such keys
  (a test goes through all pairs of flips);
* two vectors that changed places, always if their digests differ: the change is the product of two
  differences below 2**32. Digests of different vectors agree with a chance of 2**-32;
* blocks that changed places at a distance of ``d`` vectors, with a chance of 2**(tz(d) - 62) to miss it, tz
  the trailing zeros of ``d``: 2**-45 for blocks of 2 MiB;
* any other change of several vectors, with a chance of 2**-64 to miss it if the changed bits are random;
  within a single vector 2**-32, because a vector counts by its digest;
* a blob of zeros: its checksum is SEED, which a frame header of zeros does not hold.

What it does not: products of the upper bits of a vector's numbers do not reach far enough mod 2**32. Bit 31 of
two or of all four numbers of one vector may flip unseen, so may bits 27 to 30 in opposite directions: one in
508 of all pairs of flips within 16 bytes. So fp32 numbers that all change their sign are not noticed.

It guards against faults, not against an author of collisions.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

FOLD = 0x9E3779B1
"""Weight of a number in its vector's digest, to the power of its place; odd."""

KEY = 747796405
"""Base of the keys; 5 mod 8, so its powers run through 2**30 odd numbers before one repeats."""

SEED = 0x6A09E667F3BCC909
"""Checksum of nothing and of zeros."""

VECTOR_BYTES = 16
"""Positions count in vectors of this many bytes."""

_MASK = (1 << 64) - 1
_STRETCH = 1 << 14
"""Vectors at a time: 256 KiB of bytes, their digests and their keys stay in the cache."""

Bytes = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""What a checksum can be taken of."""


def checksum_bytes(buffer: Bytes, position: int = 0) -> int:
    """Return the checksum of a blob of which *buffer* is all that was moved.

    Args:
        buffer: contiguous bytes.
        position: where they start in the blob, in bytes; a multiple of 16.

    Returns:
        0..2**64 - 1.

    Raises:
        ValueError: *position* is not a multiple of 16.
    """
    return (SEED + checksum_share(buffer, position)) & _MASK


def checksum_share(buffer: Bytes, position: int) -> int:
    """Return what *buffer* adds to the checksum of its blob.

    Shares add up: the checksum is ``SEED`` plus the shares of all pieces, mod 2**64.

    Args:
        buffer: contiguous bytes; their number is a multiple of 16, unless they end the blob.
        position: where they start in the blob, in bytes; a multiple of 16.

    Raises:
        ValueError: *position* is not a multiple of 16.
    """
    if position < 0 or position % VECTOR_BYTES:
        raise ValueError(f"position must be a multiple of 16, not negative; got {position}")
    data = np.frombuffer(buffer, dtype=np.uint8)
    total = 0
    for start in range(0, data.size, _STRETCH * VECTOR_BYTES):
        digests = _digests(data[start : start + _STRETCH * VECTOR_BYTES])
        # one factor is the key of the first vector, the other that of the place in the stretch
        first_key = np.uint32(pow(KEY, (position + start) // VECTOR_BYTES, 1 << 32))
        keys = lane_keys(_STRETCH)[: digests.size] * first_key
        total += int(np.dot(digests.astype(np.uint64), keys.astype(np.uint64)))
    return total & _MASK


def _digests(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return the digest of every 16 bytes, the last ones padded with zeros: ``[vectors]`` uint32."""
    if data.size % VECTOR_BYTES:
        data = np.concatenate((data, np.zeros(-data.size % VECTOR_BYTES, np.uint8)))
    numbers = data.view(np.dtype("<u4")).reshape(-1, 4)
    digests = numbers[:, 3] * np.uint32(FOLD)
    for place in (2, 1):
        digests += numbers[:, place]
        digests *= np.uint32(FOLD)
    digests += numbers[:, 0]
    return digests


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
    """Return the key of the vector that each byte position lies in: ``[n]`` uint32 for ``[n]`` int64."""
    keys = [pow(KEY, position // VECTOR_BYTES, 1 << 32) for position in positions.tolist()]
    return np.array(keys, dtype=np.uint32)
