"""The disk tier as a benchmark uses it: blobs from and to the frames of an arena of their own, through the real thing."""

import mmap
from pathlib import Path

import numpy as np

from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.disk.admission import Policy
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.format import blob_tag
from kvferry.kvops.store.disk.jobs import Handle, Status
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.io_choice import open_io
from kvferry.kvops.store.store import Store

NAMESPACE = b"perf.bench_disk."
TIMEOUT_S = 300.0
MIB = 1 << 20


def key(number: int) -> bytes:
    """Return a key like vLLM's: a 32-byte block hash and a group id."""
    return number.to_bytes(8, "little") * 4 + bytes(4)


class Tier:
    """A tier with a store above it.

    Args:
        folder: for the blobs; made.
        size: of a blob, bytes.
        source: the blobs, one after the other.
        depth: requests in flight on the drive.
        sync: fsync policy.
    """

    def __init__(
        self, folder: Path, size: int, source: mmap.mmap, depth: int, sync: str = "batch"
    ) -> None:
        total = len(source)
        self.size = size
        self.keys = [key(number) for number in range(total // size)]
        self.tags = [blob_tag(NAMESPACE, name) for name in self.keys]
        self._blobs = [memoryview(source)[at : at + size] for at in range(0, total, size)]
        # half of an arena stays out of the tier's reach
        self.arena = Arena.open(None, 2 * total + total // 4 + 64 * MIB, session="bench_disk")
        self.store = Store.open(self.arena, namespace=NAMESPACE, verify="always")
        folder.mkdir(mode=0o700)
        self.io = open_io("auto", folder, depth=depth)
        quota = total + total // 2 + 64 * MIB
        self.files = BlobFiles.open(folder, self.io, quota_bytes=quota, sync=sync)
        policy = Policy(
            admission="all", max_inflight_bytes=2 * total, timeout_s=TIMEOUT_S, hold_s=0.0
        )
        self.tier = DiskTier(self.store, self.files, self.io, policy)

    def fill(self) -> None:
        """Have every blob in memory, and none on the disk."""
        self.tier.poll()
        self.store.put(self.keys, self._blobs)
        self.files.remove(self.tags)

    def save(self) -> None:
        """Save every blob."""
        _done(self.tier.save(self.keys, wait=True, timeout_s=TIMEOUT_S))

    def empty(self) -> None:
        """Have every blob on the disk, and none in memory, whose bytes are poisoned."""
        self.tier.poll()
        missing = [number for number, tag in enumerate(self.tags) if not self.files.contains(tag)]
        if missing:
            self.store.put(self.keys, self._blobs)
            _done(self.tier.save([self.keys[n] for n in missing], wait=True, timeout_s=TIMEOUT_S))
        frames = [frame for name in self.keys if (frame := self.store.frames.get(name))]
        self.tier.claimed(frames)
        memory = np.frombuffer(self.arena.buffer, np.uint8)
        for frame in frames:
            memory[frame.offset : frame.offset + self.size] = 0xA5
        self.store.delete(self.keys)

    def load(self) -> None:
        """Load every blob."""
        _done(self.tier.load(self.keys, wait=True, timeout_s=TIMEOUT_S))

    def loaded_matches(self) -> bool:
        """Whether every frame holds its blob."""
        for name, blob in zip(self.keys, self._blobs, strict=True):
            frame = self.store.frames.get(name)
            if frame is None or not frame.is_ready:
                return False
            if self.arena.buffer[frame.offset : frame.offset + self.size] != blob:
                return False
        return True

    def saved_matches(self) -> bool:
        """Whether what is on the disk comes back as it was."""
        self.empty()
        self.load()
        return self.loaded_matches()

    def close(self) -> None:
        """Let go of everything."""
        if not self.tier.close():
            raise OSError("the drive still holds memory of the arena")
        self.store.close()
        self.arena.close()


def _done(handle: Handle) -> None:
    others = {status for status in handle.statuses if status is not Status.DONE}
    if others:
        raise OSError(f"blobs were not moved: {others}")
