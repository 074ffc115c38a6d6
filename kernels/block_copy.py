"""Copy blocks: pages of all layers and groups <-> one run of bytes per block, in one launch.

A unit of work is one tile of one block. Every program takes an equal run of units, walks it group by
group and block by block, and keeps as many bytes in flight as a tile has: the tile is loaded whole before
its first byte is stored, and the next tile's row is fetched in the meantime. A hole costs its program two
loads. Sources and destinations may be in device or in pinned host memory; their dtype never enters.

On the way a program can add up its share of each blob's checksum (`checksum.py`). Whoever finishes the
last tile of a blob writes the checksum, or compares it, raises the blob's flag, and leaves the workspace
as it was found.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .checksum import FOLD, KEY, SEED
from .current_device import made_current
from .table import MAX_UNITS, MIN_TILE_BYTES, LayoutTable

TURNS = 4
"""Words of the table's alignment that a thread has in flight: below 64 registers, checksum included."""

MAX_LANES = 1024
"""Threads of one program at most."""

NO_CHECKSUM, WRITE_CHECKSUM, COMPARE_CHECKSUM = 0, 1, 2
"""What a launch does about checksums."""


# one variant whatever the numbers and the places are: nothing is compiled in the middle of serving
@triton.jit(
    do_not_specialize=["num_units", "checksum_stride", "mismatch_stride", "done_stride"],
    do_not_specialize_on_alignment=["checksums_ptr", "mismatch_ptr", "done_ptr"],
)
def _copy_blocks_kernel(
    # [tiles, 4] int64: address in block 0, block stride, offset in the block, bytes | key << 32
    tiles_ptr,
    # [N, 2] int64: see table.py
    entries_ptr,
    # [G, 3] int64: entries, first tile, tiles of one block
    groups_ptr,
    # [G, 256] int32
    place_keys_ptr,
    # [B, 2] int64: sum so far, tiles so far; zeros before and after
    workspace_ptr,
    # [B] int64, [B] int32, [B] int32, strided
    checksums_ptr,
    mismatch_ptr,
    done_ptr,
    num_units,
    checksum_stride,
    mismatch_stride,
    done_stride,
    TO_BLOB: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    TURNS: tl.constexpr,
    LANES: tl.constexpr,
    CHECKSUM: tl.constexpr,
    HAS_DONE: tl.constexpr,
    FOLD: tl.constexpr,
    KEY: tl.constexpr,
    SEED: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # the first `extra` programs take one unit more
    share = num_units // programs
    extra = num_units - share * programs
    unit = program * share + tl.minimum(program, extra)
    left = share + tl.where(program < extra, 1, 0)

    # a word of 16 bytes is four 32-bit numbers, read and written at once
    number_bytes: tl.constexpr = WORD_BYTES if WORD_BYTES < 4 else 4
    if number_bytes == 4:
        number = tl.uint32
    elif number_bytes == 2:
        number = tl.uint16
    else:
        number = tl.uint8
    numbers: tl.constexpr = WORD_BYTES // number_bytes
    step = tl.arange(0, TURNS * LANES * numbers)
    if CHECKSUM:
        # four numbers are a vector, whatever the width of an access
        vector_turns: tl.constexpr = TURNS * WORD_BYTES // 16
        # computed, not loaded: loaded ones would be moved between layouts in every turn; those of the
        # turns are constants by the time the compiler is done
        turn = tl.arange(0, vector_turns)[:, None]
        lane = tl.arange(0, LANES)[None, :]
        lane_keys = tl.full((1, LANES), 1, tl.uint32)
        turn_keys = tl.full((vector_turns, 1), 1, tl.uint32)
        power = tl.full((), KEY, tl.uint32)
        for bit in tl.static_range(12):
            if 1 << bit < LANES:
                lane_keys = tl.where((lane >> bit) & 1 != 0, lane_keys * power, lane_keys)
            else:
                turn_keys = tl.where((turn * LANES >> bit) & 1 != 0, turn_keys * power, turn_keys)
            power = power * power

    while left > 0:
        count = tl.load(groups_ptr).to(tl.int32)
        tiles_of_block = tl.load(groups_ptr + 2).to(tl.int32)
        if unit < count * tiles_of_block:
            first_row = tiles_ptr + tl.load(groups_ptr + 1) * 4
            entry = unit // tiles_of_block
            tile = unit - entry * tiles_of_block
            entry_ptr = entries_ptr + entry.to(tl.int64) * 2
            of_group = tl.minimum(left, count * tiles_of_block - unit)
            left -= of_group
            unit += of_group
            while of_group > 0:
                num_tiles = tl.minimum(tiles_of_block - tile, of_group)
                of_group -= num_tiles
                word = tl.load(entry_ptr)
                blob_address = tl.load(entry_ptr + 1)
                entry_ptr += 2
                block = word & 0xFFFFFFF
                if block != 0xFFFFFFF:
                    row = first_row + tile * 4
                    address = tl.load(row)
                    stride = tl.load(row + 1)
                    offset = tl.load(row + 2)
                    size = tl.load(row + 3)
                    if CHECKSUM:
                        place = ((word >> 48) & 0xFF).to(tl.int32)
                        place_key = tl.load(place_keys_ptr + place).to(tl.uint32, bitcast=True)
                        block_keys = lane_keys * place_key
                        total = tl.full((LANES,), 0, tl.uint64)
                    todo = num_tiles
                    while todo > 0:
                        page = (address + block * stride).to(tl.pointer_type(number))
                        blob = (blob_address + offset).to(tl.pointer_type(number))
                        # promises go on pointers: on an integer address they are lost
                        page = tl.multiple_of(page, WORD_BYTES)
                        blob = tl.multiple_of(blob, WORD_BYTES)
                        limit = tl.multiple_of(size.to(tl.int32) // number_bytes, numbers)
                        is_inside = step < limit
                        source = page if TO_BLOB else blob
                        values = tl.load(
                            source + step, mask=is_inside, other=0, eviction_policy="evict_first"
                        )
                        if CHECKSUM:
                            row_keys = block_keys * (size >> 32).to(tl.uint32)
                        todo -= 1
                        row += tl.where(todo > 0, 4, 0)
                        address = tl.load(row)
                        stride = tl.load(row + 1)
                        offset = tl.load(row + 2)
                        size = tl.load(row + 3)
                        target = blob if TO_BLOB else page
                        tl.store(target + step, values, mask=is_inside, cache_modifier=".cs")
                        if CHECKSUM:
                            pairs = tl.reshape(values, (vector_turns, LANES, 2, 2))
                            even, odd = tl.split(pairs)
                            n0, n2 = tl.split(even)
                            n1, n3 = tl.split(odd)
                            digest = ((n3 * FOLD + n2) * FOLD + n1) * FOLD + n0
                            keys = row_keys * turn_keys
                            weighted = digest.to(tl.uint64) * keys.to(tl.uint64)
                            total += tl.reduce(weighted, 0, tl.standard._sum_combine)
                    if (CHECKSUM != 0) | HAS_DONE:
                        blob_id = ((word >> 28) & 0xFFFFF).to(tl.int32)
                        state_ptr = workspace_ptr + blob_id * 2
                        if CHECKSUM:
                            my_share = tl.reduce(total, 0, tl.standard._sum_combine)
                            tl.atomic_add(
                                state_ptr, my_share.to(tl.int64, bitcast=True), sem="relaxed"
                            )
                        # every thread's stores come before the count that says so
                        tl.debug_barrier()
                        before = tl.atomic_add(
                            state_ptr + 1, num_tiles.to(tl.int64), sem="acq_rel", scope="sys"
                        )
                        if before + num_tiles == ((word >> 56) & 0xFF) * tiles_of_block:
                            tl.atomic_xchg(state_ptr + 1, 0, sem="relaxed")
                            if CHECKSUM:
                                result = tl.atomic_xchg(state_ptr, 0, sem="relaxed") + SEED
                                value_ptr = checksums_ptr + blob_id.to(tl.int64) * checksum_stride
                                if CHECKSUM == 1:
                                    tl.store(value_ptr, result)
                                else:
                                    if result != tl.load(value_ptr):
                                        tl.store(
                                            mismatch_ptr + blob_id.to(tl.int64) * mismatch_stride, 1
                                        )
                            if HAS_DONE:
                                tl.debug_barrier()
                                tl.atomic_xchg(
                                    done_ptr + blob_id.to(tl.int64) * done_stride,
                                    1,
                                    sem="release",
                                    scope="sys",
                                )
                tile = 0
        unit -= count * tiles_of_block
        entries_ptr += count * 2
        groups_ptr += 3
        place_keys_ptr += 256


@dataclass(frozen=True, slots=True)
class Shape:
    """How a launch is cut.

    Attributes:
        word_bytes: of one access.
        lanes: threads of a program; each has ``TURNS`` words in flight.
        programs: at most.
    """

    word_bytes: int
    lanes: int
    programs: int

    @property
    def tile_bytes(self) -> int:
        """Bytes that a program has in flight."""
        return TURNS * self.lanes * self.word_bytes

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return self.lanes // 32


def choose_shape(alignment: int, largest_segment: int, max_sms: int, bytes_in_flight: int) -> Shape:
    """Cut a launch so that it stays within its budgets.

    Args:
        alignment: of the table, in bytes.
        largest_segment: of the table, in bytes: a larger tile would be empty at its end.
        max_sms: programs at most, and so streaming multiprocessors.
        bytes_in_flight: of all programs together; the smallest tile times one program is the least.
    """
    lanes = max(32, MIN_TILE_BYTES // (TURNS * alignment))
    tile = TURNS * alignment * lanes
    while lanes < MAX_LANES and 2 * tile * max_sms <= bytes_in_flight and tile < largest_segment:
        lanes, tile = 2 * lanes, 2 * tile
    return Shape(alignment, lanes, max(1, min(max_sms, bytes_in_flight // tile)))


def copy_blocks(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    *,
    to_blob: bool,
    max_sms: int,
    bytes_in_flight: int,
    checksums: torch.Tensor | None,
    mismatch: torch.Tensor | None,
    done: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Launch the kernel once; see `gather.py` and `scatter.py` for the arguments.

    Raises:
        ValueError: checksums of a table without whole vectors, or 2**31 tiles or more.
    """
    shape = choose_shape(table.alignment, table.largest_segment, max_sms, bytes_in_flight)
    tiles = table.tiles(shape.tile_bytes)
    if workspace is None and (checksums is not None or done is not None):
        num_blobs = max(len(each) for each in (checksums, done) if each is not None)
        workspace = torch.zeros((num_blobs, 2), dtype=torch.int64, device=table.device)
    units = sum(count * of_block for count, of_block in zip(counts, tiles.count, strict=True))
    if not units:
        return
    if units >= MAX_UNITS:
        raise ValueError(f"entries must be less than {MAX_UNITS} tiles together; got {units}")
    mode = NO_CHECKSUM
    if checksums is not None:
        if not table.has_whole_vectors or table.alignment < 4:
            raise ValueError(
                "checksums must be None for a layout whose sizes are not multiples of 16 bytes, or that "
                f"is not aligned to 4; got {table.alignment} bytes of alignment"
            )
        mode = WRITE_CHECKSUM if to_blob else COMPARE_CHECKSUM
    with made_current(table.device):
        _copy_blocks_kernel[(min(units, shape.programs),)](
            tiles.keyed,
            entries,
            tiles.groups(counts),
            table.place_keys,
            # a pointer that is not followed must still be one
            entries if workspace is None else workspace,
            entries if checksums is None else checksums,
            entries if mismatch is None else mismatch,
            entries if done is None else done,
            units,
            0 if checksums is None else checksums.stride(0),
            0 if mismatch is None else mismatch.stride(0),
            0 if done is None else done.stride(0),
            TO_BLOB=to_blob,
            WORD_BYTES=shape.word_bytes,
            TURNS=TURNS,
            LANES=shape.lanes,
            CHECKSUM=mode,
            HAS_DONE=done is not None,
            FOLD=FOLD,
            KEY=KEY,
            SEED=SEED,
            num_warps=shape.num_warps,
        )
