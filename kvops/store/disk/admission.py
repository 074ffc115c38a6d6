"""Which chunks are worth a write to the disk: those that came more than once, unless told otherwise.

Most prompts come once. An SSD wears with every byte, and what nobody asks for again only pushes out what somebody
would. So by default a chunk is written when it is stored a second time, or hit in memory: at its first reuse.
"""

import dataclasses

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


class Doorkeeper:
    """Remembers roughly the last one to two million tags it was shown: two Bloom filters, the older one dropped in turn.

    It may take a stranger for somebody it knows, never the reverse within its memory. 2 MiB. Threads: one.
    """

    def __init__(self) -> None:
        self._new = bytearray(BITS // 8)
        self._old = bytearray(BITS // 8)
        self._count = 0

    def knows(self, tag: tuple[int, int]) -> bool:
        """Return whether *tag*, two 64-bit hashes, was shown before, and remember it."""
        low, high = tag
        # two hashes make as many as are needed
        bits = [(low + n * (high | 1)) % BITS for n in range(HASHES)]
        new, old = self._new, self._old
        if all(new[bit >> 3] >> (bit & 7) & 1 for bit in bits):
            return True
        known = all(old[bit >> 3] >> (bit & 7) & 1 for bit in bits)
        for bit in bits:
            new[bit >> 3] |= 1 << (bit & 7)
        self._count += 1
        if self._count >= CAPACITY:
            self._old, self._new, self._count = new, bytearray(BITS // 8), 0
        return known
