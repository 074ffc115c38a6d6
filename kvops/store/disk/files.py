"""The blobs in a folder: where each lies, who may write or read there, and what is given up for room.

    begin_save -> Place, the caller writes header page and blob there -> end_save publishes, abort_save forgets
    begin_load -> Place, the caller reads and checks                  -> end_load, with the reason if it is bad

Bulk bytes go past this file: it keeps the account. Nobody finds a blob before it is published, a slot that somebody
holds is never given up, and one that is bad is kept out of use with its reason.

What a crash leaves. The header page in the slot is the truth, the journal only says where to look, so a journal that says
too little costs a blob, and one that says too much costs a read:

* a record without its data (it was not synced): page or checksums do not fit, the load is a miss;
* data without a record: the slot is free;
* a removal that was not written, or lost, because removals go with the next append: the blob is found, and is sound, or
  its slot was used again. Then the slot's new record has a higher generation and holds; if that was lost too, the old
  record leads to a page with another generation ("stale"), or to the old page with some new bytes behind it, which its
  checksums refuse. No generation comes twice: each opening begins a new epoch, and that is on the drive before anything
  is saved.

Wrong bytes are thus impossible under every sync policy. Loss when power fails: "always" nothing that was published;
"batch" up to 1 s or 256 blobs; "never" whatever the kernel had not written. A killed process loses nothing published.
"""

import contextlib
import dataclasses
import enum
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvferry.kvops.errors import DiskError
from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.checksum import Algorithm, checksum
from kvferry.kvops.store.file_io import FileIo

from . import folder as folders
from . import format as disk
from . import replay
from . import segments as seg
from . import table as tbl
from .journal import Journal
from .segments import Segments
from .slots import SlotClass, Slots, SlotSize
from .table import State, Table

logger = logging.getLogger(__name__)

SYNC_POLICIES = ("never", "batch", "always")
BATCH_S = 1.0
BATCH_BLOBS = 256
"""With "batch", how long, and for how many blobs, a sync may be put off."""


class Refusal(enum.Enum):
    """Why a blob is not to be saved."""

    EXISTS = "exists"
    PENDING = "pending"
    NO_ROOM = "no room"


