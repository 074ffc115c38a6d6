"""Which kernels for tokens, heads and quantised rows the models of `models.py` need; see `static_variants.py`.

The constants are those that the launchers choose: layouts of the models' shapes are made on the CPU, and the same
functions are asked.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kvferry.kernels import heads as head_kernels
from kvferry.kernels import quantized as quantized_kernels
from kvferry.kernels import slots as slot_kernels
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kernels.slot_pieces import DIVISOR_BITS, TILE_LANES, slot_pieces

from .models import BF16, MODELS, Group
from .static_variants import Variant

TP_SIZE = 4
"""Ranks that share a blob in canonical order."""


def token_groups() -> dict[tuple[Any, ...], Group]:
    """Return the groups that hold tokens, one of each shape."""
    groups = (group for model in MODELS for group in model.groups if group.block_size)
    return {(g.block_size, g.num_kv_heads, g.head_dim, g.page_bytes): g for g in groups}


def rows_of(group: Group, layers: int = 2) -> RowLayout:
    """Return the tokens of a small cache of a group's shape, as vLLM lays it out by default (LBNHC)."""
    if not group.num_kv_heads:
        widths = [page // group.block_size for page in group.page_bytes]
        # a latent of numbers is one of bytes, too, where only its size matters
        dtype = torch.bfloat16 if widths == [576 * BF16] else torch.uint8
        shapes = [(2, group.block_size, width // dtype.itemsize) for width in widths * layers]
        return RowLayout.from_views([torch.zeros(shape, dtype=dtype) for shape in shapes], "latent")
    shape = 2, group.block_size, group.num_kv_heads, 2 * group.head_dim
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]
    return RowLayout.from_views([cache.transpose(1, 2) for cache in caches], "bhnc")


def slots() -> Iterator[Variant]:
    """Tokens by slot, of every block size; rows padded to 16 bytes, so that what can be wide is."""
    seen = set()
    for group in token_groups().values():
        rows = rows_of(group)
        lanes = tuple(pieces.lane_bytes for pieces in slot_pieces(rows, 0, 16))
        if (group.block_size, lanes) in seen:
            continue
        seen.add((group.block_size, lanes))
        words = [slot_kernels._WORDS[nbytes] for nbytes in lanes]
        for to_rows in (True, False):
            name = f"{'gather' if to_rows else 'scatter'} slots, blocks of {group.block_size}"
            if len(lanes) > 1:
                name += f", lanes of {lanes[0]} and {lanes[1]} bytes"
            yield Variant(
                name,
                slot_kernels._move_slots_kernel,
                dict.fromkeys(["wide_ptr", "narrow_ptr", "slots_ptr"], "*i64")
                | {"rows_ptr": "*u8"}
                | dict.fromkeys(
                    ["num_tokens", "row_stride", "wide_count", "wide_tokens", "narrow_count", "narrow_tokens"], "i32"
                ),
                {
                    "BLOCK_SIZE": group.block_size, "TILE_LANES": TILE_LANES, "DIVISOR_BITS": DIVISOR_BITS,
                    "LANE_BYTES": lanes, "WORD": tuple(word for word, _ in words),
                    "WORDS": tuple(count for _, count in words), "TO_ROWS": to_rows,
                },
                slot_kernels.NUM_WARPS,
                ("wide_ptr", "narrow_ptr", "slots_ptr", "rows_ptr"),
                data_bits=8 * min(lanes),
                quick=group.block_size == 64,
                amd=lanes == (16,),
            )  # fmt: skip


def heads() -> Iterator[Variant]:
    """Pages of one rank to blobs of several ranks, and to blobs of its own."""
    seen = set()
    for group in token_groups().values():
        for ranks in (1, TP_SIZE) if group.num_kv_heads else (1,):
            total = ranks * group.num_kv_heads or None
            runs = HeadRuns.from_rows(rows_of(group), total_heads=total)
            tiles = runs.tiles(head_kernels.TILE_LANES)
            shape = tiles.fragments, tiles.fragment_lanes, tiles.lane_bytes
            if shape in seen:
                continue
            seen.add(shape)
            word, words = head_kernels._WORDS[tiles.lane_bytes]
            for to_blob in (True, False):
                verb = "gather" if to_blob else "scatter"
                yield Variant(
                    f"{verb} heads, {shape[0]} x {shape[1]} lanes of {shape[2]} bytes",
                    head_kernels._move_heads_kernel,
                    {"tiles_ptr": "*i64", "entries_ptr": "*i64", "num_units": "i32", "num_tiles": "i32"},
                    {
                        "FRAGMENT_LANES": tiles.fragment_lanes, "FRAGMENTS": tiles.fragments,
                        "TILE_LANES": head_kernels.TILE_LANES, "WORD": word, "WORDS": words,
                        "LANE_BYTES": tiles.lane_bytes, "TO_BLOB": to_blob,
                    },
                    head_kernels.NUM_WARPS,
                    ("tiles_ptr", "entries_ptr"),
                    data_bits=8 * tiles.lane_bytes,
                    quick=shape[0] == 16 and to_blob,
                    amd=shape[0] == 16,
                )  # fmt: skip


def quantized() -> Iterator[Variant]:
    """Rows of bf16 to codes and scales, and back; a latent has one scale, or one for every 64 numbers."""
    types = {"pieces_ptr": "*i64", "entries_ptr": "*i64"}
    types |= dict.fromkeys(["num_units", "tiles_per_block", "rows_per_block"], "i32")
    entries = torch.zeros(1, 2, dtype=torch.int64)
    seen = set()
    for group in token_groups().values():
        rows = rows_of(group)
        if {part.dtype for part in rows.parts} != {torch.bfloat16}:
            continue
        for width in (None,) if group.num_kv_heads else (None, 64):
            table = QuantizedRows.from_rows(rows, width=width)
            _, _, constants = quantized_kernels._plan(table, entries, 1)
            key = table.width, table.block_size
            if key in seen:
                continue
            seen.add(key)
            smallest, largest = quantized_kernels._FIELDS[table.dtype]
            name = f"rows of {table.width}, blocks of {table.block_size}"
            yield Variant(
                f"gather quantized, {name}",
                quantized_kernels._gather_quantized_kernel,
                types,
                {**constants, "MIN_FIELD": smallest, "MAX_FIELD": largest},
                quantized_kernels.NUM_WARPS,
                tuple(types)[:2],
                max_registers=quantized_kernels.MAX_REGISTERS,
                options={"maxnreg": quantized_kernels.MAX_REGISTERS},
                quick=key == (128, 16),
            )
            yield Variant(
                f"scatter dequantized, {name}",
                quantized_kernels._scatter_dequantized_kernel,
                types,
                constants,
                quantized_kernels.NUM_WARPS,
                tuple(types)[:2],
                quick=key == (128, 16),
            )
