"""What happens to a slot between begin and end, for many at once under one lock.

What a small blob costs is the interpreter, and every blob comes by here twice: so calls are few and the loops are flat.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from . import format as disk
from . import records as rec
from . import table as tbl
from .places import Answer, Place, Refusal, Tag
from .segments import Segments
from .slots import SlotClass, Slots
from .table import State

# plain numbers: an enum costs more to compare with than the rest of a line
_SAVING, _READY, _DOOMED = int(State.SAVING), int(State.READY), int(State.DOOMED)


def list_saves(
    slots: Slots,
    classes: Mapping[tuple[int, int], SlotClass],
    wanted: Sequence[tuple[Tag, int]],
    parts: int,
    take_generation: Callable[[], int],
    answers: list[Answer],
) -> None:
    """Give free slots to blobs, which are listed and not yet to be loaded; stop at one for which there is none at hand.

    Args:
        slots: all.
        classes: by bytes and parts of a blob.
        wanted: a tag, and its blob's bytes, for each save.
        parts: of the blobs.
        take_generation: returns one that no save ever had.
        answers: to the first of *wanted*; a place, or why the blob is not to be saved, is appended for each further one.
    """
    table = slots.table
    find, insert, all_rows = table.find, table.insert, table.rows
    for tag, blob_bytes in itertools.islice(wanted, len(answers), None):
        entry = find(tag)
        if entry >= 0:
            is_saving = slots.facts(entry)[0] == _SAVING
            answers.append(Refusal.PENDING if is_saving else Refusal.EXISTS)
            continue
        slot_class = classes.get((blob_bytes, parts))
        if slot_class is None or not slot_class.open_segments:
            return
        segment = slot_class.open_segments[-1]
        if segment.fd < 0:
            return
        block, slot = segment.block, segment.next_free - 1
        number = block.segment
        rows, at = all_rows[number], slot * tbl.ROW_WORDS
        segment.next_free = rows[at]
        segment.free -= 1
        if not segment.free:
            slot_class.open_segments.pop()
        segment.held += 1
        entry = number << tbl.SLOT_BITS | slot
        # what makes a row match comes last
        rows[at + tbl.FACTS] = parts << 16 | _SAVING
        rows[at + tbl.USE] = 0
        rows[at + tbl.GENERATION] = generation = take_generation()
        rows[at + tbl.BLOB_BYTES] = blob_bytes
        rows[at + tbl.TAG_LO], rows[at + tbl.TAG_HI] = tag
        insert(entry)
        answers.append(
            Place(
                entry, number, slot, segment.fd, disk.SUPERBLOCK_BYTES + slot * block.slot_bytes, block.header_bytes,
                blob_bytes, generation, tag, parts,
            )
        )  # fmt: skip


def check_saving(slots: Slots, place: Place) -> None:
    """Refuse a place that is not being saved to.

    Raises:
        ValueError: it was ended, or it was for a load.
    """
    rows, at = slots.table.rows.get(place.segment), place.slot * tbl.ROW_WORDS
    if rows is None or (rows[at + tbl.FACTS] & 0xFF, rows[at + tbl.GENERATION]) != (
        _SAVING, place.generation,
    ):  # fmt: skip
        raise ValueError(f"place must be one that begin_save returned, not ended yet; got {place}")


def put_records(
    slots: Slots, saved: Sequence[tuple[Place, bytes]], tags: Mapping[bytes, int], seconds: int
) -> dict[int, bytes]:
    """Return the journal records of blobs that were saved, by entry.

    Args:
        slots: all.
        saved: each place, with the namespace of its blob.
        tags: of the namespaces.
        seconds: Unix time.

    Raises:
        ValueError: a place is not being saved to.
    """
    pack = rec.pack_put
    puts = {}
    for place, namespace in saved:
        check_saving(slots, place)
        puts[place.entry] = pack(place, tags[namespace], seconds)
    return puts


def publish(
    slots: Slots, saved: Sequence[tuple[Place, bytes]], tags: Mapping[bytes, int], seconds: int
) -> None:
    """Let blobs be loaded that were saved; arguments as for :func:`put_records`."""
    all_rows, segments = slots.table.rows, slots.segments
    tick, num_bytes = slots.tick, 0
    for place, namespace in saved:
        number = place.segment
        rows, at, segment = all_rows[number], place.slot * tbl.ROW_WORDS, segments[number]
        tick += 1
        rows[at + tbl.NAMESPACE] = tags[namespace]
        rows[at + tbl.USE] = tick << tbl.TICK_SHIFT
        rows[at + tbl.FACTS] = seconds << 32 | place.parts << 16 | _READY
        segment.ready += 1
        segment.held -= 1
        segment.ticks += tick
        num_bytes += place.blob_bytes
    slots.tick = tick
    slots.blobs += len(saved)
    slots.blob_bytes += num_bytes
    slots.changes += 1


def hold_ready(
    slots: Slots, segments: Segments, tags: Sequence[Tag]
) -> list[Place | OSError | None]:
    """Hold the slot of each blob that can be loaded; None for others, the error where a segment can't be opened."""
    table, by_number = slots.table, slots.segments
    find, all_rows = table.find, table.rows
    out: list[Place | OSError | None] = []
    for tag in tags:
        entry = find(tag)
        if entry < 0:
            out.append(None)
            continue
        number, slot = entry >> tbl.SLOT_BITS, entry & tbl.SLOT_MASK
        rows, at = all_rows[number], slot * tbl.ROW_WORDS
        facts = rows[at + tbl.FACTS]
        if facts & 0xFF != _READY:
            out.append(None)
            continue
        segment = by_number[number]
        fd = segment.fd
        if fd < 0:
            try:
                fd = segments.fd(segment)
            except OSError as error:
                out.append(error)
                continue
        use = rows[at + tbl.USE]
        slots.tick = tick = slots.tick + 1
        segment.ticks += tick - (use >> tbl.TICK_SHIFT)
        rows[at + tbl.USE] = (tick << tbl.TICK_SHIFT | tbl.CHANCE | use & tbl.HOLDS_MASK) + 1
        segment.held += 1
        block = segment.block
        out.append(
            Place(
                entry, number, slot, fd, disk.SUPERBLOCK_BYTES + slot * block.slot_bytes, block.header_bytes,
                rows[at + tbl.BLOB_BYTES], rows[at + tbl.GENERATION], tag, facts >> 16 & 0xFFFF,
            )
        )  # fmt: skip
    return out


def let_go(slots: Slots, places: Iterable[Place]) -> None:
    """Undo one hold of each slot; one that was unlisted meanwhile is free when nobody holds it."""
    all_rows, segments = slots.table.rows, slots.segments
    for place in places:
        rows, at = all_rows[place.segment], place.slot * tbl.ROW_WORDS
        rows[at + tbl.USE] = use = rows[at + tbl.USE] - 1
        segments[place.segment].held -= 1
        if rows[at + tbl.FACTS] & 0xFF == _DOOMED and not use & tbl.HOLDS_MASK:
            slots.free(place.entry)
    slots.changes += 1
