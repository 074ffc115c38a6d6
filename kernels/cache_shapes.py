"""Block layouts of what engines allocate: from cache tensors, or from a table of offsets.

A cache tensor has one axis of blocks; the bytes of a block are all the others. They go into the blob
as they lie in memory, the order of the tensor's other axes put aside:

    cache of one layer                               block axis    runs of a block
    ---------------------------------------------    ----------    ----------------------------
    [NB, H, BS, C]   LBNHC, LBHNC, BLNHC, BLHNC      0             one
    [NB, H, BS, C]   LHBNC, BHLNC (heads apart)      0             H
    [NB, 2, BS, H, D]                                0             one
    [2, NB, BS, H, D]                                1             two: K, V
    [NB, 1, BS, C], [NB, BS, C] (MLA, indexer)       0             one
    [NB, BS, H], [NB, ...] (scales, a state)         0             one

Order of the bytes of a block in the blob:

* **layer-major** caches: [tensor, in the group's order][byte, in order of memory]
* **block-major** caches (BLNHC, BLHNC, BHLNC): where the runs of a block, over all tensors of the
  group, lie inside one stride between blocks of one storage, [byte, in order of memory]

Runs that are adjacent in memory and in the blob become one segment: a block of a block-major cache
is one, whatever its layers are. Bytes between runs (padding, other groups) are not part of a block.

Groups are described one by one. They may alias each other's bytes: the engine gives a block to one
group at a time. The null block, where an engine has one, is a block like the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .layout import BlockLayout
from .strides import Views, check_dense, check_distinct, contiguous_runs, describe, named


@dataclass(frozen=True, slots=True)
class Placement:
    """Layers of one size at equal distances in a storage, as vLLM's ``KVCacheTensor`` places them.

    The page of layer l of block b starts at ``offset + l * layer_stride + b * block_stride``.

    Attributes:
        num_layers: how many.
        page_bytes: payload of one page. Padding behind it is left out: it only shows in the strides.
        layer_stride: distance between two layers, in bytes.
        block_stride: distance between two blocks, in bytes.
        offset: of layer 0 of block 0 from the first byte of the storage tensor.
        num_runs: equal pieces that a page lies in, e.g. its heads in LHBNC and BHLNC.
        run_stride: distance between two pieces, in bytes; means nothing if there is one.
    """

    num_layers: int
    page_bytes: int
    layer_stride: int
    block_stride: int
    offset: int = 0
    num_runs: int = 1
    run_stride: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    """One contiguous run of bytes of every block of one tensor; *name* is for errors."""

    name: str
    address: int
    block_stride: int
    nbytes: int
    storage: torch.UntypedStorage

    def is_followed_by(self, other: "_Run", num_blocks: int) -> bool:
        """Return whether both are one longer run of every block."""
        return (
            self.address + self.nbytes == other.address
            and self.storage.data_ptr() == other.storage.data_ptr()
            and self.block_stride == other.block_stride
            and (num_blocks == 1 or self.nbytes + other.nbytes <= self.block_stride)
        )


def layout_of_views(
    views: Views,
    *,
    blocks_per_chunk: int = 1,
    num_blocks: int | None = None,
    block_axis: int | Sequence[int] = 0,
) -> BlockLayout:
    """Describe the blocks of one group by its cache tensors.

    Args:
        views: the tensors of the group in its order, any dtype, any strides: attention pages, latents,
            scales beside them (a tensor of their own), states as bytes. By name, or in a sequence.
        blocks_per_chunk: blocks in one chunk, at least 1.
        num_blocks: blocks as the engine counts them, where its attention kernel cuts each into equal
            smaller ones: the block axis then is a multiple. That of the first tensor if not given.
        block_axis: which axis counts blocks; one for all tensors, or one for each.

    Raises:
        ValueError: a tensor cannot be described, or two of them share bytes. The message names them.
    """
    pairs = named("views", views)
    axes = [block_axis] * len(pairs) if isinstance(block_axis, int) else list(block_axis)
    if len(axes) != len(pairs):
        raise ValueError(f"block_axis must be one for each of {len(pairs)} views; got {len(axes)}")
    runs: list[_Run] = []
    for (name, view), axis in zip(pairs, axes, strict=True):
        if not 0 <= axis < view.ndim:
            raise ValueError(f"{name} must have an axis {axis} of blocks; got {describe(view)}")
        if view.device != pairs[0][1].device:
            raise ValueError(
                f"{name} must be on {pairs[0][1].device}, as the first is; got {describe(view)}"
            )
        num_blocks = view.shape[axis] if num_blocks is None else num_blocks
        check_distinct(name, view)
        runs += _runs_of(name, view, axis, num_blocks)
    assert num_blocks is not None
    return _layout(runs, [view for _, view in pairs], num_blocks, blocks_per_chunk)


def layout_of_placements(
    storage: torch.Tensor,
    placements: Mapping[str, Placement] | Sequence[Placement],
    num_blocks: int,
    *,
    blocks_per_chunk: int = 1,
) -> BlockLayout:
    """Describe the blocks of one group by where the engine placed its layers in one storage.

    Args:
        storage: the whole cache, contiguous, one-dimensional, any dtype.
        placements: of the group's layers, in its order. By name, or in a sequence.
        num_blocks: blocks of the group.
        blocks_per_chunk: blocks in one chunk, at least 1.

    Raises:
        ValueError: a placement leaves the storage, or two layers share bytes. The message names them.
    """
    check_dense("storage", storage)
    if storage.ndim != 1 or not storage.is_contiguous():
        raise ValueError(f"storage must be contiguous, of one axis; got {describe(storage)}")
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1; got {num_blocks}")
    whole = storage.view(torch.uint8)
    views: dict[str, torch.Tensor] = {}
    pairs = placements.items() if isinstance(placements, Mapping) else enumerate(placements)
    for key, placed in pairs:
        name = f"placements[{key!r}]"
        _check_placement(name, placed, num_blocks, whole.numel())
        shape = num_blocks, placed.num_runs, placed.page_bytes // placed.num_runs
        strides = placed.block_stride, placed.run_stride, 1
        for layer in range(placed.num_layers):
            start = whole.storage_offset() + placed.offset + layer * placed.layer_stride
            views[f"{name} layer {layer}"] = whole.as_strided(shape, strides, start)
    if not views:
        raise ValueError("placements must be at least one layer; got none")
    runs: list[_Run] = []
    for name, view in views.items():
        check_distinct(name, view)
        runs += _runs_of(name, view, 0, num_blocks)
    return _layout(runs, [storage], num_blocks, blocks_per_chunk)


def _check_placement(name: str, placed: Placement, num_blocks: int, storage_bytes: int) -> None:
    """Raise a ValueError that names the placement unless all of its bytes lie in the storage."""
    counts = placed.num_layers, placed.page_bytes, placed.num_runs
    strides = placed.layer_stride, placed.block_stride, placed.run_stride, placed.offset
    if min(counts) < 1 or min(strides) < 0 or placed.page_bytes % placed.num_runs:
        raise ValueError(
            f"{name} must have positive counts, no negative distance, and a page of whole runs; "
            f"got {placed}"
        )
    end = (
        placed.offset
        + (placed.num_layers - 1) * placed.layer_stride
        + (num_blocks - 1) * placed.block_stride
        + (placed.num_runs - 1) * placed.run_stride
        + placed.page_bytes // placed.num_runs
    )
    if end > storage_bytes:
        raise ValueError(f"{name} must end within {storage_bytes} bytes of storage; got {end}")


def _runs_of(name: str, view: torch.Tensor, axis: int, num_blocks: int) -> list[_Run]:
    """Split a block of *view* into runs, in order of memory."""
    found = view.shape[axis]
    if num_blocks < 1 or found % num_blocks:
        raise ValueError(
            f"{name} must have a multiple of {num_blocks} blocks on axis {axis}; got {describe(view)}"
        )
    blocks = torch.unflatten(view, axis, (num_blocks, found // num_blocks)).movedim(axis, 0)
    width = view.element_size()
    block_stride, *rest = (stride * width for stride in blocks.stride())
    inner = sorted(zip(rest, blocks.shape[1:], strict=True), reverse=True)
    strides, sizes = [stride for stride, _ in inner], [size for _, size in inner]
    offsets, nbytes = contiguous_runs(sizes, strides, width)
    start, storage = view.data_ptr(), view.untyped_storage()
    return [_Run(name, start + offset, block_stride, nbytes, storage) for offset in offsets]


def _layout(
    runs: list[_Run], views: Sequence[torch.Tensor], num_blocks: int, blocks_per_chunk: int
) -> BlockLayout:
    """Order and merge the runs, and build a layout of them."""
    if _is_block_major(runs):
        runs = sorted(runs, key=lambda run: run.address)
    merged: list[_Run] = []
    for run in runs:
        if merged and merged[-1].is_followed_by(run, num_blocks):
            last = merged.pop()
            nbytes = last.nbytes + run.nbytes
            run = _Run(last.name, last.address, run.block_stride, nbytes, run.storage)
        merged.append(run)
    _check_apart(merged, num_blocks)
    pages = [_page_view(run, num_blocks, views[0].device) for run in merged]
    layout = BlockLayout.from_tensors(pages, [run.nbytes for run in merged], blocks_per_chunk)
    return replace(layout, views=tuple(views))


def _is_block_major(runs: Sequence[_Run]) -> bool:
    """Return whether a block has all of its runs inside one stride of one storage."""
    keys = {(run.storage.data_ptr(), run.block_stride) for run in runs}
    start = min(run.address for run in runs)
    end = max(run.address + run.nbytes for run in runs)
    return len(keys) == 1 and end - start <= runs[0].block_stride


def _page_view(run: _Run, num_blocks: int, device: torch.device) -> torch.Tensor:
    """View a run as ``[NB, nbytes]`` uint8."""
    start = run.address - run.storage.data_ptr()
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(run.storage, start, (num_blocks, run.nbytes), (run.block_stride, 1))


def _check_apart(runs: Sequence[_Run], num_blocks: int) -> None:
    """Raise a ValueError that names two runs which have a byte in common."""
    near: list[_Run] = []
    for run in sorted(runs, key=lambda run: run.address):
        near = [a for a in near if _end(a, num_blocks) > run.address]
        for other in near:
            if _overlap(other, run, num_blocks):
                raise ValueError(
                    f"{run.name} must not share bytes with {other.name}; got runs of {run.nbytes} and "
                    f"{other.nbytes} bytes at distance {run.address - other.address}"
                )
        near.append(run)


def _end(run: _Run, num_blocks: int) -> int:
    """Return the address behind the last block's run."""
    return run.address + (num_blocks - 1) * run.block_stride + run.nbytes


def _overlap(a: _Run, b: _Run, num_blocks: int) -> bool:
    """Return whether any block's run of *a*, which starts first, meets any block's run of *b*."""
    distance = b.address - a.address
    if a.block_stride == b.block_stride:
        # block i + steps of a is the last to start before the end of block i of b
        steps = min((distance + b.nbytes - 1) // max(a.block_stride, 1), num_blocks - 1)
        return steps * a.block_stride + a.nbytes > distance
    numbers = np.arange(num_blocks, dtype=np.int64)
    starts = numbers * a.block_stride
    wanted = distance + numbers * b.block_stride
    last = np.searchsorted(starts, wanted + b.nbytes) - 1
    return bool((starts[last] + a.nbytes > wanted).any())
