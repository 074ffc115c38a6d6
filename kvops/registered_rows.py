"""Registered caches as the operators for tokens, heads and quantised blocks know them.

Like ``registered.py``, whose handles and rules they share, for layouts that know what the bytes mean.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.host_heads import HostHeads
from kvferry.kernels.host_quantized import HostQuantized
from kvferry.kernels.host_slots import HostSlots
from kvferry.kernels.layout import refuse_copy
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout

from .registered import HANDLES, Memory, Registry, Span


class RegisteredRows:
    """The tokens of one KV cache group.

    Ownership:
        Whoever registered it holds it; its handle is good until it is gone. Keeps the cache alive.

    Attributes:
        handle: the ``layout`` argument of the operators for tokens.
        rows: where the bytes of a token are.
        memory: the storages, and which bytes of them are in use.
        caches: the storages as flat tensors: the ``caches`` argument.
        mover: what moves it in host memory; None on another device.
    """

    __slots__ = ("__weakref__", "caches", "handle", "memory", "mover", "rows")

    __reduce_ex__ = refuse_copy

    def __init__(self, rows: RowLayout, handle: int) -> None:
        self.handle, self.rows = handle, rows
        last = rows.num_blocks - 1, rows.block_size - 1
        spans = [
            (
                p.base_address,
                p.base_address + last[0] * p.block_stride + last[1] * p.token_stride + p.nbytes,
            )
            for p in rows.pieces
        ]
        self.memory = Memory(rows.tensors, spans, rows.device)
        self.caches = self.memory.caches
        self.mover = HostSlots(rows) if rows.device.type == "cpu" else None

    def on(self, caches: Sequence[torch.Tensor]) -> "RegisteredRows":
        """Return the same rows on *caches*: itself if they are the registered ones, or none."""
        if not caches or self.memory.is_here(caches):
            return self
        moved = [self.memory.moved(piece.base_address, caches) for piece in self.rows.pieces]
        pieces = tuple(
            replace(piece, base_address=address)
            for piece, address in zip(self.rows.pieces, moved, strict=True)
        )
        table = self.rows.table.clone()
        table[:, 0] = torch.tensor(moved, dtype=torch.int64)
        rows = replace(self.rows, pieces=pieces, tensors=tuple(caches), table=table)
        return RegisteredRows(rows, self.handle)


class RegisteredHeads:
    """The heads of one KV cache group on one rank; attributes as of ``RegisteredRows``."""

    __slots__ = ("__weakref__", "caches", "handle", "memory", "mover", "runs")

    __reduce_ex__ = refuse_copy

    def __init__(self, runs: HeadRuns, handle: int) -> None:
        self.handle, self.runs = handle, runs
        spans: list[Span] = []
        for run in runs.runs:
            reach = (run.num_fragments - 1) * run.local_stride
            end = run.base_address + (runs.num_blocks - 1) * run.block_stride + run.fragment_bytes
            spans.append((run.base_address + min(reach, 0), end + max(reach, 0)))
        self.memory = Memory(runs.tensors, spans, runs.device)
        self.caches = self.memory.caches
        self.mover = HostHeads(runs) if runs.device.type == "cpu" else None

    def on(self, caches: Sequence[torch.Tensor]) -> "RegisteredHeads":
        """Return the same heads on *caches*: itself if they are the registered ones, or none."""
        if not caches or self.memory.is_here(caches):
            return self
        moved = (
            replace(run, base_address=self.memory.moved(run.base_address, caches))
            for run in self.runs.runs
        )
        runs = HeadRuns(
            moved, tuple(caches), num_blocks=self.runs.num_blocks,
            block_bytes=self.runs.block_bytes, total_heads=self.runs.total_heads,
        )  # fmt: skip
        return RegisteredHeads(runs, self.handle)


class RegisteredQuantized:
    """The rows of numbers of one KV cache group; attributes as of ``RegisteredRows``."""

    __slots__ = ("__weakref__", "caches", "handle", "memory", "mover", "rows")

    __reduce_ex__ = refuse_copy

    def __init__(self, rows: QuantizedRows, handle: int) -> None:
        self.handle, self.rows = handle, rows
        nbytes = rows.width * rows.dtype.itemsize
        spans = [
            (
                base,
                base + (rows.num_blocks - 1) * block + (rows.block_size - 1) * token + nbytes,
            )
            for base, block, token, _, _ in rows.table.tolist()
        ]
        self.memory = Memory(rows.tensors, spans, rows.device)
        self.caches = self.memory.caches
        self.mover = HostQuantized(rows) if rows.device.type == "cpu" else None

    def on(self, caches: Sequence[torch.Tensor]) -> "RegisteredQuantized":
        """Return the same rows on *caches*: itself if they are the registered ones, or none."""
        if not caches or self.memory.is_here(caches):
            return self
        table = self.rows.table.clone()
        moved = [self.memory.moved(address, caches) for address in table[:, 0].tolist()]
        table[:, 0] = torch.tensor(moved, dtype=torch.int64)
        rows = replace(self.rows, table=table, tensors=tuple(caches))
        return RegisteredQuantized(rows, self.handle)


ROWS: Registry[RegisteredRows] = Registry("registered rows that still exist")
HEADS: Registry[RegisteredHeads] = Registry("registered heads that still exist")
QUANTIZED: Registry[RegisteredQuantized] = Registry("registered quantised rows that still exist")


def register_rows(rows: RowLayout) -> RegisteredRows:
    """Make the tokens of a KV cache group known to ``gather_slots`` and ``scatter_slots``.

    Returns:
        What they take as ``layout``. They stop knowing it when the last reference is gone.

    Raises:
        ValueError: *rows* is no ``RowLayout``, or does not keep the tensors that its pieces are in.
    """
    if not isinstance(rows, RowLayout):
        raise ValueError(f"rows must be a RowLayout; got {type(rows).__name__}")
    made = RegisteredRows(rows, next(HANDLES))
    ROWS.add(made.handle, made)
    return made


def register_heads(runs: HeadRuns) -> RegisteredHeads:
    """Make the heads of a KV cache group known to ``gather_heads`` and ``scatter_heads``.

    Returns:
        What they take as ``layout``. They stop knowing it when the last reference is gone.

    Raises:
        ValueError: *runs* are no ``HeadRuns``, or do not keep the tensors that they are in.
    """
    if not isinstance(runs, HeadRuns):
        raise ValueError(f"runs must be a HeadRuns; got {type(runs).__name__}")
    made = RegisteredHeads(runs, next(HANDLES))
    HEADS.add(made.handle, made)
    return made


def register_quantized(rows: QuantizedRows) -> RegisteredQuantized:
    """Make a KV cache group known to ``gather_quantized`` and ``scatter_dequantized``.

    Returns:
        What they take as ``layout``. They stop knowing it when the last reference is gone.

    Raises:
        ValueError: *rows* are no ``QuantizedRows``, or do not keep the tensors that they are in.
    """
    if not isinstance(rows, QuantizedRows):
        raise ValueError(f"rows must be a QuantizedRows; got {type(rows).__name__}")
    made = RegisteredQuantized(rows, next(HANDLES))
    QUANTIZED.add(made.handle, made)
    return made
