"""Host memory by address, and entries whose places follow each other at equal distances."""

import ctypes
from collections.abc import Iterator

import numpy as np

from .table import HOLE, Int64s


def host_memory(address: int, nbytes: int) -> "memoryview[int]":
    """View host memory; nothing keeps it alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))


def even_runs(block_ids: Int64s, addresses: Int64s, most: int) -> Iterator[tuple[Int64s, int, int]]:
    """Split entries into runs at equal distances, holes left out.

    Args:
        block_ids: ``[N]`` int64.
        addresses: ``[N]`` int64, where each entry's bytes are.
        most: entries of a run, at most.

    Yields:
        The blocks of a run, the address of the first, and the distance of two, which is positive.
    """
    if (block_ids == HOLE).any():
        kept = block_ids != HOLE
        block_ids, addresses = block_ids[kept], addresses[kept]
    steps = np.diff(addresses).tolist()
    first, size = 0, block_ids.size
    while first < size:
        last, step = first + 1, 1
        if first < size - 1 and steps[first] > 0:
            step = steps[first]
            while last < size and last - first < most and steps[last - 1] == step:
                last += 1
        yield block_ids[first:last], int(addresses[first]), step
        first = last
