"""Change the order while moving: pages in the cache's order <-> canonical blobs, some heads or all.

One program moves a tile of lanes at a time. Which fragment a lane is of follows from its number by
constant divisors, so the order of tokens and heads in the cache is only a matter of strides. Reads and
writes are 16 bytes wide wherever the runs allow it; the blobs may be in device or in pinned memory.
"""

import torch
import triton
import triton.language as tl

from .budget import MAX_SMS
from .current_device import made_current
from .head_runs import HeadRuns

TILE_LANES = 1024
"""Lanes of a full tile: 16 KiB in flight per program with 16-byte lanes."""

NUM_WARPS = 8
"""Of one program: four lanes a thread, which keeps it below 64 registers (static report)."""

BLOCK_MASK = tl.constexpr((1 << 28) - 1)
"""The bits of an entry's first word that hold the block id; all set: a hole."""

_WORDS = {
    16: (tl.int64, 2),
    8: (tl.int64, 1),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}
"""Bytes of a lane -> the type of its words, and how many words it has."""


# one variant whatever the numbers are: nothing is compiled in the middle of serving
@triton.jit(do_not_specialize=["num_units", "num_tiles"])
def _move_heads_kernel(
    # [tiles, 8] int64, see HeadTiles
    tiles_ptr,
    # [N, 2] int64: block id, address of the block's bytes in its blob
    entries_ptr,
    num_units,
    num_tiles,
    FRAGMENT_LANES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    TILE_LANES: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    LANE_BYTES: tl.constexpr,
    TO_BLOB: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    lane_of_tile = tl.arange(0, TILE_LANES)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    for unit in range(program, num_units, num_programs):
        entry = entries_ptr + (unit // num_tiles) * 2
        tile = tiles_ptr + (unit % num_tiles) * 8
        block = tl.load(entry) & BLOCK_MASK
        page = tl.load(tile) + block * tl.load(tile + 1)
        blob = tl.load(entry + 1) + tl.load(tile + 2)
        span = tl.load(tile + 3)
        lane = (span & 0xFFFFFFFF).to(tl.int32) + lane_of_tile
        is_lane = (lane < (span >> 32).to(tl.int32)) & (block != BLOCK_MASK)
        group = lane // (FRAGMENT_LANES * FRAGMENTS)
        rest = lane % (FRAGMENT_LANES * FRAGMENTS)
        fragment = rest // FRAGMENT_LANES
        start = (rest % FRAGMENT_LANES) * LANE_BYTES
        local = page + group * tl.load(tile + 6) + fragment * tl.load(tile + 4) + start
        remote = blob + group * tl.load(tile + 7) + fragment * tl.load(tile + 5) + start
        # promises go on pointers: on an integer address they are lost
        local_ptr = tl.multiple_of(local.to(tl.pointer_type(WORD)), [LANE_BYTES, LANE_BYTES]) + word
        blob_ptr = tl.multiple_of(remote.to(tl.pointer_type(WORD)), [LANE_BYTES, LANE_BYTES]) + word
        if TO_BLOB:
            values = tl.load(local_ptr, mask=is_lane, eviction_policy="evict_first")
            tl.store(blob_ptr, values, mask=is_lane, cache_modifier=".cs")
        else:
            values = tl.load(blob_ptr, mask=is_lane, eviction_policy="evict_first")
            tl.store(local_ptr, values, mask=is_lane, cache_modifier=".cs")


def gather_heads(
    runs: HeadRuns,
    entries: torch.Tensor,
    *,
    head_first: int = 0,
    head_count: int | None = None,
    max_sms: int = MAX_SMS,
) -> None:
    """Copy heads of KV blocks out of the paged cache, into canonical blobs.

    The copy is enqueued on the current stream. Bytes of a blob that belong to heads outside the range,
    or to heads that this rank does not hold, keep what they held.

    Args:
        runs: where each head is, on both sides.
        entries: ``[N, 2]`` int64 on the device of *runs*: the block id in the low 28 bits of word 0
            (all set: a hole, which moves nothing), and the address of the block's ``runs.block_bytes``
            bytes in word 1, a multiple of ``runs.alignment``.
        head_first: the first head of the model to move.
        head_count: how many; None for all from *head_first* on.
        max_sms: programs at most, and so streaming multiprocessors.

    Raises:
        ValueError: as of ``HeadRuns.check_heads``. Nothing else is checked here.

    Units:
        Moves ``2 * N * block_bytes`` bytes at most (each byte read once, written once).

    Source:
        Meaning ``kernels/reference_heads.py::gather_heads``.
    """
    _launch(runs, entries, head_first, head_count, max_sms, to_blob=True)


def scatter_heads(
    runs: HeadRuns,
    entries: torch.Tensor,
    *,
    head_first: int = 0,
    head_count: int | None = None,
    max_sms: int = MAX_SMS,
) -> None:
    """Copy heads of canonical blobs into KV blocks of the paged cache.

    The inverse of :func:`gather_heads`: arguments, errors and units as there. A block must not be named
    twice: which of its two blobs wins is not defined.
    """
    _launch(runs, entries, head_first, head_count, max_sms, to_blob=False)


def _launch(
    runs: HeadRuns,
    entries: torch.Tensor,
    head_first: int,
    head_count: int | None,
    max_sms: int,
    *,
    to_blob: bool,
) -> None:
    tiles = runs.tiles(TILE_LANES, head_first, head_count)
    num_units = entries.shape[0] * tiles.count
    if not num_units:
        return
    word, words = _WORDS[tiles.lane_bytes]
    with made_current(runs.device):
        _move_heads_kernel[(min(num_units, max_sms),)](
            tiles.table,
            entries,
            num_units,
            tiles.count,
            FRAGMENT_LANES=tiles.fragment_lanes,
            FRAGMENTS=tiles.fragments,
            TILE_LANES=TILE_LANES,
            WORD=word,
            WORDS=words,
            LANE_BYTES=tiles.lane_bytes,
            TO_BLOB=to_blob,
            num_warps=NUM_WARPS,
        )
