"""Reads a whole blob and says what is wrong with it: for a look at a folder, not for loading."""

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.checksum import Algorithm, checksum
from kvferry.kvops.store.file_io import FileIo

from . import format as disk


def check_blob(
    io: FileIo,
    fd: int,
    offset: int,
    header_bytes: int,
    blob_bytes: int,
    generation: int,
    tag: tuple[int, int],
) -> str | None:
    """Return which of :data:`format.REASONS` the blob of a slot can't be used for, or None.

    Args:
        io: through which to read.
        fd: its segment.
        offset: of the slot in it.
        header_bytes: of the slot's header area.
        blob_bytes: as the journal says.
        generation: as the journal says.
        tag: as the journal says.
    """
    size = header_bytes + fmt.round_up(blob_bytes, disk.PAGE)
    try:
        data = memoryview(io.read_now(fd, size, offset))
    except OSError:
        return disk.UNREADABLE
    if len(data) < size:
        return disk.TRUNCATED
    header = disk.read_header_page(data[:header_bytes])
    if isinstance(header, str):
        return header
    if header.generation != generation:
        return disk.STALE
    if disk.blob_tag(header.namespace, header.key) != tag:
        return disk.FOREIGN
    if header.blob_bytes != blob_bytes:
        return disk.SHAPE
    for part in header.parts:
        start = header_bytes + part.offset
        if part.algorithm != Algorithm.XXH3_64 or part.checksum != checksum(
            data[start : start + part.num_bytes]
        ):
            return disk.CHECKSUM
    return None
