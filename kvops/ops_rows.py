"""The operators that know tokens and heads, as functions; ``kvops/ops.py`` has those for whole blocks."""

from typing import Any

from kvferry.kernels.budget import MAX_SMS

from .arrays import as_tensor, caches_of, handle_of
from .registered_rows import RegisteredHeads, RegisteredQuantized, RegisteredRows
from .row_ops import (
    GATHER_HEADS,
    GATHER_QUANTIZED,
    GATHER_SLOTS,
    SCATTER_DEQUANTIZED,
    SCATTER_HEADS,
    SCATTER_SLOTS,
)


def gather_slots(
    layout: RegisteredRows, slot_mapping: Any, rows: Any, *, max_sms: int = MAX_SMS
) -> None:
    """Copy tokens of all layers out of the paged cache, into rows.

    ``rows[i]`` receives the token in slot ``slot_mapping[i]`` (``kernels/rows.py`` has the order of a
    row). On a device this is one launch, enqueued on the current stream: *rows* may be read once that
    stream has passed. On the host it is done when the call returns.

    Args:
        layout: of ``register_rows``. Its cache is only read.
        slot_mapping: ``block_id * block_size + offset`` of each token, ``[T]`` int64, contiguous, on the
            layout's device, repeats allowed. ``-1`` is a hole: its row keeps what it held. On the host
            every slot is checked; on a device that would take a wait, and a slot that does not exist
            is an access out of bounds.
        rows: destination, ``[T, row_bytes]`` uint8, bytes of a row adjacent, any stride between rows,
            on the device or in pinned host memory. Bytes between rows keep what they held.
        max_sms: most streaming multiprocessors to take; a host ignores it.

    Returns:
        Nothing; *rows* is written in place.

    Raises:
        ValueError: an argument differs from the above, or *rows* overlaps the cache. No byte has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Moves ``2 * T * row_bytes`` bytes (each byte read once, written once).

    Source:
        Kernel ``kernels/slots.py``; on the host ``kernels/host_slots.py``; meaning
        ``kernels/reference_heads.py::gather_slots``; measured by ``perf/bench_slots.py``.

    Example:
        >>> rows = torch.empty(2, layout.rows.row_bytes, dtype=torch.uint8)  # doctest: +SKIP
        >>> gather_slots(layout, torch.tensor([16, 3]), rows)  # doctest: +SKIP
    """
    GATHER_SLOTS(
        handle_of(layout), caches_of(layout), as_tensor("slot_mapping", slot_mapping),
        as_tensor("rows", rows), max_sms,
    )  # fmt: skip


def scatter_slots(
    layout: RegisteredRows, slot_mapping: Any, rows: Any, *, max_sms: int = MAX_SMS
) -> None:
    """Copy rows into tokens of all layers of the paged cache: the inverse of ``gather_slots``.

    Slot ``slot_mapping[i]`` receives ``rows[i]``. On a device this is one launch, enqueued on the current
    stream. On the host it is done when the call returns.

    Args:
        layout: of ``register_rows``. Bytes of its cache that belong to no named slot keep what they
            held.
        slot_mapping: ``[T]`` int64, contiguous, on the layout's device; ``-1`` moves nothing. No slot
            twice: on a host that is checked, on a device the winner is not defined.
        rows: source, ``[T, row_bytes]`` uint8, as of ``gather_slots``. Only read.
        max_sms: most streaming multiprocessors to take; a host ignores it.

    Returns:
        Nothing; the cache is written in place.

    Raises:
        ValueError: an argument differs from the above, or *rows* overlaps the cache. No byte has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Moves ``2 * T * row_bytes`` bytes (each byte read once, written once).

    Source:
        Kernel ``kernels/slots.py``; on the host ``kernels/host_slots.py``; meaning
        ``kernels/reference_heads.py::scatter_slots``; measured by ``perf/bench_slots.py``.

    Example:
        >>> scatter_slots(layout, torch.tensor([16, 3]), rows)  # doctest: +SKIP
    """
    SCATTER_SLOTS(
        handle_of(layout), caches_of(layout), as_tensor("slot_mapping", slot_mapping),
        as_tensor("rows", rows), max_sms,
    )  # fmt: skip


