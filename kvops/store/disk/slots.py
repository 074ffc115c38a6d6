"""Slots of all segments: what each holds, who holds it, and which one is given up next. No I/O, no quota.

    FREE --list---> SAVING --publish--> READY --unlist--> FREE, or DOOMED until the last reader has let go
      ^               |                   |
      +----abort------+                   +--quarantine--> QUARANTINED --release--> FREE

Within a size the victim is found by a second-chance clock: a blob that was loaded since the hand last came by stays for
one more turn. A segment's heat is the mean tick of its blobs' last uses. Neither ever gives what somebody holds.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from . import table as tbl
from .format import Superblock
from .table import State, Table


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSize:
    """What the slots of a segment have in common: bytes of a slot, and of its header area."""

    slot_bytes: int
    header_bytes: int


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """One segment file.

    Attributes:
        block: what its superblock says.
        fd: its descriptor, -1 while it is closed.
        free, ready, quarantined: how many of its slots are.
        held: saves and loads under way in it.
        next_free: 1 + the first slot of its chain of free ones, 0 for none.
        ticks: sum of the ticks at which its ready slots were used last.
        cost_bytes: what it takes from the quota.
        is_unsynced: whether blobs were written to it since it was synced.
    """

    block: Superblock
    fd: int = -1
    free: int = 0
    ready: int = 0
    quarantined: int = 0
    held: int = 0
    next_free: int = 0
    ticks: int = 0
    cost_bytes: int = 0
    is_unsynced: bool = False

    @property
    def number(self) -> int:
        """The one in its name."""
        return self.block.segment

    @property
    def heat(self) -> float:
        """Mean tick of its blobs; 0 without any."""
        return self.ticks / self.ready if self.ready else 0.0

    @property
    def size(self) -> SlotSize:
        """What its slots look like."""
        return SlotSize(self.block.slot_bytes, self.block.header_bytes)


@dataclasses.dataclass(slots=True, eq=False)
class SlotClass:
    """All segments of one slot size.

    Attributes:
        open_segments: those with a free slot; the last one is taken from.
        slots, quarantined: over all segments.
        victims: blobs given up since the other sizes were last looked at.
        wait: saves until growing is tried again, after the disk refused it.
        barren_at: value of :attr:`Slots.changes` when nothing could be given up.
    """

    size: SlotSize
    segments: list[Segment] = dataclasses.field(default_factory=list)
    open_segments: list[Segment] = dataclasses.field(default_factory=list)
    slots: int = 0
    quarantined: int = 0
    victims: int = 0
    wait: int = 0
    barren_at: int = -1
    hand: int = 0
    hand_slot: int = 0


class Slots:
    """State of every slot. Threads: the caller's lock.

    Attributes:
        changes: moves whenever something that was held may no longer be.
        blobs, blob_bytes: how many are ready, and their bytes.
        quarantined: slots that are.
        total: slots of all segments.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.segments: dict[int, Segment] = {}
        self.classes: dict[SlotSize, SlotClass] = {}
        self.tick = 1
        self.changes = 0
        self.blobs = 0
        self.blob_bytes = 0
        self.quarantined = 0
        self.total = 0

    def class_of(self, size: SlotSize) -> SlotClass:
        """Return the class of *size*, a new one if need be."""
        found = self.classes.get(size)
        if found is None:
            found = self.classes[size] = SlotClass(size)
        return found

    def of(self, entry: int) -> Segment:
        """Return the segment of *entry*."""
        return self.segments[entry >> tbl.SLOT_BITS]

    def facts(self, entry: int) -> tuple[int, int]:
        """Return (state, generation) of a slot."""
        rows, at = self.table.row(entry)
        return rows[at + tbl.FACTS] & 0xFF, rows[at + tbl.GENERATION]

    # --- segments --------------------------------------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Take a segment in whose rows are in the table and say what its slots hold; lists nothing."""
        columns = self.table.columns(segment.number)
        states = self.table.states(segment.number)
        free = np.flatnonzero(states == State.FREE)
        columns[free, tbl.TAG_LO] = np.append(free[1:] + 1, 0) if len(free) else 0
        ready = states == State.READY
        segment.free = len(free)
        segment.next_free = int(free[0]) + 1 if len(free) else 0
        segment.ready = int(ready.sum())
        segment.quarantined = int((states == State.QUARANTINED).sum())
        segment.ticks = int((columns[ready, tbl.USE] >> np.uint64(tbl.TICK_SHIFT)).sum())
        self.segments[segment.number] = segment
        slot_class = self.class_of(segment.size)
        slot_class.segments.append(segment)
        if segment.free:
            slot_class.open_segments.append(segment)
        slot_class.slots += segment.block.slots
        slot_class.quarantined += segment.quarantined
        self.total += segment.block.slots
        self.quarantined += segment.quarantined
        self.blobs += segment.ready
        self.blob_bytes += int(columns[ready, tbl.BLOB_BYTES].sum())
        self.changes += 1

    def drop(self, segment: Segment) -> int:
        """Forget a segment in which nothing is held; return how many blobs went with it."""
        lost = segment.ready
        for entry in self.entries_in(segment, State.READY):
            rows, at = self.table.row(entry)
            self.table.remove(entry)
            self.blob_bytes -= rows[at + tbl.BLOB_BYTES]
        slot_class = self.classes[segment.size]
        place = slot_class.segments.index(segment)
        del slot_class.segments[place]
        if place < slot_class.hand:
            slot_class.hand -= 1
        elif place == slot_class.hand:
            slot_class.hand_slot = 0
        if segment.free:
            slot_class.open_segments.remove(segment)
        slot_class.slots -= segment.block.slots
        slot_class.quarantined -= segment.quarantined
        self.total -= segment.block.slots
        self.quarantined -= segment.quarantined
        self.blobs -= lost
        del self.segments[segment.number]
        self.table.drop_segment(segment.number)
        self.changes += 1
        return lost

    def entries_in(self, segment: Segment, *states: State) -> list[int]:
        """Return the entries of a segment that are in one of *states*."""
        found = np.flatnonzero(np.isin(self.table.states(segment.number), states))
        return [tbl.entry_of(segment.number, slot) for slot in found.tolist()]

    # --- the life of a slot; what every blob goes through is in many.py ---------------------------------------------

    def abort(self, entry: int) -> None:
        """Free a slot whose save will not be."""
        self.table.remove(entry)
        self.of(entry).held -= 1
        self.free(entry)

    def hold(self, entry: int) -> None:
        """Keep a slot as it is until it is let go of; that does not count as a use."""
        rows, at = self.table.row(entry)
        rows[at + tbl.USE] += 1
        self.of(entry).held += 1

    def unlist(self, entry: int) -> None:
        """Make a ready blob unknown; its slot is free as soon as nobody holds it."""
        rows, at = self._leave_ready(entry)
        if rows[at + tbl.USE] & tbl.HOLDS_MASK:
            self._set_state(rows, at, State.DOOMED)
        else:
            self.free(entry)

    def quarantine(self, entry: int, reason: int) -> None:
        """Make a ready blob unknown and keep its slot out of use; *reason* is the number of it."""
        rows, at = self._leave_ready(entry)
        rows[at + tbl.FACTS] |= reason << 8
        self._set_state(rows, at, State.QUARANTINED)
        self.of(entry).quarantined += 1
        self.classes[self.of(entry).size].quarantined += 1
        self.quarantined += 1

    def release(self, entry: int) -> bool:
        """Free a slot in quarantine unless somebody holds it; return whether it was freed."""
        rows, at = self.table.row(entry)
        if rows[at + tbl.USE] & tbl.HOLDS_MASK:
            return False
        self.of(entry).quarantined -= 1
        self.classes[self.of(entry).size].quarantined -= 1
        self.quarantined -= 1
        self.free(entry)
        return True

    def _leave_ready(self, entry: int) -> tuple[memoryview, int]:
        rows, at = self.table.row(entry)
        segment = self.of(entry)
        self.table.remove(entry)
        segment.ready -= 1
        segment.ticks -= rows[at + tbl.USE] >> tbl.TICK_SHIFT
        self.blobs -= 1
        self.blob_bytes -= rows[at + tbl.BLOB_BYTES]
        return rows, at

    def free(self, entry: int) -> None:
        """Let a slot be taken that is not listed, and that nobody holds."""
        rows, at = self.table.row(entry)
        segment = self.of(entry)
        self._set_state(rows, at, State.FREE)
        rows[at + tbl.TAG_LO] = segment.next_free
        segment.next_free = (entry & tbl.SLOT_MASK) + 1
        segment.free += 1
        if segment.free == 1:
            self.classes[segment.size].open_segments.append(segment)
        self.changes += 1

    @staticmethod
    def _set_state(rows: memoryview, at: int, state: State) -> None:
        rows[at + tbl.FACTS] = rows[at + tbl.FACTS] & ~0xFF | state

    # --- what to give up -------------------------------------------------------------------------------------------

    def victim(self, slot_class: SlotClass) -> int:
        """Return the blob of a class to give up next, or -1 if all are held."""
        segments = slot_class.segments
        for _ in range(2 * len(segments) + 1):
            if slot_class.hand >= len(segments):
                slot_class.hand = slot_class.hand_slot = 0
                if not segments:
                    break
            segment = segments[slot_class.hand]
            if segment.ready:
                rows = self.table.rows[segment.number]
                for slot in range(slot_class.hand_slot, segment.block.slots):
                    at = slot * tbl.ROW_WORDS
                    use = rows[at + tbl.USE]
                    if rows[at + tbl.FACTS] & 0xFF != State.READY or use & tbl.HOLDS_MASK:
                        continue
                    if use & tbl.CHANCE:
                        rows[at + tbl.USE] = use & ~tbl.CHANCE
                        continue
                    slot_class.hand_slot = slot + 1
                    return tbl.entry_of(segment.number, slot)
            slot_class.hand += 1
            slot_class.hand_slot = 0
        return -1

    def last_use(self, entry: int) -> int:
        """Return the tick of a slot's last use."""
        rows, at = self.table.row(entry)
        return int(rows[at + tbl.USE] >> tbl.TICK_SHIFT)

    def coldest(self, asking: SlotClass | None) -> Iterator[Segment]:
        """Yield the segments of other classes in which nothing is held, the coldest first."""
        free = [
            segment
            for slot_class in self.classes.values()
            if slot_class is not asking
            for segment in slot_class.segments
            if not segment.held
        ]
        yield from sorted(free, key=lambda segment: segment.heat)
