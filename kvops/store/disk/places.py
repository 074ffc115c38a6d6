"""What the account of a disk tier hands out: places to write to and to read from, refusals, lines of a list."""

import dataclasses
import enum

from . import format as disk
from . import table as tbl
from .slots import Slots


class Refusal(enum.Enum):
    """Why a blob is not to be saved."""

    EXISTS = "exists"
    PENDING = "pending"
    NO_ROOM = "no room"


@dataclasses.dataclass(slots=True)
class Place:
    """A slot that the caller holds.

    Attributes:
        entry: number of the slot among all. segment, slot: the same in two.
        fd: the file. offset: where the header area begins in it, in bytes; the blob begins *header_bytes* later.
        blob_bytes, parts: of the blob. generation: goes into the header page. tag: of the blob.
    """

    entry: int
    segment: int
    slot: int
    fd: int
    offset: int
    header_bytes: int
    blob_bytes: int
    generation: int
    tag: tuple[int, int]
    parts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What a slot held when it was listed.

    Attributes:
        place: nobody holds it, and its descriptor is -1.
        namespace: tag of the namespace. seconds: Unix time of the save.
        reason: "" for a blob that can be loaded, else why its slot is in quarantine.
    """

    tag: tuple[int, int]
    place: Place
    blob_bytes: int
    namespace: int
    seconds: int
    reason: str

    @property
    def is_ready(self) -> bool:
        """Whether it can be loaded."""
        return not self.reason


Tag = tuple[int, int]
"""What a blob is known by: two 64-bit hashes."""

Answer = Place | Refusal | OSError
"""To who wants to save."""


def place_of(slots: Slots, entry: int) -> Place:
    """Return the place of a slot as it is now."""
    segment = slots.of(entry)
    block = segment.block
    rows, at = slots.table.row(entry)
    slot = entry & tbl.SLOT_MASK
    tag = (rows[at + tbl.TAG_LO], rows[at + tbl.TAG_HI])
    parts = rows[at + tbl.FACTS] >> 16 & 0xFFFF
    offset = disk.SUPERBLOCK_BYTES + slot * block.slot_bytes
    return Place(
        entry, block.segment, slot, segment.fd, offset, block.header_bytes,
        rows[at + tbl.BLOB_BYTES], rows[at + tbl.GENERATION], tag, parts,
    )  # fmt: skip


def entry_of(slots: Slots, entry: int) -> Entry:
    """Return the line of a slot that is ready or in quarantine."""
    place = place_of(slots, entry)
    place.fd = -1
    rows, at = slots.table.row(entry)
    facts = rows[at + tbl.FACTS]
    is_bad = facts & 0xFF == tbl.State.QUARANTINED
    return Entry(
        tag=place.tag,
        place=place,
        blob_bytes=place.blob_bytes,
        namespace=rows[at + tbl.NAMESPACE],
        seconds=facts >> 32,
        reason=disk.reason_name(facts >> 8 & 0xFF) if is_bad else "",
    )
