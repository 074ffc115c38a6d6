"""From the files of a folder to rows in memory: superblocks first, then the journal over them.

The order of the records does not matter beyond the rule in format.py, so whole chunks are applied at once. A record is
passed over, and counted, if its check does not hold, its segment is missing or was made after it, or its blob does not
fit the slots there.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvferry.kvops.errors import DiskError
from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.file_io import FileIo

from . import folder as folders
from . import format as disk
from . import journal as journals
from . import records as rec
from . import table as tbl
from .slots import Segment
from .table import State, Table


@dataclasses.dataclass(slots=True)
class Found:
    """What opening a folder brought to light.

    Attributes:
        segments: those that can be used, each with the bytes that it takes on the disk.
        epoch: the highest that anything mentions.
        fd: the journal, open, or -1. number: the highest of any journal. end: where its last sound record ends.
        num_bytes: how long the journal is.
        is_damaged: whether its header is; its records were used all the same.
        superseded: older journals. unusable: files and why.
        records: sound ones. discarded: those that were passed over.
        doubles: records that unlist a blob that lies in two slots, by entry.
        ticks: the last one that was given to a blob.
    """

    segments: list[tuple[Segment, int]] = dataclasses.field(default_factory=list)
    epoch: int = 0
    fd: int = -1
    path: Path | None = None
    number: int = 0
    end: int = rec.JOURNAL_HEADER_BYTES
    num_bytes: int = 0
    is_damaged: bool = False
    superseded: list[Path] = dataclasses.field(default_factory=list)
    unusable: list[tuple[Path, str]] = dataclasses.field(default_factory=list)
    records: int = 0
    discarded: int = 0
    doubles: dict[int, bytes] = dataclasses.field(default_factory=dict)
    ticks: int = 0


logger = logging.getLogger(__name__)


def read_folder(
    io: FileIo,
    listing: folders.Listing,
    table: Table,
    *,
    write: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Read everything in a folder into *table*; change nothing.

    Raises:
        DiskError: the journal is of a later version.
        OSError: something could not be read; no file is left open.
    """
    found = Found()
    # before the segments: in a folder that lives, a segment may be younger than the journal, not the other way round
    _open_journal(io, listing, found, write=write)
    try:
        for number, path in sorted(listing.segments.items()):
            _read_segment(io, number, path, table, found)
        if found.fd >= 0:
            _apply_journal(io, table, found, on_progress)
        _unlist_doubles(table, found)
        _set_ticks(table, found)
    except BaseException:
        if found.fd >= 0:
            io.close_file(found.fd)
        raise
    return found


def _open_journal(io: FileIo, listing: folders.Listing, found: Found, *, write: bool) -> None:
    found.number = max(listing.journals, default=0)
    for _, path in sorted(listing.journals.items(), reverse=True):
        if found.fd >= 0:
            found.superseded.append(path)
            continue
        if not folders.is_regular(path):
            found.unusable.append((path, disk.UNREADABLE))
            continue
        fd = io.open(path, write=write, direct=False)
        try:
            head = rec.read_journal_header(io.read_now(fd, rec.JOURNAL_HEADER_BYTES, 0))
            if head == disk.VERSION:
                raise DiskError(
                    f"{path} was written by a later kvferry; use that one, or delete all blobs: "
                    f"kvferry disk wipe {path.parent}"
                )
            num_bytes = os.fstat(fd).st_size
        except BaseException:
            io.close_file(fd)
            raise
        if isinstance(head, str) and head != disk.HEADER:
            io.close_file(fd)
            found.unusable.append((path, head))
            continue
        found.fd, found.path, found.num_bytes = fd, path, num_bytes
        found.is_damaged = isinstance(head, str)
        found.epoch = max(found.epoch, head if isinstance(head, int) else 0)


def _read_segment(io: FileIo, number: int, path: Path, table: Table, found: Found) -> None:
    try:
        if not folders.is_regular(path):
            found.unusable.append((path, disk.UNREADABLE))
            return
        fd = io.open(path, write=False, direct=False)
    except FileNotFoundError:
        # its owner, which lives, has given it up meanwhile
        return
    try:
        block = disk.read_superblock(io.read_now(fd, disk.SUPERBLOCK_BYTES, 0))
        status = os.fstat(fd)
    finally:
        io.close_file(fd)
    if isinstance(block, str):
        found.unusable.append((path, block))
    elif block.segment != number:
        found.unusable.append((path, disk.FOREIGN))
    elif status.st_size != block.file_bytes:
        short = status.st_size < block.file_bytes
        found.unusable.append((path, disk.TRUNCATED if short else disk.SHAPE))
    else:
        table.add_segment(number, block.slots)
        found.segments.append((Segment(block), status.st_blocks * 512))
        found.epoch = max(found.epoch, block.born >> disk.GENERATION_COUNT_BITS)


