"""A cache twice and frames twice, on the device and on the CPU: a kernel moves one, its twin the other, then both are compared.

Compared is all memory, guard bytes included: what a move must leave alone is poison, or what it was.
"""

import dataclasses

import numpy as np
import torch
from perf.device.caches import Builder
from perf.device.child import Context
from perf.device.paged import POISON

from kvferry.kernels.table import HOLE, LayoutTable, pack_entries

FRAME_BYTES, TINY_FRAME_BYTES = 64 << 20, 1 << 20
FRAME_GUARD_BYTES = 64
BLOCKS_PER_BLOB = 2


@dataclasses.dataclass
class Frames:
    """Poisoned bytes to move to, or random bytes to move from, here and there.

    Attributes:
        device: ``[nbytes]`` uint8 that the device reaches.
        cpu: ``[nbytes]`` uint8 for the twin, with the same bytes.
    """

    device: torch.Tensor
    cpu: torch.Tensor

    def same(self) -> bool:
        """Return whether both hold the same bytes."""
        return bool(torch.equal(self.device.cpu(), self.cpu))

    def rows(self, count: int, nbytes: int, start: int = FRAME_GUARD_BYTES) -> "Frames":
        """Return ``[count, nbytes]`` of both, guard bytes left in front."""
        end = start + count * nbytes
        return Frames(
            self.device[start:end].view(count, nbytes), self.cpu[start:end].view(count, nbytes)
        )


def frames(context: Context, where: str, nbytes: int, random: bool) -> Frames:
    """Return frames in ``"device"`` memory, or in registered ``"host"`` memory, guard bytes on both sides included."""
    whole = nbytes + 2 * FRAME_GUARD_BYTES
    if random:
        cpu = torch.randint(
            0, 256, (whole,), dtype=torch.uint8, generator=torch.Generator().manual_seed(11)
        )
    else:
        cpu = torch.full((whole,), POISON, dtype=torch.uint8)
    if where == "device":
        return Frames(cpu.to(context.machine.device, copy=True), cpu)
    limit = TINY_FRAME_BYTES if context.tiny else FRAME_BYTES
    memory = context.once("frames", lambda: context.machine.host_memory(limit))
    # whatever used these bytes last is done with them
    context.machine.synchronize()
    device = memory.bytes[:whole]
    device.copy_(cpu)
    return Frames(device, cpu)


class Pair:
    """One cache on the device, and the same bytes on the CPU.

    Attributes:
        device: the one that kernels move.
        cpu: the one that twins move.
        device_table: of the first.
        cpu_table: of the second.
    """

    def __init__(self, context: Context, build: Builder) -> None:
        self.device = build(context.machine.device)
        self.cpu = build(torch.device("cpu"))
        self.device_table = LayoutTable.from_layouts(self.device.layouts)
        self.cpu_table = LayoutTable.from_layouts(self.cpu.layouts)

    def same(self) -> bool:
        """Return whether both hold the same bytes, guards and untouched blocks included."""
        pairs = zip(self.device.storages, self.cpu.storages, strict=True)
        return all(torch.equal(mine.cpu(), theirs) for mine, theirs in pairs)


class Transfer:
    """Blocks of every group of a pair, and a frame for each: holes among them, the first and the last block.

    Attributes:
        ids: ``[N]`` int64, groups one after the other.
        blobs: ``[N]`` int64, the blob of each entry.
        places: ``[N]`` int64, the place in its blob.
        counts: entries of each group.
        nbytes: of all frames.
        offsets: ``[N]`` int64, where each block's bytes begin in the frames, guard included.
    """

    def __init__(self, pair: Pair, repeats: bool) -> None:
        """Choose blocks; *repeats*: some of them twice, as only a gather may."""
        ids, blobs, places, offsets = [], [], [], []
        self.counts = []
        self.nbytes = 0
        first_blob = 0
        groups = len(pair.cpu.layouts)
        for group, layout in enumerate(pair.cpu.layouts):
            # groups may share their bytes: no block is given to two of them
            shuffled = np.random.default_rng(3).permutation(layout.num_blocks)
            chosen = shuffled[shuffled % groups == group][:6]
            chosen = np.concatenate((chosen[:2], [HOLE], chosen[2:]))
            if repeats:
                chosen = np.concatenate((chosen, chosen[:1], [0, layout.num_blocks - 1]))
            number = np.arange(chosen.size)
            ids.append(chosen)
            blobs.append(first_blob + number // BLOCKS_PER_BLOB)
            places.append(number % BLOCKS_PER_BLOB)
            offsets.append(FRAME_GUARD_BYTES + self.nbytes + number * layout.block_bytes)
            self.counts.append(chosen.size)
            # frames of the next group begin on a cache line
            self.nbytes += -(-chosen.size * layout.block_bytes // 64) * 64
            first_blob += -(-chosen.size // BLOCKS_PER_BLOB)
        self.ids, self.blobs, self.places, self.offsets = (
            np.concatenate(parts).astype(np.int64) for parts in (ids, blobs, places, offsets)
        )
        self.num_blobs = first_blob

    def entries(self, table: LayoutTable, memory: torch.Tensor) -> torch.Tensor:
        """Return the entries of this transfer between *table*'s cache and *memory*."""
        addresses = memory.data_ptr() + self.offsets
        packed = pack_entries(table, self.ids, addresses, self.counts, self.blobs, self.places)
        return torch.from_numpy(packed).to(table.device)
