"""Segment files under a quota: made when there is room, given up as a whole when another slot size needs theirs.

What a segment takes from the quota is counted before it is made: its bytes; what the file system may add for its map of
extents; and its share of the journal, which holds two records for a slot at the most, and one more while it is rewritten.
A new segment is made under another name and is renamed when its superblock is written, so a crash leaves a .tmp.
"""

import contextlib
import logging
import os
import time
from pathlib import Path

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.file_io import FileIo

from . import format as disk
from . import records as rec
from .slots import Segment, SlotClass, Slots, SlotSize

logger = logging.getLogger(__name__)

MIN_SEGMENT_BYTES = 16 << 20
MAX_SEGMENT_BYTES = 256 << 20
MIN_SLOTS = 4
"""Slots of a segment, unless the quota has no room for so many."""

FIXED_BYTES = 256 << 10
"""Of the quota, for what is always there: an empty journal, twice what it may waste, lock, statistics, reasons."""

JOURNAL_FIXED_BYTES = FIXED_BYTES // 2
JOURNAL_SLOT_BYTES = 2 * rec.RECORD_BYTES
"""A journal may be as long as the one, and the other for each slot."""

MIN_QUOTA_BYTES = 8 << 20

MAX_OPEN_FILES = 512


def path_of(folder: Path, number: int) -> Path:
    """Return the path of segment *number*."""
    return folder / f"seg-{number:08x}.blobs"


def extent_bytes(slots: int) -> int:
    """Return what a file system may add to a segment: 12 to 16 bytes for each of up to two extents a slot."""
    return fmt.round_up(32 * slots, disk.PAGE) + 2 * disk.PAGE


def journal_share(slots: int) -> int:
    """Return how much of the quota the records of *slots* slots may take, a rewrite included."""
    return slots * (JOURNAL_SLOT_BYTES + rec.RECORD_BYTES)