def _apply_journal(
    io: FileIo, table: Table, found: Found, on_progress: Callable[[int, int], None] | None
) -> None:
    shapes = _Shapes([segment.block for segment, _ in found.segments])
    for records, end in journals.read_records(io, found.fd, found.num_bytes, on_progress):
        found.end = end
        found.records += len(records)
        newest = int(records["generation"].max()) >> disk.GENERATION_COUNT_BITS
        found.epoch = max(found.epoch, newest)
        found.discarded += _apply(table, shapes, records)
    whole = -(-(found.num_bytes - rec.JOURNAL_HEADER_BYTES) // rec.RECORD_BYTES)
    found.discarded += max(0, whole - found.records)


class _Shapes:
    """What a record must fit into, by the number of its segment; the last line is that of a missing one."""

    def __init__(self, blocks: list[disk.Superblock]) -> None:
        self.count = max((block.segment + 1 for block in blocks), default=0)
        fields = ("slots", "header_bytes", "born", "slot_bytes")
        self.slots, self.header_bytes, self.born, self.slot_bytes = (
            np.zeros(self.count + 1, np.uint64) for _ in fields
        )
        for block in blocks:
            for field in fields:
                getattr(self, field)[block.segment] = getattr(block, field)

    def fits(self, records: journals.Records) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Return which records can be meant for the slots that are there."""
        segment = np.minimum(records["segment"], np.uint32(self.count))
        parts = records["parts"].astype(np.int64)
        header = disk.PREAMBLE_BYTES + fmt.HEADER_FIXED_BYTES + parts * fmt.PART_BYTES
        area = (-(-header // disk.PAGE) * disk.PAGE).astype(np.uint64)
        room = self.slot_bytes[segment] - self.header_bytes[segment]
        # at most a page less than there is room for, without rounding numbers up that may be near 2^64
        blob_bytes = records["blob_bytes"]
        same_size = (blob_bytes <= room) & (blob_bytes + np.uint64(disk.PAGE) > room)
        return np.asarray(
            (records["slot"] < self.slots[segment])
            & (records["generation"] >= self.born[segment])
            & (area == self.header_bytes[segment])
            & same_size
        )


_STATES = np.zeros(256, np.uint64)
_STATES[rec.Kind.PUT] = State.READY
_STATES[rec.Kind.QUARANTINE] = State.QUARANTINED


def _apply(table: Table, shapes: _Shapes, records: journals.Records) -> int:
    """Write a chunk of records into the rows; return how many can't be used."""
    kinds = records["kind"]
    known = (kinds >= rec.Kind.PUT) & (kinds <= rec.Kind.QUARANTINE)
    usable = records[known]
    usable = usable[shapes.fits(usable)]
    discarded = len(records) - len(usable) - int((kinds == rec.Kind.EPOCH).sum())
    # the sort keeps the order of equal ones, so the last of each slot is the one that holds
    usable = usable[np.lexsort((usable["generation"], usable["slot"], usable["segment"]))]
    segments, slots = usable["segment"], usable["slot"]
    last = np.append((segments[1:] != segments[:-1]) | (slots[1:] != slots[:-1]), True)
    usable = usable[last[: len(usable)]]
    rows = _rows_of(usable)
    segments, slots = usable["segment"], usable["slot"].astype(np.int64)
    begins = np.flatnonzero(np.append(True, segments[1:] != segments[:-1])[: len(segments)])
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(rows)], strict=False):
        there, new = table.columns(int(segments[begin])), rows[begin:end]
        places = slots[begin:end]
        newer = new[:, tbl.GENERATION] >= there[places, tbl.GENERATION]
        there[places[newer]] = new[newer]
    return discarded


def _rows_of(records: journals.Records) -> tbl.Words:
    """Return the rows that say what *records* say."""
    rows = np.zeros((len(records), tbl.ROW_WORDS), np.uint64)
    rows[:, tbl.TAG_LO] = records["tag_lo"]
    rows[:, tbl.TAG_HI] = records["tag_hi"]
    rows[:, tbl.GENERATION] = records["generation"]
    rows[:, tbl.BLOB_BYTES] = records["blob_bytes"]
    rows[:, tbl.NAMESPACE] = records["namespace"]
    facts = _STATES[records["kind"]]
    for name, shift in (("time", 32), ("parts", 16), ("reason", 8)):
        facts |= records[name].astype(np.uint64) << np.uint64(shift)
    rows[:, tbl.FACTS] = facts
    return rows


