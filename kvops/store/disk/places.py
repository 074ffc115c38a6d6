"""What the account of a disk tier hands out: places to write to and to read from, refusals, lines of a list."""

import dataclasses
import enum


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
