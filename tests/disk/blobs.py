"""Real folders of the disk tier, made blob by blob, and the ways to damage them."""

import os
import struct

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.checksum import Algorithm, checksum
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.format import blob_tag, pack_header_page
from kvferry.kvops.store.io_threads import ThreadIo

QUOTA = 64 << 20
NAMESPACE = b"namespace of one"
OTHER = b"another's number"


def key(number):
    return number.to_bytes(8, "little") * 4 + bytes(4)


def content(number, size):
    return (struct.pack("<Q", number * 0x9E3779B97F4A7C15 % 2**64) * (size // 8 + 1))[:size]


def frame_header(name, namespace, data):
    body = fmt.HEADER_BODY.pack(
        name, namespace, 16, 0, len(data), 0, fmt.HEADER_MAGIC, fmt.FORMAT_VERSION, len(name), 1
    )
    part = fmt.PART.pack(0, fmt.PartState.READY, Algorithm.XXH3_64, 0, 0, len(data), checksum(data))
    header = bytes(8) + body + fmt.CHECK.pack(fmt.check_of(body)) + part
    return header.ljust(fmt.header_bytes(1), b"\0")


class Owner:
    """A process that owns a folder: this one."""

    def __init__(self, folder):
        self.folder = folder
        self.io = ThreadIo(threads=1)
        self.files = BlobFiles.open(folder, self.io, quota_bytes=QUOTA, sync="never")

    def save(self, numbers, *, size=10_000, namespace=NAMESPACE):
        """Save blobs for real; return their places."""
        places = []
        for number in numbers:
            data = content(number, size)
            tag = blob_tag(namespace, key(number))
            place = self.files.begin_save(tag, size, 1)
            page = bytearray(place.header_bytes)
            pack_header_page(
                page, 0, generation=place.generation, blob_bytes=size,
                frame_header=frame_header(key(number), namespace, data),
            )  # fmt: skip
            padded = data.ljust(fmt.round_up(size, fmt.PAGE), b"\0")
            self.io.write_now(place.fd, bytes(page) + padded, place.offset)
            self.files.end_save([(place, namespace)])
            places.append(place)
        return places

    def remove(self, numbers, namespace=NAMESPACE):
        return self.files.remove([blob_tag(namespace, key(number)) for number in numbers])

    def close(self):
        self.files.close()
        assert self.io.close(10.0)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def made(folder, numbers=range(10), **kwargs):
    """Make a folder that rests; return the places of its blobs."""
    with Owner(folder) as owner:
        return owner.save(numbers, **kwargs)


def segment(folder, place):
    return folder / f"seg-{place.segment:08x}.blobs"


def flip(path, offset):
    """Change one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 4]))


def cut(path, num_bytes):
    os.truncate(path, path.stat().st_size - num_bytes)


def everything(folder):
    """Names and bytes of all files; to see that nothing was changed."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