class Segments:
    """The segment files of one folder. Threads: the caller's lock.

    Args:
        slots: what they hold.
        io: for every call on a file.
        folder: where they are.
        quota_bytes: for all files of the folder.
        free_floor_bytes: what must stay free on the file system when a segment is made.
        durable: whether a new segment is on the drive before it is used.
        read_only: open no file for writing.

    Attributes:
        cost_bytes: of the quota, taken by segments. journal_bytes: how long the journal is.
        other_bytes: of the quota, taken by files in quarantine.
        evicted: blobs given up. handed_over: segments given up for another size.
    """

    def __init__(
        self,
        slots: Slots,
        io: FileIo,
        folder: Path,
        *,
        quota_bytes: int,
        free_floor_bytes: int,
        durable: bool,
        read_only: bool,
    ) -> None:
        self.slots = slots
        self._io = io
        self._folder = folder
        self.quota_bytes = quota_bytes
        self._free_floor_bytes = free_floor_bytes
        self._said_floor = False
        self._durable = durable
        self._read_only = read_only
        self._open: dict[Segment, None] = {}
        self._names_unsynced = False
        self.cost_bytes = 0
        self.journal_bytes = 0
        self.other_bytes = 0
        self.handed_over = 0
        self.evicted = 0

    # --- the quota -------------------------------------------------------------------------------------------------

    @property
    def room_bytes(self) -> int:
        """What the quota leaves for another segment with its share of the journal; negative if it is exceeded."""
        excess = self.journal_bytes - JOURNAL_FIXED_BYTES - JOURNAL_SLOT_BYTES * self.slots.total
        return self.quota_bytes - FIXED_BYTES - self.other_bytes - self.cost_bytes - max(0, excess)

    @property
    def journal_limit(self) -> int:
        """How long the journal may be."""
        return JOURNAL_FIXED_BYTES + JOURNAL_SLOT_BYTES * self.slots.total

    def slots_wanted(self, size: SlotSize) -> int:
        """Return how many slots a segment of *size* should have."""
        target = max(MIN_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, self.quota_bytes // 64))
        return min(disk.MAX_SLOTS, max(MIN_SLOTS, target // size.slot_bytes))

    def slots_needed(self, size: SlotSize) -> int:
        """Return with how few slots a segment of *size* is worth making; 0 if the quota never has room for one."""
        most = self._slots_in(size, self.quota_bytes - FIXED_BYTES)
        return min(most, max(MIN_SLOTS, self.slots_wanted(size) // 4))

    def _slots_in(self, size: SlotSize, room: int) -> int:
        """Return how many slots of *size* have room in a segment that takes *room* bytes of the quota."""
        per_slot = size.slot_bytes + 32 + journal_share(1)
        return max(0, room - disk.SUPERBLOCK_BYTES - 3 * disk.PAGE) // per_slot

    # --- files -----------------------------------------------------------------------------------------------------

    def fd(self, segment: Segment) -> int:
        """Return the descriptor of a segment, opening it if need be.

        Raises:
            OSError: it can't be opened.
        """
        if segment.fd < 0:
            segment.fd = self._io.open(
                path_of(self._folder, segment.number), write=not self._read_only
            )
            self._opened(segment)
        return segment.fd

    def _opened(self, segment: Segment) -> None:
        self._open[segment] = None
        if len(self._open) > MAX_OPEN_FILES:
            for other in self._open:
                if other is not segment and not other.held and not other.is_unsynced:
                    self.close_file(other)
                    return

    def close_file(self, segment: Segment) -> None:
        """Close the descriptor of a segment, if it has one."""
        if segment.fd >= 0:
            fd, segment.fd = segment.fd, -1
            del self._open[segment]
            self._io.close_file(fd)

    def adopt(self, segment: Segment, allocated_bytes: int) -> None:
        """Take in a segment that was there, with its rows."""
        segment.cost_bytes = self._cost(segment.block, allocated_bytes)
        self.cost_bytes += segment.cost_bytes
        self.slots.add(segment)

    @staticmethod
    def _cost(block: disk.Superblock, allocated_bytes: int) -> int:
        expected = block.file_bytes + extent_bytes(block.slots)
        return max(expected, allocated_bytes) + journal_share(block.slots)

    def grow(self, slot_class: SlotClass, born: int) -> bool:
        """Make a segment for a class if quota and file system have room; return whether.

        Raises:
            OSError: the disk refused; nothing is left of it.
        """
        size = slot_class.size
        count = min(self.slots_wanted(size), self._slots_in(size, self.room_bytes))
        needed = self.slots_needed(size)
        if not needed or count < needed:
            return False
        number = 0
        while number in self.slots.segments:
            number += 1
        block = disk.Superblock(
            number, size.slot_bytes, count, size.header_bytes, time.time_ns(), born
        )
        free = os.statvfs(self._folder)
        if free.f_bavail * free.f_frsize - block.file_bytes < self._free_floor_bytes:
            if not self._said_floor:
                self._said_floor = True
                logger.warning(
                    "disk tier: %s takes no more: its file system would have less than %d bytes free",
                    self._folder, self._free_floor_bytes,
                )  # fmt: skip
            return False
        segment = Segment(block)
        segment.fd = self._create(block)
        self.slots.table.add_segment(number, count)
        self.adopt(segment, os.fstat(segment.fd).st_blocks * 512)
        self._opened(segment)
        logger.debug("disk tier: segment %08x of %d slots of %d bytes", number, count, size.slot_bytes)  # fmt: skip
        return True

    def _create(self, block: disk.Superblock) -> int:
        path = path_of(self._folder, block.segment)
        unfinished = path.with_name(path.name + ".tmp")
        self._io.unlink(unfinished)
        fd = self._io.open(unfinished, write=True, create=True)
        named = unfinished
        try:
            self._io.allocate(fd, block.file_bytes)
            self._io.write_now(fd, disk.pack_superblock(block), 0)
            if self._durable:
                self._io.sync(fd)
            self._io.rename(unfinished, path)
            named = path
            self._names_unsynced = True
            if self._durable:
                self._sync_names()
        except BaseException:
            with contextlib.suppress(OSError):
                self._io.close_file(fd)
            with contextlib.suppress(OSError):
                self._io.unlink(named)
            raise
        return fd

    def drop(self, segment: Segment) -> None:
        """Delete a segment in which nothing is held, and whatever it holds.

        Raises:
            OSError: it is as it was.
        """
        self._io.unlink(path_of(self._folder, segment.number))
        with contextlib.suppress(OSError):
            self.close_file(segment)
        if segment.quarantined:
            logger.warning(
                "disk tier: the quota needs segment %08x; %d slots in quarantine go with it",
                segment.number, segment.quarantined,
            )  # fmt: skip
        self.cost_bytes -= segment.cost_bytes
        self.evicted += self.slots.drop(segment)

    # --- room for a blob -------------------------------------------------------------------------------------------

    def take_over(self, slot_class: SlotClass, colder_than: float) -> bool:
        """Give segments of other sizes up, the coldest first, if that makes room for one of *slot_class*."""
        needed = self.slots_needed(slot_class.size)
        if not needed:
            return False
        chosen = []
        room = self.room_bytes
        for segment in self.slots.coldest(slot_class):
            if self._slots_in(slot_class.size, room) >= needed:
                break
            if segment.heat >= colder_than:
                return False
            chosen.append(segment)
            room += segment.cost_bytes
        if not chosen or self._slots_in(slot_class.size, room) < needed:
            return False
        for segment in chosen:
            self.drop(segment)
            self.handed_over += 1
        return True

    def sync(self) -> None:
        """Return when all blobs that were written are on the drive.

        Raises:
            OSError: they may or may not be.
        """
        for segment in [s for s in self._open if s.is_unsynced]:
            self._io.sync(segment.fd)
            segment.is_unsynced = False
        if self._names_unsynced:
            self._sync_names()

    def _sync_names(self) -> None:
        self._io.sync_folder(self._folder)
        self._names_unsynced = False

    def close(self) -> None:
        """Close all files."""
        for segment in list(self._open):
            with contextlib.suppress(OSError):
                self.close_file(segment)
