"""The blobs in an arena file as they lie there, for those who want to damage them on purpose.

Nothing here takes a lock: the caller makes sure that no store or load is under way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.spans import read_spans

_CHECKSUM_OFFSET = fmt.HEADER_FIXED_BYTES + 24
_CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class Blob:
    """One readable blob of an arena file, of one part.

    Attributes:
        key: of the chunk; its last four bytes are the group.
        namespace: that it belongs to.
        header: offset of its frame header in the file.
        offset: of its bytes in the file.
        size: bytes.
    """

    key: bytes
    namespace: bytes
    header: int
    offset: int
    size: int

    @property
    def group(self) -> int:
        """KV cache group of the chunk."""
        return int.from_bytes(self.key[-fmt.GROUP_BYTES :], "big")


def ready_blobs(path: Path) -> list[Blob]:
    """Return the blobs of *path* that a lookup can find, in the order of their headers.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not an arena of this version.
    """
    with path.open("rb") as stream:
        fd = stream.fileno()
        head = os.pread(fd, fmt.SUPERBLOCK_BYTES, 0)
        magic, version, *_ = fmt.SUPERBLOCK.unpack_from(head, 0)
        if magic != fmt.MAGIC or version != fmt.FORMAT_VERSION:
            raise ValueError(f"{path} must be a kvferry arena of version {fmt.FORMAT_VERSION}")
        return sorted(_scan(fd, head), key=lambda blob: blob.header)


def _scan(fd: int, head: bytes) -> Iterator[Blob]:
    _, _, _, _, slab_bytes, slab_count, data, span_table, _ = fmt.SUPERBLOCK.unpack_from(head, 0)
    tables = memoryview(os.pread(fd, data, 0))
    for span in read_spans(tables, span_table, slab_bytes, slab_count, data):
        if span.size is None:
            continue
        size = span.size.header_bytes
        headers = os.pread(fd, span.frame_count * size, span.headers)
        for number in range(span.frame_count):
            word = int.from_bytes(headers[number * size : number * size + 8], "little")
            if word & 0xFF != fmt.State.READY:
                continue
            key, namespace, _, offset, blob_bytes, _, _, _, key_bytes, parts = (
                fmt.HEADER_BODY.unpack_from(headers, number * size + 8)
            )
            if parts == 1:
                header = span.headers + number * size
                yield Blob(key[:key_bytes], namespace, header, offset, blob_bytes)


def flip_byte(path: Path, blob: Blob, position: int) -> None:
    """Change one byte of *blob*, *position* bytes into it; its checksum stays as it is."""
    with _opened(path) as fd:
        (value,) = os.pread(fd, 1, blob.offset + position)
        os.pwrite(fd, bytes([value ^ 0xFF]), blob.offset + position)


def swap_blobs(path: Path, first: Blob, second: Blob) -> None:
    """Exchange the bytes of two blobs and their checksums: both stay valid, and are wrong.

    Raises:
        ValueError: they differ in size.
    """
    if first.size != second.size:
        raise ValueError(f"blobs must be of one size; got {first.size} and {second.size} bytes")
    with _opened(path) as fd:
        for offsets, size in (
            ((first.offset, second.offset), first.size),
            ((first.header + _CHECKSUM_OFFSET, second.header + _CHECKSUM_OFFSET), _CHECKSUM_BYTES),
        ):
            here, there = (os.pread(fd, size, offset) for offset in offsets)
            os.pwrite(fd, there, offsets[0])
            os.pwrite(fd, here, offsets[1])


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
