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
  is saved. (Where a journal was lost as a whole, it may; then the key in the page and the checksums are what tells.)

Wrong bytes are thus impossible under every sync policy. Loss when power fails: "always" nothing that was published;
"batch" up to 1 s; "never" whatever the kernel had not written. A killed process loses nothing published.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvferry.kvops.errors import DiskError
from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.file_io import FileIo

from . import folder as folders
from . import format as disk
from . import many
from .account import Account
from .book import BATCH, NEVER, SYNC_POLICIES, Book
from .check import check_blob
from .places import Answer, Entry, Place, Refusal, Tag, entry_of
from .room import Room
from .segments import MIN_QUOTA_BYTES, Segments
from .slots import SlotClass, Slots, SlotSize
from .table import State, Table

__all__ = ["BlobFiles", "Entry", "Place", "Refusal"]


class BlobFiles:
    """Blobs in one folder under a byte quota. Made by :meth:`open`.

    Threads: all methods may be called from any; one lock makes them take turns, and is held over syncs and while a
        segment is made. :meth:`contains` takes no lock.
    Ownership: descriptors in places belong to this object; a place is valid until it is ended.
    """

    def __init__(self, account: Account, lock_fd: int) -> None:
        self.folder = account.folder
        self._account = account
        self._io = account.io
        self._lock_fd = lock_fd
        self._lock = threading.RLock()
        self._segments = account.segments
        self._slots = account.slots
        self._table = account.slots.table
        self._classes: dict[tuple[int, int], SlotClass] = {}
        self._bad: dict[str, int] = dict.fromkeys(disk.REASONS[1:], 0)
        self.is_closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        io: FileIo,
        *,
        quota_bytes: int,
        free_floor_bytes: int = 0,
        sync: str = BATCH,
        read_only: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> "BlobFiles":
        """Open a folder, or make it, and find again what it holds.

        Files that can't be used are moved to its quarantine. If it holds more than the quota, the coldest segments go.

        Args:
            folder: nothing else should be in there.
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
        if not read_only and quota_bytes < MIN_QUOTA_BYTES:
            raise DiskError(
                f"the disk tier's quota must be at least {MIN_QUOTA_BYTES} bytes (8 MiB); got {quota_bytes}"
            )
        folders.prepare(folder, create=not read_only)
        segments = Segments(
            Slots(Table()),
            io,
            folder,
            quota_bytes=quota_bytes,
            free_floor_bytes=free_floor_bytes,
            durable=sync != NEVER,
            read_only=read_only,
        )
        lock_fd = -1 if read_only else folders.take_lock(io, folder)
        files = cls(Account(io, folder, segments), lock_fd)
        try:
            if read_only:
                files._account.look(on_progress)
            else:
                files._account.take_over(sync, on_progress)
        except BaseException:
            files._close_files()
            raise
        return files

    # --- saving ----------------------------------------------------------------------------------------------------

    def contains(self, tag: Tag) -> bool:
        """Return whether the blob of *tag* can be loaded. Takes no lock, may be a moment early or late."""
        return self._table.contains(tag)

    def blob_bytes(self, tag: Tag) -> int:
        """Return the bytes of the blob of *tag*, 0 if it can't be loaded. Takes no lock, as :meth:`contains`."""
        return self._table.blob_bytes(tag)

    def begin_save(self, tag: Tag, blob_bytes: int, parts: int) -> Place | Refusal:
        """Return a slot for a blob, giving others up if need be, or why there is none.

        The slot is the caller's until :meth:`end_save` or :meth:`abort_save`.

        Raises:
            ValueError: *blob_bytes* or *parts* can't be.
            OSError: the disk refused a new segment. The next 64 saves make do without one where they can.
        """
        (answer,) = self.begin_saves([(tag, blob_bytes)], parts)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def begin_saves(self, wanted: Sequence[tuple[Tag, int]], parts: int) -> list[Answer]:
        """As :meth:`begin_save` for many, each a tag and its blob's bytes; an error is an answer too."""
        answers: list[Answer] = []
        with self._lock:
            book, room = self._check_writable()
            while True:
                many.list_saves(
                    self._slots, self._classes, wanted, parts, book.take_generation, answers
                )
                if len(answers) == len(wanted):
                    return answers
                _, blob_bytes = wanted[len(answers)]
                try:
                    if not self._make_room(room, blob_bytes, parts):
                        answers.append(Refusal.NO_ROOM)
                except OSError as error:
                    answers.append(error)

    def _make_room(self, room: Room, blob_bytes: int, parts: int) -> bool:
        """Have a free slot in a file that is open; return whether there is one."""
        slot_class = self._classes.get((blob_bytes, parts))
        if slot_class is None:
            if blob_bytes < 1:
                raise ValueError(f"blob_bytes must be at least 1; got {blob_bytes}")
            if not 0 < parts <= fmt.MAX_PARTS:
                raise ValueError(f"parts must be 1 to {fmt.MAX_PARTS}; got {parts}")
            size = SlotSize(disk.slot_bytes_for(blob_bytes, parts), disk.header_area(parts))
            if not self._segments.slots_needed(size):
                return False
            slot_class = self._classes[blob_bytes, parts] = self._slots.class_of(size)
        while not slot_class.open_segments:
            if not room.make(slot_class):
                return False
        self._segments.fd(slot_class.open_segments[-1])
        return True

    def end_save(self, saved: Sequence[tuple[Place, bytes]]) -> None:
        """Publish blobs that were written, each with its namespace, by one append to the journal.

        Raises:
            OSError: nothing was published; every place is still the caller's, to be aborted or tried again.
        """
        with self._lock:
            book, _ = self._check_writable()
            now = int(time.time())
            tags = {namespace: 0 for _, namespace in saved}
            for namespace in tags:
                tags[namespace] = disk.namespace_tag(namespace)
            puts = many.put_records(self._slots, saved, tags, now)
            for number in {place.segment for place, _ in saved}:
                self._slots.segments[number].is_unsynced = True
            book.write(puts)
            many.publish(self._slots, saved, tags, now)

    def abort_save(self, place: Place) -> None:
        """Give a slot back whose blob will not be; only when no I/O into it can come any more."""
        with self._lock:
            many.check_saving(self._slots, place)
            self._slots.abort(place.entry)

    # --- loading ---------------------------------------------------------------------------------------------------

    def begin_load(self, tag: Tag) -> Place | None:
        """Hold the slot of a blob until :meth:`end_load`, which must come; None if there is no such blob.

        Raises:
            OSError: its segment can't be opened; nothing is held.
        """
        (answer,) = self.begin_loads([tag])
        if isinstance(answer, OSError):
            raise answer
        return answer

    def begin_loads(self, tags: Sequence[Tag]) -> list[Place | OSError | None]:
        """As :meth:`begin_load` for many; an error is an answer too."""
        with self._lock:
            self._check_open()
            return many.hold_ready(self._slots, self._segments, tags)

    def end_loads(self, places: Iterable[Place]) -> None:
        """Let go of slots whose blobs are sound."""
        with self._lock:
            many.let_go(self._slots, places)

    def end_load(self, place: Place, *, bad: str | None = None) -> None:
        """Let go of a slot.

        Args:
            place: of :meth:`begin_load`.
            bad: why its blob can't be used, one of format.py's REASONS; nobody finds it any more, and its slot stays out
                of use. The record of that goes with the next append if the disk refuses it now.
        """
        with self._lock:
            state, generation = self._slots.facts(place.entry)
            if bad is not None and state == State.READY and generation == place.generation:
                code = disk.reason_code(bad)
                self._bad[disk.reason_name(code)] += 1
                self._slots.quarantine(place.entry, code)
                if (book := self._account.book) is not None:
                    book.owe_quarantine(place.entry, code)
                    with contextlib.suppress(OSError):
                        book.write({})
            many.let_go(self._slots, (place,))

    def remove(self, tags: Sequence[Tag]) -> list[bool]:
        """Forget blobs; say of each whether it was there. One that is being saved stays.

        Raises:
            OSError: they are forgotten, and might be found again after a crash.
        """
        with self._lock:
            book, _ = self._check_writable()
            answers = []
            for tag in tags:
                entry = self._table.find(tag)
                there = entry >= 0 and self._slots.facts(entry)[0] == State.READY
                if there:
                    book.owe_removal(entry)
                    self._slots.unlist(entry)
                answers.append(there)
            book.write({})
            return answers

    def sync_if_due(self) -> None:
        """Sync if the policy is "batch" and something has waited long enough; for whoever is idle.

        Raises:
            OSError: what was published since the last sync may be lost when power fails.
        """
        with self._lock:
            self._check_writable()[0].sync_if_due()

    def tidy(self) -> None:
        """Rewrite a journal that is mostly of the past; for whoever is idle, since that takes a sync."""
        with self._lock:
            self._check_writable()[0].rewrite_if_wasteful()

    def sync_now(self) -> None:
        """Return when all that was published is on the drive, whatever the policy.

        Raises:
            OSError: some of it may not be.
        """
        with self._lock:
            book, _ = self._check_writable()
            book.write({})
            book.sync()

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
                found = [entry_of(self._slots, entry) for entry in entries]
            yield from found

    def check(self, entry: Entry) -> str | None:
        """Read one blob whole and return which of format.py's REASONS it can't be used for, or None.

        Beside a live owner that may also mean that the slot was used again since it was listed: list anew, and look.
        """
        place = entry.place
        with self._lock:
            self._check_open()
            segment = self._slots.segments.get(place.segment)
            if segment is None or place.slot >= segment.block.slots:
                return disk.STALE
            state, generation = self._slots.facts(place.entry)
            if generation != place.generation or state not in (State.READY, State.QUARANTINED):
                return disk.STALE
            try:
                fd = self._segments.fd(segment)
            except OSError:
                return disk.UNREADABLE
            self._slots.hold(place.entry)
        try:
            return check_blob(
                self._io, fd, place.offset, place.header_bytes, place.blob_bytes, generation, place.tag
            )  # fmt: skip
        finally:
            with self._lock:
                many.let_go(self._slots, (place,))

    def stats(self) -> dict[str, int]:
        """Return the account: bytes on disk, blobs, slots; what was recovered, given up, and found bad, by reason."""
        with self._lock:
            self._check_open()
            bad = {f"bad_{reason}": count for reason, count in self._bad.items()}
            return {**self._account.stats(), **bad}

    def gc(self) -> dict[str, int]:
        """Take slots in quarantine back into use, delete files in quarantine, and rewrite the journal.

        Returns:
            how many slots, files, bytes of files and records went.

        Raises:
            OSError: part of it is done.
        """
        with self._lock:
            return self._account.sweep(*self._check_writable())

    # --- the end ---------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise DiskError(f"the disk tier in {self.folder} is closed")

    def _check_writable(self) -> tuple[Book, Room]:
        self._check_open()
        book, room = self._account.book, self._account.room
        if book is None or room is None:
            raise DiskError(f"the disk tier in {self.folder} was opened for reading only")
        return book, room

    def close(self) -> None:
        """Write what is owed, sync unless the policy is "never", close all files and give the lock back.

        Only when no I/O is under way. May be called twice. What the disk refuses now is logged.
        """
        with self._lock:
            if not self.is_closed:
                self._close_files()

    def _close_files(self) -> None:
        self.is_closed = True
        self._account.close()
        with contextlib.suppress(OSError):
            if self._lock_fd >= 0:
                self._io.close_file(self._lock_fd)

    def __enter__(self) -> "BlobFiles":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
