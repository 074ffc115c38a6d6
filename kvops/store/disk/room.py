"""What is done when a blob has no slot: grow, take back, give up, hand over; in this order.

Within a slot size one blob goes, as the clock says. Across sizes a whole segment changes hands when its blobs were on
average last used before the one that the needy size would otherwise give up, or when that has nothing to give.
"""

import logging
import math
from pathlib import Path

from kvferry.kvops.store.file_io import FileIo

from . import folder as folders
from .book import Book
from .replay import remove_record
from .segments import Segments
from .slots import SlotClass, Slots
from .table import State

logger = logging.getLogger(__name__)

LOOK_EVERY = 64
"""Victims of one size between two looks at the segments of other sizes."""

WAIT_SAVES = 64
"""Saves that make do with what there is after the disk refused a new segment."""

QUARANTINE_SHARE = 8
"""When one of so many slots of a size is in quarantine and no other is free, they are taken back into use."""


class Room:
    """Room for blobs in one folder. Threads: the caller's lock."""

    def __init__(
        self, io: FileIo, folder: Path, slots: Slots, segments: Segments, book: Book
    ) -> None:
        self._io = io
        self._folder = folder
        self._slots = slots
        self._segments = segments
        self._book = book

    def make(self, slot_class: SlotClass) -> bool:
        """Do one thing that may give a class a free slot; return whether there is hope.

        Raises:
            OSError: the disk refused; what there was is still there, or was given up properly.
        """
        if slot_class.wait and any(segment.ready for segment in slot_class.segments):
            slot_class.wait -= 1
        elif self._grow(slot_class):
            return True
        if slot_class.barren_at == self._slots.changes:
            # looked through in vain, and nothing was let go of since
            return False
        if slot_class.quarantined * QUARANTINE_SHARE > slot_class.slots and (
            self._needs_quarantined(slot_class)
        ):
            return True
        own = self._slots.victim(slot_class)
        slot_class.victims += 1
        if own < 0 or slot_class.victims >= LOOK_EVERY:
            slot_class.victims = 0
            limit = self._slots.last_use(own) if own >= 0 else math.inf
            if self._segments.take_over(slot_class, limit):
                # the records of what was given up are dead, and the quota may need their room
                self._book.rewrite_if_wasteful()
                if self._grow(slot_class):
                    return True
        if own >= 0:
            self._book.owe_removal(own)
            self._slots.unlist(own)
            self._segments.evicted += 1
            return True
        if self._needs_quarantined(slot_class) or delete_oldest(self._io, self._folder):
            self._segments.other_bytes = folders.quarantined_bytes(self._folder)
            return True
        slot_class.barren_at = self._slots.changes
        return False

    def _grow(self, slot_class: SlotClass) -> bool:
        try:
            return self._segments.grow(slot_class, self._book.next_generation)
        except OSError:
            slot_class.wait = WAIT_SAVES
            raise

    def _needs_quarantined(self, slot_class: SlotClass) -> bool:
        released = self.release_quarantined(slot_class)
        if released:
            logger.warning(
                "disk tier: the quota needs %d slots of %d bytes that were in quarantine",
                released, slot_class.size.slot_bytes,
            )  # fmt: skip
        return released > 0

    def release_quarantined(self, slot_class: SlotClass) -> int:
        """Take the slots of a class that are in quarantine, and not held, back into use; return how many."""
        released = 0
        for segment in [s for s in slot_class.segments if s.quarantined]:
            for entry in self._slots.entries_in(segment, State.QUARANTINED):
                # of a free slot nothing could be said any more
                record = remove_record(self._slots.table, entry)
                if self._slots.release(entry):
                    self._book.owe(entry, record)
                    released += 1
        return released


def shrink(io: FileIo, folder: Path, slots: Slots, segments: Segments) -> None:
    """Give up segments, the coldest first, and then files in quarantine, until a smaller quota is kept.

    Raises:
        OSError: one of them could not be deleted.
    """
    while segments.room_bytes < 0:
        coldest = next(slots.coldest(None), None)
        if coldest is not None:
            logger.info("disk tier: segment %08x goes: the quota is smaller than it was", coldest.number)  # fmt: skip
            segments.drop(coldest)
        elif not delete_oldest(io, folder):
            return
        segments.other_bytes = folders.quarantined_bytes(folder)


def delete_oldest(io: FileIo, folder: Path) -> bool:
    """Delete the file that has been in quarantine longest; return whether there was one."""
    for path, _ in folders.quarantined_files(folder)[:1]:
        folders.delete_quarantined(io, path, "the quota needs its room")
        return True
    return False
