"""Checksums of blobs in host memory, made right after a block has moved, and of blobs anywhere.

The definition, and the vectorised sum over bytes, are ``checksum.py``'s.
"""

import numpy as np
import torch

from .checksum import FOLD, KEY, SEED, VECTOR_BYTES, checksum_bytes, checksum_share
from .host_runs import host_memory
from .table import HOLE, Int64s

_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1


class BlobSums:
    """The checksums of the blobs of one transfer, as its blocks move.

    Attributes:
        sums: blob id -> checksum of what has moved of it, signed.
    """

    def __init__(self, block_ids: Int64s, blob_ids: Int64s, places: Int64s) -> None:
        """Begin with the blobs of which a block moves: a blob of holes alone has no checksum."""
        self._entries = blob_ids.tolist(), places.tolist()
        moved = np.unique(blob_ids[block_ids != HOLE])
        self._sums = dict.fromkeys(moved.tolist(), SEED)

    def add(self, entry: int, address: int, block_bytes: int) -> None:
        """Add the bytes of an entry's block, at *address* in its blob."""
        blobs, places = self._entries
        # read where it lies: a view of host memory that nothing keeps alive
        memory = host_memory(address, block_bytes)
        share = checksum_share(memory, places[entry] * block_bytes)
        self._sums[blobs[entry]] = (self._sums[blobs[entry]] + share) & _MASK

    def result(self) -> tuple[Int64s, Int64s]:
        """Return the blobs of which a block moved and their checksums, ``[blobs]`` int64 each."""
        sums = np.array(list(self._sums.values()), np.uint64).view(np.int64)
        return np.array(list(self._sums), np.int64), sums


def checksum_spans(blobs: torch.Tensor, offsets: Int64s, sizes: Int64s) -> torch.Tensor:
    """Return the checksum of each ``blobs[offset : offset + size]``, ``[N]`` int64 on its device.

    Arguments are trusted. On a device nothing is waited for: the sums are made by torch.
    """
    pairs = list(zip(offsets.tolist(), sizes.tolist(), strict=True))
    if blobs.device.type == "cpu":
        data = blobs.numpy()
        sums = [checksum_bytes(data[start : start + size]) for start, size in pairs]
        return torch.from_numpy(np.array(sums, np.uint64).view(np.int64))
    spans = [checksum_tensor(blobs[start : start + size]) for start, size in pairs]
    return torch.stack(spans) if spans else torch.empty(0, dtype=torch.int64, device=blobs.device)


def checksum_tensor(data: torch.Tensor) -> torch.Tensor:
    """Return the checksum of uint8 ``[bytes]`` on any device, as an int64 scalar there.

    Integers of 64 bits wrap around, which is the sum's modulus.
    """
    padding = -data.numel() % VECTOR_BYTES
    whole = torch.nn.functional.pad(data, (0, padding)) if padding else data.clone()
    numbers = (whole.view(torch.int32).long() & _LOW).view(-1, 4)
    digests = numbers[:, 3]
    for place in (2, 1, 0):
        digests = (digests * FOLD + numbers[:, place]) & _LOW
    return (_keys(digests.numel(), data.device) * digests).sum() + _signed(SEED)


def _keys(count: int, device: torch.device) -> torch.Tensor:
    """Return the keys of vectors ``0..count - 1``, ``[count]`` int64, made on *device*: nothing is sent."""
    keys = torch.ones(1, dtype=torch.int64, device=device)
    while keys.numel() < count:
        keys = torch.cat((keys, keys * pow(KEY, keys.numel(), 1 << 32) & _LOW))
    return keys[:count]


def _signed(word: int) -> int:
    """Return the 64-bit *word* as torch has it."""
    return word - (1 << 64) if word >> 63 else word