def gather_heads(
    layout: RegisteredHeads,
    block_ids: Any,
    blobs: Any,
    offsets: Any,
    *,
    head_first: int = 0,
    head_count: int | None = None,
    max_sms: int = MAX_SMS,
) -> None:
    """Copy heads of KV blocks out of the paged cache, into blobs in canonical order.

    Block ``block_ids[i]`` goes to ``blobs[offsets[i]:]``, each head where the whole model's heads are
    (``kernels/head_runs.py``), so that ranks of any number fill, and read, the same blob. On a device
    this is one launch, enqueued on the current stream. On the host it is done when the call returns.

    Args:
        layout: of ``register_heads``. Its cache is only read.
        block_ids: which blocks, ``[N]`` int64 on the host, repeats allowed. ``-1`` is a hole: its bytes
            in *blobs* keep what they held.
        blobs: destination, ``[bytes]`` uint8, contiguous, on the device, in pinned host memory, or, for
            a cache in host memory, any. Heads that do not move keep what they held.
        offsets: where each block's share starts in *blobs*, ``[N]`` int64 on the host. Shares must not
            overlap; addresses are multiples of the runs' alignment (at most 16).
        head_first: the first KV head of the model to move.
        head_count: how many; all from *head_first* on if None. Heads that this rank does not hold do
            not move. A latent has no heads and always moves.
        max_sms: most streaming multiprocessors to take; a host ignores it.

    Returns:
        Nothing; *blobs* is written in place.

    Raises:
        ValueError: an argument differs from the above, or an id or an offset is out of range. No byte
            has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Moves ``2 * block_bytes`` bytes for each block at most (each byte read once, written once).

    Source:
        Kernel ``kernels/heads.py``; on the host ``kernels/host_heads.py``; meaning
        ``kernels/reference_heads.py::gather_heads``; measured by ``perf/bench_heads.py``.

    Example:
        >>> runs = HeadRuns.from_rows(rows, total_heads=8, head_first=2)  # doctest: +SKIP
        >>> layout = register_heads(runs)  # doctest: +SKIP
        >>> gather_heads(layout, torch.tensor([5]), blobs, torch.tensor([0]))  # doctest: +SKIP
    """
    GATHER_HEADS(
        handle_of(layout), caches_of(layout), as_tensor("block_ids", block_ids),
        as_tensor("blobs", blobs), as_tensor("offsets", offsets), head_first, head_count, max_sms,
    )  # fmt: skip


def scatter_heads(
    layout: RegisteredHeads,
    block_ids: Any,
    blobs: Any,
    offsets: Any,
    *,
    head_first: int = 0,
    head_count: int | None = None,
    max_sms: int = MAX_SMS,
) -> None:
    """Copy heads of canonical blobs into KV blocks of the paged cache: the inverse of ``gather_heads``.

    Args:
        layout: of ``register_heads``. Bytes of its cache that do not move keep what they held.
        block_ids: which blocks, ``[N]`` int64 on the host, none twice. ``-1`` moves nothing.
        blobs: source, ``[bytes]`` uint8, as of ``gather_heads``. Only read.
        offsets: where each block's share starts in *blobs*, ``[N]`` int64 on the host; overlaps are
            allowed.
        head_first: the first KV head of the model to move.
        head_count: how many; all from *head_first* on if None.
        max_sms: most streaming multiprocessors to take; a host ignores it.

    Returns:
        Nothing; the cache is written in place.

    Raises:
        ValueError: an argument differs from the above, or an id or an offset is out of range. No byte
            has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Moves ``2 * block_bytes`` bytes for each block at most (each byte read once, written once).

    Source:
        Kernel ``kernels/heads.py``; on the host ``kernels/host_heads.py``; meaning
        ``kernels/reference_heads.py::scatter_heads``; measured by ``perf/bench_heads.py``.

    Example:
        >>> scatter_heads(layout, torch.tensor([5]), blobs, torch.tensor([0]))  # doctest: +SKIP
    """
    SCATTER_HEADS(
        handle_of(layout), caches_of(layout), as_tensor("block_ids", block_ids),
        as_tensor("blobs", blobs), as_tensor("offsets", offsets), head_first, head_count, max_sms,
    )  # fmt: skip


