"""Find and hold many slots at once: what a small blob costs is the interpreter, so calls are few and the loop is flat.

Same effects as find, :meth:`Slots.hold` and place_of one after the other, under the same lock.
"""

from collections.abc import Sequence

from . import format as disk
from . import table as tbl
from .places import Place
from .segments import Segments
from .slots import Slots
from .table import State


def hold_ready(
    slots: Slots, segments: Segments, tags: Sequence[tuple[int, int]]
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
        if facts & 0xFF != State.READY:
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