@dataclasses.dataclass(slots=True)
class Place:
    """A slot that the caller holds.

    Attributes:
        entry: number of the slot among all. segment, slot: the same in two.
        fd: the file. offset: where the header area begins in it, in bytes; the blob begins *header_bytes* later.
        blob_bytes, parts: of the blob. generation: goes into the header page. tag: of the blob.
    """

    entry: int
    segment: int
    slot: int
    fd: int
    offset: int
    header_bytes: int
    blob_bytes: int
    generation: int
    tag: tuple[int, int]
    parts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What a slot held when it was listed.

    Attributes:
        place: as of a hold, which it is not; its descriptor is -1.
        namespace: tag of the namespace. seconds: Unix time of the save.
        reason: "" for a blob that can be loaded, else why its slot is in quarantine.
    """

    tag: tuple[int, int]
    place: Place
    blob_bytes: int
    namespace: int
    seconds: int
    reason: str

    @property
    def is_ready(self) -> bool:
        """Whether it can be loaded."""
        return not self.reason


class BlobFiles:
    """Blobs in one folder under a byte quota. Made by :meth:`open`.

    Threads: all methods may be called from any; one lock makes them take turns, and is held over syncs and while a
        segment is made. :meth:`contains` takes no lock.
    Ownership: descriptors in places belong to this object; a place is valid until it is ended.
    """

    def __init__(self, folder: Path, io: FileIo, sync: str, lock_fd: int, read_only: bool) -> None:
        self.folder = folder
        self._io = io
        self._sync = sync
        self._lock_fd = lock_fd
        self._read_only = read_only
        self._lock = threading.RLock()
        self._table = Table()
        self._slots = Slots(self._table)
        self._segments: Segments
        self._journal: Journal | None = None
        self._epoch = 0
        self._count = 0
        # records of what was unlisted since the last append, by entry
        self._owed: dict[int, bytes] = {}
        self._unsynced_blobs = 0
        self._unsynced_since_s = math.inf
        self._rewrite_again_at = 0
        self._counts = {"recovered": 0, "discarded_records": 0, "rewrites": 0, "unusable_files": 0}
        self._bad = dict.fromkeys(disk.REASONS[1:], 0)
        self.is_closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        io: FileIo,
        *,
        quota_bytes: int,
        free_floor_bytes: int = 0,
        sync: str = "batch",
        read_only: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> "BlobFiles":
        """Open a folder, or make it, and find again what it holds.

        Files that can't be used are moved to its quarantine. If it holds more than the quota, the coldest segments go.

        Args:
            folder: nothing else should be in there; created for this user only.
            io: for all calls on files; stays the caller's.
            quota_bytes: for all files in the folder, at all times; at least 8 MiB.
            free_floor_bytes: what must stay free on the file system when a segment is made.
            sync: "always", "batch" or "never"; see the module.
            read_only: take no lock and change nothing, beside an owner that lives; what is found is of this moment.
            on_progress: told (bytes of the journal read, its bytes) from time to time.

        Raises:
            ValueError: *sync* is none of the three.
            DiskBusyError: a live process owns the folder.
            DiskError: the folder, its version or the quota can't be used.
            OSError: the disk failed; nothing is left open.
        """
        if sync not in SYNC_POLICIES:
            raise ValueError(f"sync must be one of {', '.join(SYNC_POLICIES)}; got {sync!r}")
        if not read_only and quota_bytes < seg.MIN_QUOTA_BYTES:
            raise DiskError(
                f"the disk tier's quota must be at least {seg.MIN_QUOTA_BYTES} bytes (8 MiB); got {quota_bytes}"
            )
        folders.prepare(folder, create=not read_only)
        lock_fd = -1 if read_only else folders.take_lock(io, folder)
        files = cls(folder, io, sync, lock_fd, read_only)
        files._segments = Segments(
            files._slots,
            io,
            folder,
            quota_bytes=quota_bytes,
            free_floor_bytes=free_floor_bytes,
            durable=sync != "never",
            read_only=read_only,
            journal_bytes=files._journal_bytes,
        )
        try:
            files._recover(on_progress)
        except BaseException:
            files._close_files()
            raise
        return files

    # --- opening ---------------------------------------------------------------------------------------------------

    def _recover(self, on_progress: Callable[[int, int], None] | None) -> None:
        listing = folders.list_files(self.folder)
        found = replay.read_folder(
            self._io, self.folder, listing, self._table,
            write=not self._read_only, on_progress=on_progress,
        )  # fmt: skip
        if found.fd >= 0:
            self._journal = Journal(self._io, self.folder, found.number, found.fd, found.end)
        for segment, allocated_bytes in found.segments:
            self._segments.adopt(segment, allocated_bytes)
        self._slots.tick = found.ticks + 1
        self._table.rebuild()
        self._owed = found.doubles
        self._epoch = found.epoch + 1
        self._counts["recovered"] = self._slots.blobs
        self._counts["discarded_records"] = found.discarded
        self._counts["unusable_files"] = len(found.unusable)
        if found.discarded:
            logger.warning(
                "disk tier: %d records of %s can't be used (cut off, damaged, or of segments that are gone)",
                found.discarded, found.path,
            )  # fmt: skip
        if self._read_only:
            return
        if self._epoch >> disk.EPOCH_BITS:
            raise DiskError(
                f"{self.folder} says that it has had {found.epoch} owners; to start empty: "
                f"kvferry disk wipe {self.folder}"
            )
        for path in listing.unfinished:
            self._io.unlink(path)
        for path, reason in found.unusable:
            folders.quarantine(self._io, self.folder, path, reason)
        self._measure_quarantine()
        while self._segments.room_bytes < 0 and self._shrink():
            pass
        self._begin_epoch(found)
        for path in found.superseded:
            self._io.unlink(path)
        self._rewrite_if_wasteful()

    def _shrink(self) -> bool:
        """Give the coldest segment up, or what is in quarantine, to come down to the quota; return whether."""
        for segment in self._slots.coldest(None):
            logger.info(
                "disk tier: segment %08x goes, the quota is smaller than before", segment.number
            )
            self._segments.drop(segment)
            return True
        return self._delete_oldest_quarantined()

    def _begin_epoch(self, found: replay.Found) -> None:
        """Write down that an owner began, before any generation of its epoch is used."""
        journal = self._journal
        if journal is None or found.is_damaged:
            self._journal = Journal.create(
                self._io,
                self.folder,
                found.number + 1,
                self._epoch,
                replay.live_records(self._table),
            )
            self._owed.clear()
            if journal is not None and found.path is not None:
                journal.close()
                folders.quarantine(self._io, self.folder, found.path, disk.HEADER)
                self._measure_quarantine()
            return
        if found.num_bytes > found.end:
            self._io.truncate(journal.fd, found.end)
        generation = self._epoch << disk.GENERATION_COUNT_BITS
        journal.append(disk.pack_record((0, 0), generation, 0, 0, kind=disk.Kind.EPOCH))
        journal.sync()

    # --- saving ----------------------------------------------------------------------------------------------------

    def contains(self, tag: tuple[int, int]) -> bool:
        """Return whether the blob of *tag* can be loaded. Takes no lock, may be a moment early or late."""
        return self._table.contains(tag)

    def begin_save(self, tag: tuple[int, int], blob_bytes: int, parts: int) -> Place | Refusal:
        """Return a slot for a blob, giving others up if need be, or why there is none.

        The slot is the caller's until :meth:`end_save` or :meth:`abort_save`.

        Raises:
            ValueError: *blob_bytes* or *parts* can't be.
            OSError: the disk refused a new segment. The next 64 saves make do without one where they can.
        """
        if blob_bytes < 1:
            raise ValueError(f"blob_bytes must be at least 1; got {blob_bytes}")
        if not 0 < parts <= fmt.MAX_PARTS:
            raise ValueError(f"parts must be 1 to {fmt.MAX_PARTS}; got {parts}")
        with self._lock:
            self._check_writable()
            entry = self._table.find(tag)
            if entry >= 0:
                state, _ = self._slots.facts(entry)
                return Refusal.PENDING if state is State.SAVING else Refusal.EXISTS
            size = SlotSize(disk.slot_bytes_for(blob_bytes, parts), disk.header_area(parts))
            if not self._segments.slots_needed(size):
                return Refusal.NO_ROOM
            slot_class = self._slots.class_of(size)
            while not slot_class.open_segments:
                if not self._make_room(slot_class):
                    return Refusal.NO_ROOM
            # first what can fail
            self._segments.fd(slot_class.open_segments[-1])
            entry = self._slots.take(slot_class)
            self._slots.begin(entry, tag, self._next_generation(), blob_bytes, parts)
            self._count += 1
            return self._place(entry)

    def end_save(self, saved: Sequence[tuple[Place, bytes]]) -> None:
        """Publish blobs that were written, each with its namespace, by one append to the journal.

        Raises:
            OSError: nothing was published; every place is still the caller's, to be aborted or tried again.
        """
        with self._lock:
            journal = self._check_writable()
            now = int(time.time())
            puts = {}
            for place, namespace in saved:
                self._check_saving(place)
                puts[place.entry] = disk.pack_record(
                    place.tag, place.generation, place.segment, place.slot, kind=disk.Kind.PUT,
                    blob_bytes=place.blob_bytes, namespace=disk.namespace_tag(namespace), seconds=now,
                    parts=place.parts,
                )  # fmt: skip
                self._slots.segments[place.segment].is_unsynced = self._sync != "never"
            if self._sync == "always":
                self._segments.sync()
            # a put says of its slot all that a removal would
            owed = [record for entry, record in self._owed.items() if entry not in puts]
            records = b"".join([*owed, *puts.values()])
            self._append(journal, records)
            self._note_unsynced(len(saved))
            try:
                self._sync_if_due(journal)
            except OSError:
                journal.take_back(len(records))
                raise
            self._owed.clear()
            for place, namespace in saved:
                self._slots.publish(place.entry, disk.namespace_tag(namespace), now)
            self._rewrite_if_wasteful()

    def abort_save(self, place: Place) -> None:
        """Give a slot back whose blob will not be; only when no I/O into it can come any more."""
        with self._lock:
            self._check_saving(place)
            self._slots.abort(place.entry)

    def _check_saving(self, place: Place) -> None:
        rows = self._table.rows.get(place.segment)
        if rows is None or self._slots.facts(place.entry) != (State.SAVING, place.generation):
            raise ValueError(
                f"place must be one that begin_save returned, not ended yet; got {place}"
            )

    def _next_generation(self) -> int:
        return self._epoch << disk.GENERATION_COUNT_BITS | self._count + 1

    def _place(self, entry: int) -> Place:
        segment = self._slots.of(entry)
        rows, at = self._table.row(entry)
        slot = entry & tbl.SLOT_MASK
        return Place(
            entry=entry,
            segment=segment.number,
            slot=slot,
            fd=segment.fd,
            offset=disk.SUPERBLOCK_BYTES + slot * segment.block.slot_bytes,
            header_bytes=segment.block.header_bytes,
            blob_bytes=rows[at + tbl.BLOB_BYTES],
            generation=rows[at + tbl.GENERATION],
            tag=(rows[at + tbl.TAG_LO], rows[at + tbl.TAG_HI]),
            parts=rows[at + tbl.FACTS] >> 16 & 0xFFFF,
        )

    def _make_room(self, slot_class: SlotClass) -> bool:
        """Do one thing that may give a class a free slot; return whether there is hope."""
        has_blobs = any(segment.ready for segment in slot_class.segments)
        if slot_class.wait and has_blobs:
            slot_class.wait -= 1
        elif self._grow(slot_class):
            return True
        if slot_class.barren_at == self._slots.changes:
            # looked through in vain, and nothing was let go of since
            return False
        if slot_class.quarantined * seg.QUARANTINE_SHARE > slot_class.slots and (
            self._release_quarantined(slot_class)
        ):
            return True
        own = self._slots.victim(slot_class)
        slot_class.victims += 1
        if own < 0 or slot_class.victims >= seg.LOOK_EVERY:
            slot_class.victims = 0
            limit = self._slots.last_use(own) if own >= 0 else math.inf
            if self._segments.take_over(slot_class, limit):
                # shorter by the records of what was given up: the quota may need that too
                self._rewrite_if_wasteful()
                if self._grow(slot_class):
                    return True
        if own >= 0:
            self._owed[own] = replay.remove_record(self._table, own)
            self._slots.unlist(own)
            self._segments.evicted += 1
            return True
        if self._release_quarantined(slot_class) or self._delete_oldest_quarantined():
            return True
        slot_class.barren_at = self._slots.changes
        return False

    def _grow(self, slot_class: SlotClass) -> bool:
        try:
            return self._segments.grow(slot_class, self._next_generation())
        except OSError:
            slot_class.wait = seg.WAIT_SAVES
            raise

    # --- loading ---------------------------------------------------------------------------------------------------

    def begin_load(self, tag: tuple[int, int]) -> Place | None:
        """Hold the slot of a blob until :meth:`end_load`, which must come; None if there is no such blob.

        Raises:
            OSError: its segment can't be opened; nothing is held.
        """
        with self._lock:
            self._check_open()
            entry = self._table.find(tag)
            if entry < 0 or self._slots.facts(entry)[0] is not State.READY:
                return None
            self._segments.fd(self._slots.of(entry))
            self._slots.hold(entry, counts_as_use=True)
            return self._place(entry)

    def end_load(self, place: Place, *, bad: str | None = None) -> None:
        """Let go of a slot.

        Args:
            place: of :meth:`begin_load`.
            bad: why its blob can't be used, one of format.py's REASONS; nobody finds it any more, and its slot stays out
                of use. The record of that goes with the next append if the disk refuses it now.
        """
        with self._lock:
            state, generation = self._slots.facts(place.entry)
            if bad is not None and state is State.READY and generation == place.generation:
                code = disk.reason_code(bad)
                self._bad[disk.reason_name(code)] += 1
                self._owed[place.entry] = replay.quarantine_record(self._table, place.entry, code)
                self._slots.quarantine(place.entry, code)
                with contextlib.suppress(OSError):
                    self._write_owed()
            self._slots.let_go(place.entry)

    def remove(self, tags: Sequence[tuple[int, int]]) -> list[bool]:
        """Forget blobs; say of each whether it was there. One that is being saved stays.

        Raises:
            OSError: they are forgotten, and might be found again after a crash.
        """
        with self._lock:
            self._check_writable()
            answers = []
            for tag in tags:
                entry = self._table.find(tag)
                there = entry >= 0 and self._slots.facts(entry)[0] is State.READY
                if there:
                    self._owed[entry] = replay.remove_record(self._table, entry)
                    self._slots.unlist(entry)
                answers.append(there)
            self._write_owed()
            return answers

    # --- journal ---------------------------------------------------------------------------------------------------

    def _journal_bytes(self) -> int:
        return self._journal.end if self._journal is not None else 0

    def _append(self, journal: Journal, records: bytes) -> None:
        if journal.end + len(records) > self._segments.journal_limit:
            self._rewrite(journal)
            if journal.end + len(records) > self._segments.journal_limit:
                raise OSError(
                    errno.ENOSPC, "the journal's share of the disk tier's quota is used up"
                )
        journal.append(records)

    def _write_owed(self) -> None:
        if self._owed and self._journal is not None and not self._read_only:
            self._append(self._journal, b"".join(self._owed.values()))
            self._owed.clear()

    def _rewrite_if_wasteful(self) -> None:
        """Rewrite a journal that is mostly of the past; if the disk refuses, again after as many records."""
        journal = self._journal
        live = self._slots.blobs + self._slots.quarantined
        if journal is None or not journal.is_wasteful(live):
            return
        if journal.records >= self._rewrite_again_at:
            try:
                self._rewrite(journal)
            except OSError as error:
                self._rewrite_again_at = journal.records + max(live, 1024)
                logger.warning("disk tier: the journal could not be rewritten: %s", error)

    def _rewrite(self, journal: Journal) -> None:
        journal.rewrite(self._epoch, replay.live_records(self._table))
        # what was unlisted is not in it
        self._owed.clear()
        self._rewrite_again_at = 0
        self._counts["rewrites"] += 1

    def _note_unsynced(self, blobs: int) -> None:
        if self._sync != "never" and blobs:
            self._unsynced_since_s = min(self._unsynced_since_s, time.monotonic())
            self._unsynced_blobs += blobs

    def _sync_if_due(self, journal: Journal) -> None:
        waited_s = time.monotonic() - self._unsynced_since_s
        due = self._unsynced_blobs >= BATCH_BLOBS or waited_s >= BATCH_S or self._sync == "always"
        if due and self._sync != "never":
            self._sync_all(journal)

    def _sync_all(self, journal: Journal) -> None:
        self._segments.sync()
        journal.sync()
        self._unsynced_blobs = 0
        self._unsynced_since_s = math.inf

    def sync_if_due(self) -> None:
        """Sync if the policy is "batch" and something has waited long enough; for whoever is idle.

        Raises:
            OSError: what was published since the last sync may be lost when power fails.
        """
        with self._lock:
            self._sync_if_due(self._check_writable())

    def sync_now(self) -> None:
        """Return when all that was published is on the drive, whatever the policy.

        Raises:
            OSError: some of it may not be.
        """
        with self._lock:
            journal = self._check_writable()
            self._write_owed()
            self._sync_all(journal)

    # --- looking and cleaning --------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """Yield what is ready or in quarantine; segment by segment, so that others take turns meanwhile."""
        with self._lock:
            numbers = sorted(self._slots.segments)
        for number in numbers:
            with self._lock:
                segment = self._slots.segments.get(number)
                if segment is None:
                    continue
                entries = self._slots.entries_in(segment, State.READY, State.QUARANTINED)
                found = [self._entry(entry) for entry in entries]
            yield from found

    def _entry(self, entry: int) -> Entry:
        place = self._place(entry)
        place.fd = -1
        rows, at = self._table.row(entry)
        facts = rows[at + tbl.FACTS]
        bad = facts & 0xFF == State.QUARANTINED
        return Entry(
            tag=place.tag,
            place=place,
            blob_bytes=place.blob_bytes,
            namespace=rows[at + tbl.NAMESPACE],
            seconds=facts >> 32,
            reason=disk.reason_name(facts >> 8 & 0xFF) if bad else "",
        )

    def check(self, entry: Entry) -> str | None:
        """Read one blob whole and return why it can't be used, or None.

        Read-only beside a live owner, "stale" may also mean that the slot was used again since it was listed.
        """
        with self._lock:
            self._check_open()
            place = entry.place
            rows = self._table.rows.get(place.segment)
            if rows is None or place.slot * tbl.ROW_WORDS >= len(rows):
                return disk.STALE
            state, generation = self._slots.facts(place.entry)
            if generation != place.generation or state not in (State.READY, State.QUARANTINED):
                return disk.STALE
            try:
                fd = self._segments.fd(self._slots.of(place.entry))
            except OSError:
                return disk.UNREADABLE
            self._slots.hold(place.entry, counts_as_use=False)
        try:
            return self._check_slot(fd, place)
        except OSError:
            return disk.UNREADABLE
        finally:
            with self._lock:
                self._slots.let_go(place.entry)

    def _check_slot(self, fd: int, place: Place) -> str | None:
        size = place.header_bytes + fmt.round_up(place.blob_bytes, disk.PAGE)
        data = memoryview(self._io.read_now(fd, size, place.offset))
        if len(data) < size:
            return disk.TRUNCATED
        header = disk.read_header_page(data[: place.header_bytes])
        if isinstance(header, str):
            return header
        if header.generation != place.generation:
            return disk.STALE
        if disk.blob_tag(header.namespace, header.key) != place.tag:
            return disk.FOREIGN
        if header.blob_bytes != place.blob_bytes:
            return disk.SHAPE
        blob = data[place.header_bytes :]
        for part in header.parts:
            if part.algorithm != Algorithm.XXH3_64 or part.checksum != checksum(
                blob[part.offset : part.offset + part.num_bytes]
            ):
                return disk.CHECKSUM
        return None

    def stats(self) -> dict[str, int]:
        """Return the account: bytes on disk, blobs, slots, what was recovered, given up and found bad, by reason."""
        with self._lock:
            slots, segments = self._slots, self._segments
            quarantined = [] if self.is_closed else folders.quarantined_files(self.folder)
            return {
                "quota_bytes": segments.quota_bytes,
                "used_bytes": segments.used_bytes() + self._journal_on_disk(),
                "journal_bytes": self._journal_bytes(),
                "blobs": slots.blobs,
                "blob_bytes": slots.blob_bytes,
                "segments": len(slots.segments),
                "slots": slots.total,
                "free_slots": sum(s.free for s in slots.segments.values()),
                "held_slots": sum(s.held for s in slots.segments.values()),
                "quarantined_slots": slots.quarantined,
                "quarantined_files": len(quarantined),
                "quarantined_file_bytes": sum(size for _, size in quarantined),
                "evicted": segments.evicted,
                "handed_over_segments": segments.handed_over,
                "index_bytes": self._table.num_bytes,
                **self._counts,
                **{f"bad_{reason}": count for reason, count in self._bad.items()},
            }

    def _journal_on_disk(self) -> int:
        if self._journal is None or self.is_closed:
            return 0
        return os.fstat(self._journal.fd).st_blocks * 512

    def gc(self) -> dict[str, int]:
        """Take slots in quarantine back into use, delete files in quarantine, and rewrite the journal.

        Returns:
            how many slots, files, bytes of files and records went.

        Raises:
            OSError: part of it is done.
        """
        with self._lock:
            journal = self._check_writable()
            counts = {"slots": 0, "files": 0, "bytes": 0, "records": 0}
            for slot_class in list(self._slots.classes.values()):
                counts["slots"] += self._release_quarantined(slot_class)
            for path, size in folders.quarantined_files(self.folder):
                folders.delete_quarantined(self._io, path, "asked for")
                counts["files"] += 1
                counts["bytes"] += size
            self._measure_quarantine()
            before = journal.records
            if before > self._slots.blobs + self._slots.quarantined:
                self._rewrite(journal)
            counts["records"] = before - journal.records
            return counts

    def _release_quarantined(self, slot_class: SlotClass) -> int:
        released = self._segments.release_quarantined(slot_class)
        for entry, record in released:
            self._owed[entry] = record
        return len(released)

    def _measure_quarantine(self) -> None:
        self._segments.other_bytes = sum(size for _, size in folders.quarantined_files(self.folder))

    def _delete_oldest_quarantined(self) -> bool:
        for path, _ in folders.quarantined_files(self.folder):
            folders.delete_quarantined(self._io, path, "the quota needs its room")
            self._measure_quarantine()
            return True
        return False

    @staticmethod
    def wipe(folder: Path, io: FileIo) -> dict[str, int]:
        """Delete all blobs and files of ours in a folder that nobody owns; see :func:`folder.wipe`."""
        return folders.wipe(io, folder)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise DiskError(f"the disk tier in {self.folder} is closed")

    def _check_writable(self) -> Journal:
        self._check_open()
        if self._read_only or self._journal is None:
            raise DiskError(f"the disk tier in {self.folder} was opened for reading only")
        return self._journal

    def close(self) -> None:
        """Write down what is owed, sync unless the policy is "never", close all files and give the lock back.

        Only when no I/O is under way. May be called twice. What the disk refuses now is logged.
        """
        with self._lock:
            if self.is_closed:
                return
            if not self._read_only and self._journal is not None:
                try:
                    self._write_owed()
                    if self._sync != "never":
                        self._sync_all(self._journal)
                except OSError as error:
                    logger.warning("disk tier: closing %s: %s", self.folder, error)
            self._close_files()

    def _close_files(self) -> None:
        self.is_closed = True
        self._segments.close()
        with contextlib.suppress(OSError):
            if self._journal is not None:
                self._journal.close()
        with contextlib.suppress(OSError):
            if self._lock_fd >= 0:
                self._io.close_file(self._lock_fd)

    def __enter__(self) -> "BlobFiles":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
