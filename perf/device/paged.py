"""What the timing sections move: blocks of a made-up paged cache, and their frames in registered host memory.

The cache is one allocation of random bytes, seen as ``[segments, blocks, segment_bytes]``: as an engine lays out its
layers one after the other. Truth is indexing: no kernel of ours is asked what the right bytes are.
"""

import dataclasses

import numpy as np
import torch
from perf.device.child import Context
from perf.device.machine import HostMemory

from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.table import LayoutTable, pack_entries

POISON = 0xA5
CACHE_BYTES, TINY_CACHE_BYTES = 2 << 30, 1 << 20
HOST_BYTES, TINY_HOST_BYTES = 512 << 20, 1 << 20
SEED = 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """How much is moved, in what pieces.

    Attributes:
        segment_bytes: bytes of a block that lie together.
        segments: of a block.
        blocks: that one job moves.
        model: whose sizes these are.
    """

    segment_bytes: int
    segments: int
    blocks: int
    model: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.segment_bytes * self.segments

    @property
    def num_bytes(self) -> int:
        """Bytes that a job moves."""
        return self.block_bytes * self.blocks

    def __str__(self) -> str:
        return f"{self.blocks} blocks x {self.segments} segments x {self.segment_bytes} B"


class Pool:
    """The device memory and the host memory of a section, made once and filled with random bytes."""

    def __init__(self, context: Context) -> None:
        machine = context.machine
        self.device_bytes = random_bytes(
            TINY_CACHE_BYTES if context.tiny else CACHE_BYTES, machine.device
        )
        self.host = machine.host_memory(TINY_HOST_BYTES if context.tiny else HOST_BYTES)
        self.host.bytes.copy_(self.device_bytes[: self.host.nbytes].flip(0))
        machine.synchronize()


def random_bytes(nbytes: int, device: torch.device, seed: int = SEED) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 of every bit pattern: zeros would hide what was not written, and move faster."""
    generator = torch.Generator(device=device).manual_seed(seed)
    words = torch.randint(
        -(1 << 31),
        1 << 31,
        (-(-nbytes // 4),),
        dtype=torch.int32,
        device=device,
        generator=generator,
    )
    return words.view(torch.uint8)[:nbytes]


class PagedJob:
    """One transfer of random blocks between a paged cache and frames.

    Attributes:
        shape: its sizes.
        cache: ``[segments, NB, segment_bytes]`` uint8 on the device.
        table: of the cache's one group.
        ids: ``[N]`` int64 on the host: which blocks, each once.
        frames: ``[N, block_bytes]`` uint8: where the blocks go, or come from, one after the other.
        entries: ``[N, 2]`` int64 on the device.
        counts: entries of each group.
    """

    def __init__(
        self, context: Context, shape: Shape, frames: torch.Tensor | None = None, offset: int = 0
    ) -> None:
        """Lay the job out in the pool.

        Args:
            context: whose pool.
            shape: its sizes.
            frames: ``[>= num_bytes]`` uint8 that the device reaches; default: the pool's host memory.
            offset: bytes of *frames* that are left alone at its start.
        """
        pool = context.once("pool", lambda: Pool(context))
        num_blocks = pool.device_bytes.numel() // shape.block_bytes
        if shape.blocks > num_blocks:
            raise ValueError(f"blocks must be at most {num_blocks}; got {shape.blocks}")
        self.shape = shape
        self.cache = pool.device_bytes[: num_blocks * shape.block_bytes].view(
            shape.segments, num_blocks, shape.segment_bytes
        )
        layout = BlockLayout.from_tensors(
            list(self.cache.unbind()), [shape.segment_bytes] * shape.segments, 1
        )
        self.table = LayoutTable.from_layouts([layout])
        self.ids = (
            np.random.default_rng(SEED).permutation(num_blocks)[: shape.blocks].astype(np.int64)
        )
        memory = pool.host.bytes if frames is None else frames
        self.frames = memory[offset : offset + shape.num_bytes].view(
            shape.blocks, shape.block_bytes
        )
        self.counts = [shape.blocks]
        addresses = (
            self.frames.data_ptr() + np.arange(shape.blocks, dtype=np.int64) * shape.block_bytes
        )
        everything = np.zeros(shape.blocks, np.int64)
        packed = pack_entries(
            self.table, self.ids, addresses, self.counts, np.arange(shape.blocks), everything
        )
        self.entries = torch.from_numpy(packed).to(context.machine.device)
        self._ids = torch.from_numpy(self.ids).to(context.machine.device)

    def blocks(self) -> torch.Tensor:
        """Return the job's blocks as they are in the cache now, ``[N, block_bytes]`` on the device."""
        return self.cache[:, self._ids].transpose(0, 1).reshape(self.frames.shape)

    def poison_frames(self) -> None:
        """Overwrite the frames."""
        self.frames.fill_(POISON)

    def poison_blocks(self) -> None:
        """Overwrite the job's blocks in the cache."""
        self.cache[:, self._ids] = POISON

    def segments_of(self, to_host: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return destinations, sources and sizes of the job's segments, ``[N * segments]`` uint64 each."""
        shape = self.shape
        num_blocks = self.cache.shape[1]
        segment = np.arange(shape.segments, dtype=np.int64)
        device = (
            self.cache.data_ptr()
            + (segment[None, :] * num_blocks + self.ids[:, None]) * shape.segment_bytes
        ).reshape(-1)
        host = self.frames.data_ptr() + np.arange(device.size, dtype=np.int64) * shape.segment_bytes
        sizes = np.full(device.size, shape.segment_bytes, np.uint64)
        pair = (host, device) if to_host else (device, host)
        return pair[0].astype(np.uint64), pair[1].astype(np.uint64), sizes

    def same(self) -> bool:
        """Return whether blocks and frames hold the same bytes."""
        return bool(torch.equal(self.frames.to(self._ids.device), self.blocks()))

    def moved(self, to_host: bool) -> "Moved":
        """Return what checks a move in one direction."""
        return Moved(self, to_host)


class Moved:
    """Poisons what a move will write, and afterwards says whether it wrote the right bytes."""

    def __init__(self, job: PagedJob, to_host: bool) -> None:
        self._job, self._to_host = job, to_host
        (job.poison_frames if to_host else job.poison_blocks)()

    def right(self) -> bool:
        """Return whether the destination holds the source's bytes, and not poison."""
        source = self._job.blocks() if self._to_host else self._job.frames
        # bytes of the pool are random: a source that is all poison was overwritten itself
        return self._job.same() and not bool((source == POISON).all())


def host_of(context: Context) -> HostMemory:
    """Return the section's registered host memory."""
    return context.once("pool", lambda: Pool(context)).host
