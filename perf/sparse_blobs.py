"""Folders of the disk tier with many blobs that take no room: real journals and indexes over segments full of holes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from kvferry.kvops.store.disk.files import BlobFiles, Refusal
from kvferry.kvops.store.io_threads import ThreadIo

BLOB_BYTES = 4096
NAMESPACE = b"perf.sparse-blob"
BATCH = 256
QUOTA_BYTES = 1 << 40


class SparseIo(ThreadIo):
    """An engine whose files get no room before something is written, and nothing is."""

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Make a file that long."""
        os.ftruncate(fd, num_bytes)


def tag(number: int) -> tuple[int, int]:
    """Return the tag of blob *number*."""
    whole = xxhash.xxh3_128_intdigest(number.to_bytes(8, "little"))
    return whole & 0xFFFF_FFFF_FFFF_FFFF, whole >> 64


@contextmanager
def opened(folder: Path) -> Iterator[BlobFiles]:
    """Open a folder as its owner."""
    io = SparseIo(threads=1)
    try:
        with BlobFiles.open(folder, io, quota_bytes=QUOTA_BYTES, sync="never") as files:
            yield files
    finally:
        io.close(10.0)


def fill(folder: Path, count: int) -> None:
    """Make a folder with *count* blobs: all but their bytes."""
    with opened(folder) as files:
        for begin in range(0, count, BATCH):
            places = []
            for number in range(begin, min(begin + BATCH, count)):
                place = files.begin_save(tag(number), BLOB_BYTES, 1)
                assert not isinstance(place, Refusal)
                places.append((place, NAMESPACE))
            files.end_save(places)
