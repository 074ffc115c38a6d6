"""The index of a disk tier in memory: one row of 56 bytes for each slot of each segment, found by open addressing.

    row of a slot, 64-bit words
    0   tag_lo      of the blob; of a free slot: 1 + the next free slot of its segment, 0 for none
    1   tag_hi
    2   generation  of the last save into the slot, also after that blob is gone
    3   blob_bytes
    4   namespace   tag of it
    5   facts       Unix time << 32 | parts << 16 | reason << 8 | state
    6   use         tick of the last use << 24 | second chance << 16 | holds

    index, one word for each place
    0 empty, 1 deleted, else  1 << 63 | bits 40 to 62 of tag_lo, there | entry (40 bits)

An entry is segment << 16 | slot. Rows of a segment are one block, so that a segment comes and goes with its rows and
nothing is ever moved. Listed are the slots that are being saved, or ready.

Threads: one writer at a time; :meth:`Table.contains` and :meth:`Table.blob_bytes` may run beside it without a lock. It reads words, each of which a
writer changes at once, from blocks that are replaced and never resized: what it may see too early or too late is one
answer, which the writer's next look corrects. A deleted place stays deleted until the index is made anew beside the old
one, or is emptied where no search goes past it.
"""

import enum

import numpy as np
import numpy.typing as npt

ROW_WORDS = 7
ROW_BYTES = 8 * ROW_WORDS

TAG_LO, TAG_HI, GENERATION, BLOB_BYTES, NAMESPACE, FACTS, USE = range(ROW_WORDS)

SLOT_BITS = 16
SLOT_MASK = (1 << SLOT_BITS) - 1
HOLDS_MASK = 0xFFFF
CHANCE = 1 << 16
TICK_SHIFT = 24

MIN_PLACES = 1024
MAX_LOAD = 2 / 3
"""Share of places in use, deleted ones included, at which the index is made anew."""

_EMPTY = 0
_DELETED = 1
_MARK = 1 << 23
"""The highest bit of a place that is taken; above the entry are this and 23 bits of the tag."""

_ENTRY_BITS = 40
ENTRY_MASK = (1 << _ENTRY_BITS) - 1
_SEGMENT_MASK = ENTRY_MASK >> SLOT_BITS
_NO_ROWS = memoryview(b"").cast("Q")

Words = npt.NDArray[np.uint64]


