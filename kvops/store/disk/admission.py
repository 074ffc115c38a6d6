"""Which chunks are worth a write to the disk: those that came more than once, unless told otherwise.

Most prompts come once. An SSD wears with every byte, and what nobody asks for again only pushes out what somebody
would. So by default a chunk is written when it is stored a second time, or hit in memory: at its first reuse.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from kvferry.kvops.store.frame import Frame

from .format import blob_tag
from .places import Tag

BITS = 1 << 23
"""Size of one filter in bits: 1 MiB."""

CAPACITY = 1 << 20
"""Chunks that one filter takes before it becomes the older one; 2 % of strangers look known in a full one."""

HASHES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """How the tier decides.

    Attributes:
        write: "commit" saves chunks as they are stored, "pressure" when memory runs out and they would be evicted.
        admission: "reused" saves what came a second time, "all" everything.
        max_inflight_bytes: bytes asked for and not ended; beyond it saves are skipped and loads are told to come again.
        timeout_s: after which an answer is TIMEOUT.
        hold_s: how long a chunk that was loaded ahead is kept from being evicted for whoever waits for it.
    """

    write: str = "commit"
    admission: str = "reused"
    max_inflight_bytes: int = 256 << 20
    timeout_s: float = 5.0
    hold_s: float = 2.0


class Admission:
    """Says which chunks to save, and when.

    Attributes:
        refused: chunks that were stored and not worth a write.

    Threads: one.
    """

    def __init__(self, policy: Policy) -> None:
        self._takes_all = policy.admission == "all"
        self._at_once = policy.write == "commit"
        self._seen, self._reused = Doorkeeper(), Doorkeeper()
        self.refused = 0

    def stored(self, tags: Collection[Tag]) -> Sequence[Tag]:
        """Note chunks that were stored; return those to save now."""
        worthy = list(tags) if self._takes_all else [tag for tag in tags if self._seen.add(tag)]
        self.refused += len(tags) - len(worthy)
        return self._now(worthy)

    def used(self, tags: Collection[Tag]) -> Sequence[Tag]:
        """Note chunks that were hit; return those to save now, if they are not on the disk."""
        return self._now(list(tags))

    def _now(self, worthy: list[Tag]) -> Sequence[Tag]:
        if self._at_once:
            return worthy
        if not self._takes_all:
            for tag in worthy:
                self._reused.add(tag)
        return []

    def __contains__(self, tag: Tag) -> bool:
        """Return whether a chunk is worth a write when it would be evicted."""
        return self._takes_all or tag in self._reused


class Doorkeeper:
    """Remembers roughly the last one to two million tags it was shown: two Bloom filters, the older one dropped in turn.

    It may take a stranger for somebody it knows, never the reverse within its memory. 2 MiB. Threads: one.
    """

    def __init__(self) -> None:
        self._new = bytearray(BITS // 8)
        self._old = bytearray(BITS // 8)
        self._count = 0

    def __contains__(self, tag: Tag) -> bool:
        """Return whether *tag*, two 64-bit hashes, was shown before."""
        bits = _bits(tag)
        return any(
            all(seen[bit >> 3] >> (bit & 7) & 1 for bit in bits) for seen in (self._new, self._old)
        )

    def add(self, tag: Tag) -> bool:
        """Remember *tag*; return whether it was shown before."""
        known = tag in self
        new = self._new
        for bit in _bits(tag):
            new[bit >> 3] |= 1 << (bit & 7)
        self._count += not known
        if self._count >= CAPACITY:
            self._old, self._new, self._count = new, bytearray(BITS // 8), 0
        return known


def _bits(tag: Tag) -> list[int]:
    low, high = tag
    # two hashes make as many as are needed
    return [(low + n * (high | 1)) % BITS for n in range(HASHES)]


def by_tag(frames: Iterable[Frame]) -> dict[Tag, Frame]:
    """Return frames by what their blobs are known by on the disk."""
    return {blob_tag(frame.namespace, frame.key): frame for frame in frames}