def gather_quantized(
    layout: RegisteredQuantized,
    block_ids: Any,
    blobs: Any,
    offsets: Any,
    *,
    max_sms: int = MAX_SMS,
) -> None:
    """Quantise KV blocks of the paged cache into blobs of fp8 codes and fp32 scales.

    Block ``block_ids[i]`` goes to ``blobs[offsets[i]:]``: e4m3 codes, and one scale, a power of two, for
    each row of numbers (``kernels/quantized_rows.py``). Of a finite number x half a step is lost at most,
    ``scale * 2 ** (max(floor(log2(abs(x) / scale)), -6) - 4)``, and a step where x would round to an
    infinity of its type; NaN and infinities come back as NaN. On a device this is one launch, enqueued
    on the current stream. On the host it is done when the call returns. Both make the same bits.

    Args:
        layout: of ``register_quantized``: a bfloat16 or float16 cache, which is only read.
        block_ids: which blocks, ``[N]`` int64 on the host, repeats allowed. ``-1`` is a hole: its bytes
            in *blobs* keep what they held.
        blobs: destination, ``[bytes]`` uint8, contiguous, on the device, in pinned host memory, or, for
            a cache in host memory, any.
        offsets: where each block's share starts in *blobs*, ``[N]`` int64 on the host. Shares must not
            overlap; addresses are multiples of the rows' alignment (4 to 16).
        max_sms: most streaming multiprocessors to take; a host ignores it.

    Returns:
        Nothing; *blobs* is written in place.

    Raises:
        ValueError: an argument differs from the above, or an id or an offset is out of range. No byte
            has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Reads ``2 * width`` bytes a row and writes ``width + 4``.

    Source:
        Kernel ``kernels/quantized.py``; on the host ``kernels/host_quantized.py``; meaning
        ``kernels/reference_quantized.py::gather_quantized``; measured by ``perf/bench_quantized.py``.

    Example:
        >>> layout = register_quantized(QuantizedRows.from_rows(rows))  # doctest: +SKIP
        >>> gather_quantized(layout, torch.tensor([5]), blobs, torch.tensor([0]))  # doctest: +SKIP
    """
    GATHER_QUANTIZED(
        handle_of(layout), caches_of(layout), as_tensor("block_ids", block_ids),
        as_tensor("blobs", blobs), as_tensor("offsets", offsets), max_sms,
    )  # fmt: skip


def scatter_dequantized(
    layout: RegisteredQuantized,
    block_ids: Any,
    blobs: Any,
    offsets: Any,
    *,
    max_sms: int = MAX_SMS,
) -> None:
    """Bring blobs of fp8 codes and fp32 scales back into KV blocks: the inverse of ``gather_quantized``.

    Args:
        layout: of ``register_quantized``. Bytes of its cache outside the named blocks keep what they
            held.
        block_ids: which blocks, ``[N]`` int64 on the host, none twice. ``-1`` moves nothing.
        blobs: source, ``[bytes]`` uint8, made by ``gather_quantized``; only read. Scales are trusted: of
            its making, every product is a number of the cache's type, and nothing is rounded.
        offsets: where each block's share starts in *blobs*, ``[N]`` int64 on the host; overlaps are
            allowed.
        max_sms: most streaming multiprocessors to take; a host ignores it.

    Returns:
        Nothing; the cache is written in place.

    Raises:
        ValueError: an argument differs from the above, or an id or an offset is out of range. No byte
            has moved.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Ownership:
        The memory stays the caller's. It must live, and not change, until the stream has passed.

    Units:
        Reads ``width + 4`` bytes a row and writes ``2 * width``.

    Source:
        Kernel ``kernels/quantized.py``; on the host ``kernels/host_quantized.py``; meaning
        ``kernels/reference_quantized.py::scatter_dequantized``; measured by
        ``perf/bench_quantized.py``.

    Example:
        >>> scatter_dequantized(layout, torch.tensor([5]), blobs, torch.tensor([0]))  # doctest: +SKIP
    """
    SCATTER_DEQUANTIZED(
        handle_of(layout), caches_of(layout), as_tensor("block_ids", block_ids),
        as_tensor("blobs", blobs), as_tensor("offsets", offsets), max_sms,
    )  # fmt: skip