class State(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    SAVING = 1
    READY = 2
    QUARANTINED = 3
    DOOMED = 4
    """Unlisted while somebody read it: free as soon as nobody does."""


_READY = int(State.READY)
"""A plain number is compared in half the time."""


def entry_of(segment: int, slot: int) -> int:
    """Return the number of a slot among all slots of all segments."""
    return segment << SLOT_BITS | slot


def facts_of(seconds: int, parts: int, reason: int, state: int) -> int:
    """Return the word of a row that holds these four."""
    return (seconds & 0xFFFF_FFFF) << 32 | parts << 16 | reason << 8 | state


class Table:
    """Rows, and the index over those that are listed.

    Attributes:
        rows: the words of each segment's rows.
        listed: how many slots are in the index.
    """

    def __init__(self) -> None:
        self.rows: dict[int, memoryview] = {}
        self.listed = 0
        self._deleted = 0
        self._index = _new_index(MIN_PLACES)

    # --- rows ------------------------------------------------------------------------------------------------------

    def add_segment(self, segment: int, slots: int) -> None:
        """Add the rows of a segment whose slots are all free."""
        self.rows[segment] = memoryview(bytearray(slots * ROW_BYTES)).cast("Q")

    def drop_segment(self, segment: int) -> None:
        """Forget the rows of a segment; none of them may be listed."""
        del self.rows[segment]

    def row(self, entry: int) -> tuple[memoryview, int]:
        """Return the words in which the row of *entry* is, and where it begins in them."""
        return self.rows[entry >> SLOT_BITS], (entry & SLOT_MASK) * ROW_WORDS

    def columns(self, segment: int) -> Words:
        """Return the rows of a segment as an array ``[slots, ROW_WORDS]`` over the same memory."""
        return np.frombuffer(self.rows[segment], dtype=np.uint64).reshape(-1, ROW_WORDS)

    def states(self, segment: int) -> Words:
        """Return the state of each slot of a segment."""
        return self.columns(segment)[:, FACTS] & np.uint64(0xFF)

    # --- index -----------------------------------------------------------------------------------------------------

    def contains(self, tag: tuple[int, int]) -> bool:
        """Return whether the blob of *tag* can be loaded. Takes no lock."""
        return self.blob_bytes(tag) > 0

    def blob_bytes(self, tag: tuple[int, int]) -> int:
        """Return the size of the blob of *tag*, 0 if none can be loaded. Takes no lock."""
        low, high = tag
        index = self._index
        mask = len(index) - 1
        wanted = low >> _ENTRY_BITS | _MARK
        place = low & mask
        while word := index[place]:
            if word >> _ENTRY_BITS == wanted:
                # its segment may have gone meanwhile, or have become a smaller one
                rows = self.rows.get(word >> SLOT_BITS & _SEGMENT_MASK, _NO_ROWS)
                at = (word & SLOT_MASK) * ROW_WORDS
                if at < len(rows) and rows[at] == low and rows[at + 1] == high:
                    # the facts last: they are cleared first
                    size = rows[at + BLOB_BYTES]
                    return size if rows[at + FACTS] & 0xFF == _READY else 0
            place = (place + 1) & mask
        return 0

    def find(self, tag: tuple[int, int]) -> int:
        """Return the entry that is listed under *tag*, or -1."""
        low, high = tag
        index = self._index
        mask = len(index) - 1
        wanted = low >> _ENTRY_BITS | _MARK
        place = low & mask
        while word := index[place]:
            if word >> _ENTRY_BITS == wanted:
                rows = self.rows[word >> SLOT_BITS & _SEGMENT_MASK]
                at = (word & SLOT_MASK) * ROW_WORDS
                if rows[at] == low and rows[at + 1] == high:
                    return word & ENTRY_MASK
            place = (place + 1) & mask
        return -1

    def insert(self, entry: int) -> None:
        """List *entry*, whose row is written, under its tag; the caller knows that this is not listed."""
        if self.listed + self._deleted + 1 > len(self._index) * MAX_LOAD:
            # it takes in whatever is being saved or ready, this one included
            self.rebuild()
            return
        rows, at = self.row(entry)
        low = rows[at]
        index = self._index
        mask = len(index) - 1
        place = low & mask
        while index[place] > _DELETED:
            place = (place + 1) & mask
        if index[place] == _DELETED:
            self._deleted -= 1
        index[place] = (low >> _ENTRY_BITS | _MARK) << _ENTRY_BITS | entry
        self.listed += 1

    def remove(self, entry: int) -> None:
        """Take *entry* off the list; its row must still hold the tag."""
        rows, at = self.row(entry)
        low = rows[at]
        index = self._index
        mask = len(index) - 1
        wanted = (low >> _ENTRY_BITS | _MARK) << _ENTRY_BITS | entry
        place = low & mask
        while index[place] != wanted:
            if index[place] == _EMPTY:
                raise KeyError(f"entry {entry} is not listed")
            place = (place + 1) & mask
        index[place] = _DELETED
        self.listed -= 1
        self._deleted += 1
        # a deleted place before an empty one separates nothing
        if index[(place + 1) & mask] == _EMPTY:
            while index[place] == _DELETED:
                index[place] = _EMPTY
                self._deleted -= 1
                place = (place - 1) & mask

    def rebuild(self) -> None:
        """Make the index anew from the rows: every slot that is being saved, or ready, is listed."""
        found = []
        for segment in self.rows:
            states = self.states(segment)
            listed = np.flatnonzero((states == State.SAVING) | (states == State.READY))
            found.append((segment, listed.astype(np.uint16)))
        count = sum(len(slots) for _, slots in found)
        places = MIN_PLACES
        # at most three quarters of what is allowed, so that it lasts for a while
        while count > places * MAX_LOAD * 0.75:
            places *= 2
        index = _new_index(places)
        # a segment at a time: what is needed meanwhile is not much
        for segment, slots in found:
            entries = slots.astype(np.uint64) | np.uint64(segment << SLOT_BITS)
            _fill(index, self.columns(segment)[slots, TAG_LO], entries)
        self._index = index
        self.listed = count
        self._deleted = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that rows and index take."""
        return self._index.nbytes + sum(rows.nbytes for rows in self.rows.values())


def _new_index(places: int) -> memoryview:
    return memoryview(bytearray(8 * places)).cast("Q")


def _fill(index: memoryview, low: Words, entries: Words) -> None:
    """Insert all *entries* at once: in each round those that meet a taken place move on by one."""
    table = np.frombuffer(index, dtype=np.uint64)
    mask = np.uint64(len(index) - 1)
    bits = np.uint64(_ENTRY_BITS)
    words = (low >> bits | np.uint64(_MARK)) << bits | entries
    places = low & mask
    while len(words):
        free = table[places] == _EMPTY
        table[places[free]] = words[free]
        # of several that wanted one place the last one has it
        lost = table[places] != words
        words, places = words[lost], (places[lost] + np.uint64(1)) & mask
