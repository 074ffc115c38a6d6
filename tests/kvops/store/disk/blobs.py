"""Blobs for tests of the disk tier's files: known bytes, written and read the way the tier does it."""

import random

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.checksum import Algorithm, checksum
from kvferry.kvops.store.disk import format as disk
from kvferry.kvops.store.disk.files import Place

MIB = 1 << 20
NAMESPACE = b"a model, 16 byte"
QUOTA = 20 * MIB
SMALL = 3000


def key(number):
    return random.Random(number).randbytes(32) + bytes(4)


def tag(number, namespace=NAMESPACE):
    return disk.blob_tag(namespace, key(number))


def data(number, num_bytes=SMALL, parts=1):
    """Bytes that depend on the key alone: a save of the same blob writes the same."""
    return random.Random(f"{number} {parts}").randbytes(num_bytes)


def frame_header(number, blob, parts=1, namespace=NAMESPACE, state=fmt.PartState.READY):
    size = len(blob) // parts
    name = key(number)
    body = fmt.HEADER_BODY.pack(
        name.ljust(fmt.KEY_BYTES_MAX, b"\0"), namespace, 16, 0x5A000, len(blob), 1_700_000_000,
        fmt.HEADER_MAGIC, fmt.FORMAT_VERSION, len(name), parts,
    )  # fmt: skip
    table = b"".join(
        fmt.PART.pack(
            rank, state, Algorithm.XXH3_64, 0, rank * size, size,
            checksum(blob[rank * size : (rank + 1) * size]),
        )
        for rank in range(parts)
    )  # fmt: skip
    return (77 << 8 | fmt.State.READY).to_bytes(8, "little") + body + fmt.CHECK.pack(
        fmt.check_of(body)
    ) + table  # fmt: skip


def slot_bytes(number, generation, num_bytes=SMALL, parts=1):
    """All bytes of a slot: header area and blob, rounded up."""
    blob = data(number, num_bytes, parts)
    area = disk.header_area(parts)
    page = bytearray(b"\xa5" * area)
    disk.pack_header_page(
        page, 0, generation=generation, blob_bytes=len(blob),
        frame_header=frame_header(number, blob, parts),
    )  # fmt: skip
    return bytes(page) + blob.ljust(fmt.round_up(len(blob), fmt.PAGE), b"\xa5")


def write(io, place, number, num_bytes=SMALL, parts=1):
    io.write_now(place.fd, slot_bytes(number, place.generation, num_bytes, parts), place.offset)


def save(files, io, *numbers, num_bytes=SMALL, parts=1):
    """Save blobs and publish them at once."""
    places = []
    for number in numbers:
        place = files.begin_save(tag(number), num_bytes, parts)
        assert isinstance(place, Place), place
        write(io, place, number, num_bytes, parts)
        places.append((place, NAMESPACE))
    files.end_save(places)
    return [place for place, _ in places]


def note(files, *numbers, num_bytes=SMALL, parts=1):
    """Publish blobs without writing a byte of them, one by one: for what looks at the account alone."""
    for number in numbers:
        place = files.begin_save(tag(number), num_bytes, parts)
        assert isinstance(place, Place), place
        files.end_save([(place, NAMESPACE)])


def read(files, io, number):
    """Return the blob's bytes, "miss", or what is wrong with it; as the tier does, a bad one is reported."""
    place = files.begin_load(tag(number))
    if place is None:
        return "miss"
    reason = None
    area, size = place.header_bytes, place.blob_bytes
    slot = io.read_now(place.fd, area + fmt.round_up(size, fmt.PAGE), place.offset)
    header = disk.read_header_page(slot[:area])
    if isinstance(header, str):
        reason = header
    elif header.generation != place.generation:
        reason = disk.STALE
    elif (header.namespace, header.key) != (NAMESPACE, key(number)):
        reason = disk.FOREIGN
    else:
        blob = slot[area : area + size]
        for part in header.parts:
            if checksum(blob[part.offset :][: part.num_bytes]) != part.checksum:
                reason = disk.CHECKSUM
    files.end_load(place, bad=reason)
    return reason or blob


def disk_bytes(folder):
    """What all files in a folder take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
