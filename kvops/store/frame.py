"""The owner's private record of one frame in use, and of one place where a frame can be."""

from typing import TYPE_CHECKING

from . import format as fmt

if TYPE_CHECKING:
    from .policy import Policy
    from .spans import SizeKey, Span


class Slot:
    """A place for a frame: its header, its bytes, and the span and size class it lies in.

    Attributes:
        word: index of the state word in ``arena.words``.
        place: the upper bits of the index entry that points here.
    """

    __slots__ = ("header", "offset", "place", "size_class", "span", "word")

    def __init__(self, header: int, offset: int, span: "Span", size_class: "SizeClass") -> None:
        self.header = header
        self.offset = offset
        self.span = span
        self.size_class = size_class
        self.word = header // 8
        self.place = header // 64 << fmt.PLACE_GENERATION_BITS


class SizeClass:
    """All frames of one size: where free ones are, and in which order the ready ones go."""

    __slots__ = ("barren_at", "free", "policy", "size", "spans", "victims_since_look")

    def __init__(self, size: "SizeKey", policy: "Policy") -> None:
        self.size = size
        self.policy = policy
        self.free: list[Slot] = []
        self.spans: list[Span] = []
        self.victims_since_look = 0
        # value of Space.changes at which nothing could be given up
        self.barren_at = -1


class Frame:
    """One frame from its reservation to its end. A frame that comes after it in the same place is another object.

    Attributes:
        key, namespace: its name.
        slot: where it is. header, offset: of its header and of its bytes in the arena.
        blob_bytes: bytes of all parts.
        generation: of this life.
        word: index of the state word in ``arena.words``. ready: value of that word while the frame is ready.
        tag: index tag.
        leases: loads that hold it now. reads: loads that were ever granted in this life.
        step: the frame is held until the end of this scheduler step.
        tick: when it was last used; compares only.
        entries: how often it stands in its policy's queue.
        is_ready: may be read. is_writing: reserved, and neither committed nor aborted. Neither: found corrupt, or gone.
    """

    __slots__ = (
        "blob_bytes", "entries", "is_ready", "is_writing", "key", "leases", "namespace", "reads", "ready", "slot", "step",
        "tag", "tick", "word",
    )  # fmt: skip

    def __init__(
        self, key: bytes, namespace: bytes, slot: Slot, blob_bytes: int, ready: int, tag: int, tick: int,
        is_ready: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self.namespace = namespace
        self.slot = slot
        self.word = slot.word
        self.blob_bytes = blob_bytes
        self.ready = ready
        self.tag = tag
        self.tick = tick
        self.is_ready = is_ready
        self.is_writing = not is_ready
        self.entries = 0
        self.leases = 0
        self.reads = 0
        self.step = -1

    @property
    def generation(self) -> int:
        """Number of this life of its place."""
        return self.ready >> 8

    @property
    def header(self) -> int:
        """Offset of its header in the arena."""
        return self.slot.header

    @property
    def offset(self) -> int:
        """Offset of its bytes in the arena."""
        return self.slot.offset

    @property
    def place(self) -> int:
        """The index entry that points to it."""
        return self.slot.place | (self.generation & fmt.PLACE_GENERATION_MASK)

    def __repr__(self) -> str:
        return f"Frame({self.key.hex()[:12]}, generation {self.generation}, at {self.offset})"
