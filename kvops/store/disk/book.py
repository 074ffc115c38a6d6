"""Keeps the journal for the account of slots: what is owed to it, when it is synced, when it is rewritten.

What is unlisted is owed a record, which goes with the next append: files.py says why it may be late, or never come.
"""

import contextlib
import errno
import logging
import math
import time
from pathlib import Path

from kvferry.kvops.store.file_io import FileIo

from . import folder as folders
from . import format as disk
from . import records as rec
from . import replay
from .journal import SLACK_RECORDS, Journal
from .segments import Segments
from .slots import Slots

logger = logging.getLogger(__name__)

NEVER, BATCH, ALWAYS = SYNC_POLICIES = ("never", "batch", "always")
BATCH_S = 1.0
"""With "batch", how long a sync may be put off; one takes about 10 ms, in which the drive does nothing else."""


class Book:
    """The journal of one folder, and the policy for it. Threads: the caller's lock.

    Attributes:
        epoch: of this owner. rewrites: how often the journal was rewritten.
    """

    def __init__(self, slots: Slots, segments: Segments, journal: Journal, policy: str) -> None:
        self._slots = slots
        self._segments = segments
        self._journal = journal
        self._policy = policy
        self.epoch = 0
        self.rewrites = 0
        self._count = 0
        self._owed: dict[int, bytes] = {}
        self._unsynced_blobs = 0
        self._unsynced_since_s = math.inf
        self._rewrite_again_at = 0
        segments.journal_bytes = journal.end

    @classmethod
    def begin(
        cls,
        io: FileIo,
        folder: Path,
        slots: Slots,
        segments: Segments,
        found: replay.Found,
        policy: str,
    ) -> "Book":
        """Write down that an owner began, before any generation of its epoch is used.

        A journal whose header is damaged goes to the quarantine; its sound records are in the new one.

        Ownership: the journal that was found is closed with this, or is the caller's if this fails.

        Raises:
            OSError: the journal is as it was, or has one more record that says nothing.
        """
        epoch = found.epoch + 1
        if found.fd < 0 or found.is_damaged:
            live = replay.live_records(slots.table)
            made = Journal.create(io, folder, found.number + 1, epoch, live)
            if found.path is not None:
                folders.quarantine(io, folder, found.path, disk.HEADER)
                io.close_file(found.fd)
            book = cls(slots, segments, made, policy)
        else:
            journal = Journal(io, folder, found.number, found.fd, found.end)
            if found.num_bytes > found.end:
                io.truncate(journal.fd, found.end)
            generation = epoch << disk.GENERATION_COUNT_BITS
            journal.append(rec.pack_record((0, 0), generation, 0, 0, kind=rec.Kind.EPOCH))
            journal.sync()
            book = cls(slots, segments, journal, policy)
            book._owed = found.doubles
        book.epoch = epoch
        return book

    @property
    def next_generation(self) -> int:
        """The generation that :meth:`take_generation` will return."""
        return self.epoch << disk.GENERATION_COUNT_BITS | self._count + 1

    def take_generation(self) -> int:
        """Return a generation that no save ever had."""
        self._count += 1
        return self.epoch << disk.GENERATION_COUNT_BITS | self._count

    @property
    def records(self) -> int:
        """Records of the journal, dead ones included."""
        return self._journal.records

    @property
    def fd(self) -> int:
        """The journal's descriptor."""
        return self._journal.fd

    # --- records ---------------------------------------------------------------------------------------------------

    def owe(self, entry: int, record: bytes) -> None:
        """Remember to write *record*, of a slot, with the next ones."""
        self._owed[entry] = record

    def owe_removal(self, entry: int) -> None:
        """Remember to write that what is in a slot was unlisted."""
        self._owed[entry] = replay.remove_record(self._slots.table, entry)

    def owe_quarantine(self, entry: int, reason: int) -> None:
        """Remember to write that a slot is in quarantine."""
        self._owed[entry] = replay.quarantine_record(self._slots.table, entry, reason)

    def write(self, puts: dict[int, bytes]) -> None:
        """Append the records of saves, by entry, and whatever is owed; sync as the policy says.

        Raises:
            OSError: none of it counts.
        """
        if self._policy == ALWAYS and puts:
            # the data first
            self._segments.sync()
        # a put says of its slot all that a removal would
        owed = [record for entry, record in self._owed.items() if entry not in puts]
        records = b"".join([*owed, *puts.values()])
        if records:
            self._append(records)
        if puts and self._policy != NEVER:
            self._unsynced_since_s = min(self._unsynced_since_s, time.monotonic())
            self._unsynced_blobs += len(puts)
        try:
            self.sync_if_due()
        except OSError:
            self._journal.take_back(len(records))
            self._segments.journal_bytes = self._journal.end
            raise
        self._owed.clear()

    def _append(self, records: bytes) -> None:
        if self._journal.end + len(records) > self._segments.journal_limit:
            self.rewrite()
            if self._journal.end + len(records) > self._segments.journal_limit:
                raise OSError(
                    errno.ENOSPC, "the journal's share of the disk tier's quota is used up"
                )
        self._journal.append(records)
        self._segments.journal_bytes = self._journal.end

    # --- syncing ---------------------------------------------------------------------------------------------------

    def sync_if_due(self) -> None:
        """Sync if the policy does not put it off any longer.

        Raises:
            OSError: what was published since the last sync may be lost when power fails.
        """
        waited_s = time.monotonic() - self._unsynced_since_s
        put_off = self._policy == BATCH and waited_s < BATCH_S
        if self._unsynced_blobs and not put_off:
            self.sync()

    def sync(self) -> None:
        """Return when all data, then all records, are on the drive.

        Raises:
            OSError: some of them may not be.
        """
        self._segments.sync()
        self._journal.sync()
        self._unsynced_blobs = 0
        self._unsynced_since_s = math.inf

    # --- rewriting -------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Records that a rewritten journal has."""
        return self._slots.blobs + self._slots.quarantined

    def rewrite(self) -> None:
        """Replace the journal by one without dead records.

        Raises:
            OSError: the old one is in use.
        """
        self._journal.rewrite(self.epoch, replay.live_records(self._slots.table))
        self._segments.journal_bytes = self._journal.end
        # what was unlisted is not in it
        self._owed.clear()
        self._rewrite_again_at = 0
        self.rewrites += 1

    def rewrite_if_wasteful(self) -> None:
        """Rewrite a journal that is mostly of the past; if the disk refuses, again some records later."""
        if not self._journal.is_wasteful(self.live) or self.records < self._rewrite_again_at:
            return
        try:
            self.rewrite()
        except OSError as error:
            self._rewrite_again_at = self.records + SLACK_RECORDS
            logger.warning("disk tier: the journal could not be rewritten: %s", error)

    def finish(self) -> None:
        """Close the journal: write what is owed, and sync unless the policy is "never". What the disk refuses now is logged."""
        try:
            self.write({})
            if self._policy != NEVER:
                self.sync()
        except OSError as error:
            logger.warning("disk tier: the last records could not be written: %s", error)
        finally:
            with contextlib.suppress(OSError):
                self._journal.close()
