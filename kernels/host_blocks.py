"""Move the blocks of one transfer in host memory: pages of a CPU cache <-> anywhere, all groups.

What ``gather.py`` and ``scatter.py`` do on a device, with the same meaning. Entries whose places follow
each other go to the mover of their group together; holes and gaps end such a run.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from .host import HostMover
from .host_checksum import BlobSums
from .table import HOLE, Int64s


def move_blocks(
    movers: Sequence[HostMover],
    block_ids: Int64s,
    addresses: Int64s,
    counts: Sequence[int],
    sums: BlobSums | None = None,
    *,
    is_load: bool,
) -> None:
    """Gather, or scatter if *is_load*: block ``block_ids[i]`` <-> the bytes at ``addresses[i]``.

    Arguments are trusted.

    Args:
        movers: one per group.
        block_ids: ``[N]`` int64, groups one after the other; ``HOLE`` moves nothing.
        addresses: ``[N]`` int64, where each block's own bytes are.
        counts: entries of each group.
        sums: gets each block's bytes right after it has moved, while they are in a cache.
        is_load: whether the cache is written.

    Units:
        Moves ``2 * block_bytes`` bytes for each block that is not a hole.

    Source:
        Meaning ``kernels/reference.py::gather_blocks`` and ``scatter_blocks``.
    """
    start = 0
    for mover, count in zip(movers, counts, strict=True):
        end, block_bytes = start + count, mover.layout.block_bytes
        ids, places = block_ids[start:end], addresses[start:end]
        for first, last in runs(ids, places, block_bytes):
            if sums is None:
                mover.move(ids[first:last], 0, int(places[first]), is_load=is_load)
                continue
            for entry in range(first, last):
                address = int(places[entry])
                mover.move(ids[entry : entry + 1], 0, address, is_load=is_load)
                sums.add(start + entry, address, block_bytes)
        start = end


def runs(block_ids: Int64s, addresses: Int64s, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 of entries that lie side by side, holes left out."""
    if not block_ids.size:
        return
    is_hole = block_ids == HOLE
    ends_run = np.diff(addresses) != block_bytes
    if is_hole.any():
        ends_run |= is_hole[1:] | is_hole[:-1]
    first = 0
    for last in (*(np.flatnonzero(ends_run) + 1).tolist(), block_ids.size):
        if not is_hole[first]:
            yield first, last
        first = last
