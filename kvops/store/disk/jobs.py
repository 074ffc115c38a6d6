"""What is asked of the disk tier, and what became of it."""

import dataclasses
import enum
from collections.abc import Sequence

from kvferry.kvops.store.file_io import Direction
from kvferry.kvops.store.frame import Frame

from .places import Place, Refusal


class Status(enum.Enum):
    """What became of one chunk."""

    WAITING = "waiting"
    """Not decided yet."""
    DONE = "done"
    """Saved, or loaded and readable."""
    EXISTS = "exists"
    """It was there already: on the disk for a save, in memory for a load. Nothing was moved."""
    PENDING = "pending"
    """Another job is moving it."""
    MISSING = "missing"
    """It is not where it should be moved from."""
    NO_ROOM = "no_room"
    """No room could be made where it should go."""
    BUSY = "busy"
    """The bound on bytes in flight is reached; ask again later."""
    OFF = "off"
    """The disk failed or was full, and is left alone for a while."""
    ERROR = "error"
    """The drive, or the operating system, said no."""
    TIMEOUT = "timeout"
    """It took too long. Its memory is held until the drive has let go of it."""
    CORRUPT = "corrupt"
    """The bytes on the disk are not what was saved; the copy is out of use."""


REFUSALS = {
    Refusal.EXISTS: Status.EXISTS, Refusal.PENDING: Status.PENDING, Refusal.NO_ROOM: Status.NO_ROOM,
}  # fmt: skip
"""How a save ends that found no place."""


class Handle:
    """One call's chunks, in request order.

    Attributes:
        keys: as they were passed.
        statuses: one for each key, at the same place, whatever was left out.

    Threads: made and read by the store's thread, which also fills in the answers.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = list(keys)
        self.statuses = [Status.WAITING] * len(self.keys)
        self._waiting = len(self.keys)

    @property
    def is_done(self) -> bool:
        """Whether every chunk has its answer."""
        return self._waiting == 0

    def answer(self, at: int, status: Status) -> None:
        """Fill in one answer; the first one stands."""
        if self.statuses[at] is Status.WAITING:
            self.statuses[at] = status
            self._waiting -= 1

    def __repr__(self) -> str:
        return f"Handle({len(self.keys)} chunks, {self._waiting} waiting)"


@dataclasses.dataclass(slots=True, eq=False)
class Move:
    """One chunk on its way.

    Attributes:
        direction: READ from the disk into the frame, WRITE from the frame to the disk.
        frame: pinned (WRITE) or reserved (READ) by the tier until the driver has returned the move.
        tag: what the blob is known by on the disk.
        handle, at: where the answer goes.
        asked_s: when it was asked for, monotonic.
        deadline_s: when the answer is TIMEOUT if there is none, by the tier's clock.
        status: what became of it; the driver writes it, before it returns the move.
        why: for the log and the breaker, if it failed.
        place: where on the disk; the driver holds it while it needs it.
        page: number of the driver's header page that it uses; -1: none.
        tries: how often it was tried again.
        is_second: a read of this blob failed before.
        is_late: the deadline has passed, and the answer been given.
    """

    direction: Direction
    frame: Frame
    tag: tuple[int, int]
    handle: Handle
    at: int
    asked_s: float
    deadline_s: float
    status: Status = Status.WAITING
    why: str = ""
    place: Place | None = None
    page: int = -1
    tries: int = 0
    is_second: bool = False
    is_late: bool = False


def place_of(move: Move) -> Place:
    """Return where on the disk a move is that has begun."""
    assert move.place is not None, "the move has begun"
    return move.place