def _unlist_doubles(table: Table, found: Found) -> None:
    """Of a blob that lies in two slots (the record of its removal was lost), keep the one that was saved last."""
    lows = [np.empty(0, np.uint64)]
    for segment, _ in found.segments:
        ready = table.states(segment.number) == State.READY
        lows.append(table.columns(segment.number)[ready, tbl.TAG_LO])
    low = np.concatenate(lows)
    low.sort()
    twice = low[1:][low[1:] == low[:-1]]
    if not len(twice):
        return
    best: dict[tuple[int, int], tuple[int, int]] = {}
    for segment, _ in found.segments:
        rows = table.columns(segment.number)
        states = table.states(segment.number)
        for slot in np.flatnonzero((states == State.READY) & np.isin(rows[:, tbl.TAG_LO], twice)):
            tag = (int(rows[slot, tbl.TAG_LO]), int(rows[slot, tbl.TAG_HI]))
            mine = (int(rows[slot, tbl.GENERATION]), tbl.entry_of(segment.number, int(slot)))
            older = min(mine, best.get(tag, mine))
            best[tag] = max(mine, best.get(tag, mine))
            if older != best[tag]:
                entry = older[1]
                found.doubles[entry] = remove_record(table, entry)
                words, at = table.row(entry)
                words[at + tbl.FACTS] = State.FREE


def _set_ticks(table: Table, found: Found) -> None:
    """Take the order of the saves for the order of the last uses, which nobody wrote down."""
    bits = np.uint64(disk.GENERATION_COUNT_BITS)
    saves: dict[int, int] = {}
    for segment, _ in found.segments:
        generations = table.columns(segment.number)[:, tbl.GENERATION]
        for epoch in np.unique(generations >> bits).tolist():
            highest = int(generations[generations >> bits == epoch].max())
            count = highest - (epoch << disk.GENERATION_COUNT_BITS)
            saves[epoch] = max(saves.get(epoch, 0), count)
    before = {}
    for epoch in sorted(saves):
        before[epoch] = found.ticks
        found.ticks += saves[epoch]
    for segment, _ in found.segments:
        columns = table.columns(segment.number)
        ready = table.states(segment.number) == State.READY
        generations = columns[ready, tbl.GENERATION]
        ticks = generations & np.uint64((1 << disk.GENERATION_COUNT_BITS) - 1)
        for epoch in np.unique(generations >> bits).tolist():
            ticks[generations >> bits == epoch] += np.uint64(before[epoch])
        columns[ready, tbl.USE] = ticks << np.uint64(tbl.TICK_SHIFT)


# --- from rows to records -----------------------------------------------------------------------------------------


def remove_record(table: Table, entry: int) -> bytes:
    """Return the record that undoes the save of what is in a slot."""
    return _record(table, entry, rec.Kind.REMOVE, 0)


def quarantine_record(table: Table, entry: int, reason: int) -> bytes:
    """Return the record that turns the save of what is in a slot into a quarantine."""
    return _record(table, entry, rec.Kind.QUARANTINE, reason)


def _record(table: Table, entry: int, kind: rec.Kind, reason: int) -> bytes:
    rows, at = table.row(entry)
    facts = rows[at + tbl.FACTS]
    return rec.pack_record(
        (rows[at + tbl.TAG_LO], rows[at + tbl.TAG_HI]),
        rows[at + tbl.GENERATION],
        entry >> tbl.SLOT_BITS,
        entry & tbl.SLOT_MASK,
        kind=kind,
        blob_bytes=rows[at + tbl.BLOB_BYTES],
        namespace=rows[at + tbl.NAMESPACE],
        seconds=facts >> 32,
        reason=reason,
        parts=facts >> 16 & 0xFFFF,
    )


def live_records(table: Table) -> Iterator[bytes]:
    """Yield the records of everything that is ready or in quarantine, a segment at a time."""
    for segment in list(table.rows):
        states = table.states(segment)
        slots = np.flatnonzero((states == State.READY) | (states == State.QUARANTINED))
        if not len(slots):
            continue
        rows = table.columns(segment)[slots]
        facts = rows[:, tbl.FACTS]
        records = np.zeros(len(slots), rec.RECORD_DTYPE)
        records["tag_lo"] = rows[:, tbl.TAG_LO]
        records["tag_hi"] = rows[:, tbl.TAG_HI]
        records["generation"] = rows[:, tbl.GENERATION]
        records["segment"] = segment
        records["slot"] = slots
        records["blob_bytes"] = rows[:, tbl.BLOB_BYTES]
        records["namespace"] = rows[:, tbl.NAMESPACE]
        records["time"] = facts >> np.uint64(32)
        records["parts"] = facts >> np.uint64(16) & np.uint64(0xFFFF)
        records["reason"] = facts >> np.uint64(8) & np.uint64(0xFF)
        ready = states[slots] == State.READY
        records["kind"] = np.where(ready, rec.Kind.PUT, rec.Kind.QUARANTINE)
        sealed = bytearray(records.tobytes())
        rec.seal_records(memoryview(sealed))
        yield bytes(sealed)
