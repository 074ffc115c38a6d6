"""One folder's files, slots, journal and quota together: opened, counted, swept. No lock; files.py has it."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from kvferry.kvops.errors import DiskDamagedError
from kvferry.kvops.store.file_io import FileIo

from . import folder as folders
from . import format as disk
from . import replay
from .book import Book
from .room import Room, shrink
from .segments import Segments
from .slots import Slots

logger = logging.getLogger(__name__)

REPLACED_ATTEMPTS = 5
"""How often to look at a folder anew whose owner replaces the journal meanwhile."""

Progress = Callable[[int, int], None] | None


@dataclasses.dataclass(slots=True, eq=False)
class Account:
    """What is known of one folder.

    Attributes:
        segments: its files, and the slots in them.
        book, room: None if it was opened for reading only.
        counts: blobs recovered, records discarded, files that could not be used.
    """

    io: FileIo
    folder: Path
    segments: Segments
    book: Book | None = None
    room: Room | None = None
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def slots(self) -> Slots:
        """The slots of all segments."""
        return self.segments.slots

    def look(self, on_progress: Progress) -> None:
        """Read a folder, whose owner may live and may just have replaced the journal that was listed."""
        for attempts_left in reversed(range(REPLACED_ATTEMPTS)):
            listing = folders.list_files(self.folder)
            try:
                found = replay.read_folder(
                    self.io, listing, self.slots.table, write=False, on_progress=on_progress
                )
            except FileNotFoundError:
                if not attempts_left:
                    raise
                self.slots.table.rows.clear()
                continue
            if found.fd >= 0:
                self.io.close_file(found.fd)
            self.segments.journal_bytes = found.end
            self._adopt(found)
            return

    def take_over(self, sync: str, on_progress: Progress) -> None:
        """Read a folder whose lock is held, and put it in order.

        Raises:
            DiskError: its version, or its epoch, can't be gone on with.
            OSError: the disk failed.
        """
        io, folder, segments = self.io, self.folder, self.segments
        listing = folders.list_files(folder)
        found = replay.read_folder(io, listing, self.slots.table, write=True, on_progress=on_progress)  # fmt: skip
        try:
            self._adopt(found)
            if found.epoch + 1 >> disk.EPOCH_BITS:
                raise DiskDamagedError(
                    f"{folder} says that it has had {found.epoch} owners; to start empty: kvferry disk wipe {folder}"
                )
            for path in listing.unfinished:
                io.unlink(path)
            for path, reason in found.unusable:
                folders.quarantine(io, folder, path, reason)
            segments.other_bytes = folders.quarantined_bytes(folder)
            segments.journal_bytes = found.end
            shrink(io, folder, self.slots, segments)
            self.book = Book.begin(io, folder, self.slots, segments, found, sync)
        except BaseException:
            if found.fd >= 0:
                with contextlib.suppress(OSError):
                    io.close_file(found.fd)
            raise
        segments.other_bytes = folders.quarantined_bytes(folder)
        for path in found.superseded:
            io.unlink(path)
        self.book.rewrite_if_wasteful()
        self.room = Room(io, folder, self.slots, segments, self.book)

    def _adopt(self, found: replay.Found) -> None:
        for segment, allocated_bytes in found.segments:
            self.segments.adopt(segment, allocated_bytes)
        self.slots.tick = found.ticks + 1
        self.slots.table.rebuild()
        self.counts = {
            "recovered": self.slots.blobs,
            "discarded_records": found.discarded,
            "unusable_files": len(found.unusable),
        }
        if found.discarded:
            logger.warning(
                "disk tier: %d records of %s can't be used (cut off, damaged, or of segments that are gone)",
                found.discarded, found.path,
            )  # fmt: skip

    def sweep(self, book: Book, room: Room) -> dict[str, int]:
        """Empty the quarantine and rewrite the journal, see :meth:`BlobFiles.gc`."""
        counts = {"slots": 0, "files": 0, "bytes": 0, "records": 0}
        for slot_class in list(self.slots.classes.values()):
            counts["slots"] += room.release_quarantined(slot_class)
        for path, size in folders.quarantined_files(self.folder):
            folders.delete_quarantined(self.io, path, "asked for")
            counts["files"] += 1
            counts["bytes"] += size
        self.segments.other_bytes = folders.quarantined_bytes(self.folder)
        counts["records"] = book.records - book.live
        if counts["records"]:
            book.rewrite()
        return counts

    def stats(self) -> dict[str, int]:
        """Return the numbers of :meth:`BlobFiles.stats`."""
        slots, segments = self.slots, self.segments
        files = folders.quarantined_files(self.folder)
        return {
            "quota_bytes": segments.quota_bytes,
            "used_bytes": folders.used_bytes(self.folder),
            "journal_bytes": segments.journal_bytes,
            "blobs": slots.blobs,
            "blob_bytes": slots.blob_bytes,
            "segments": len(slots.segments),
            "slots": slots.total,
            "free_slots": sum(segment.free for segment in slots.segments.values()),
            "held_slots": sum(segment.held for segment in slots.segments.values()),
            "quarantined_slots": slots.quarantined,
            "quarantined_files": len(files),
            "quarantined_file_bytes": sum(size for _, size in files),
            "evicted": segments.evicted,
            "handed_over_segments": segments.handed_over,
            "index_bytes": slots.table.num_bytes,
            "rewrites": self.book.rewrites if self.book else 0,
            **self.counts,
        }

    def close(self) -> None:
        """Finish the journal and close all files. What the disk refuses now is logged."""
        if self.book is not None:
            self.book.finish()
        self.segments.close()
