"""The owner's private record of one frame in use, and of one place where a frame can be."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .policy import Policy
    from .spans import SizeKey, Span


class Slot:
    """A place for a frame: its header, its bytes, and the span it lies in."""

    __slots__ = ("header", "offset", "span", "word")

    def __init__(self, header: int, offset: int, span: "Span") -> None:
        self.header = header
        self.offset = offset
        self.span = span
        self.word = header // 8


class SizeClass:
    """All frames of one size: where free ones are, and in which order the ready ones go."""

    __slots__ = ("free", "policy", "size", "spans", "victims_since_look")

    def __init__(self, size: "SizeKey", policy: "Policy") -> None:
        self.size = size
        self.policy = policy
        self.free: list[Slot] = []
        self.spans: list[Span] = []
        self.victims_since_look = 0


class Frame:
    """One frame from its reservation to its end. A frame that comes after it in the same place is another object.

    Attributes:
        key, namespace: its name.
        slot: where it is; header and offset (of the bytes) for short.
        blob_bytes: bytes of all parts.
        generation: of this life.
        word: index of the state word in ``arena.words``.
        ready: the value of that word while the frame is ready.
        tag: index tag.
        leases: loads that hold it now.
        reads: loads that were ever granted in this life.
        step: the frame is held until the end of this scheduler step.
        tick: when it was last used; compares only.
        is_writing: reserved, and neither committed nor aborted.
        is_orphan: its namespace was reset while workers had it in hand.
    """

    __slots__ = (
        "blob_bytes", "generation", "header", "is_orphan", "is_writing", "key", "leases", "namespace", "offset",
        "reads", "ready", "size_class", "slot", "step", "tag", "tick", "word",
    )  # fmt: skip

    def __init__(
        self, key: bytes, namespace: bytes, slot: Slot, size_class: SizeClass, blob_bytes: int,
        generation: int, tag: int,
    ) -> None:  # fmt: skip
        self.key = key
        self.namespace = namespace
        self.slot = slot
        self.size_class = size_class
        self.header = slot.header
        self.offset = slot.offset
        self.word = slot.word
        self.blob_bytes = blob_bytes
        self.generation = generation
        self.ready = generation << 8 | 2
        self.tag = tag
        self.leases = 0
        self.reads = 0
        self.step = -1
        self.tick = 0
        self.is_writing = True
        self.is_orphan = False

    def __repr__(self) -> str:
        return f"Frame({self.key.hex()[:12]}, generation {self.generation}, at {self.offset})"
