"""Where the bytes of a block are, and where they go in a blob: all that a move knows of a cache.

A KV cache group arrives as byte tensors, one per segment, each ``[NB, page]`` (NB blocks), from the
engine itself or from ``cache_shapes.py``, which makes them of cache tensors of any shape:

    how the engine laid it out               block stride          segments
    ------------------------------------     ------------------    --------------------------------
    LBHNC / LBNHC, one storage               page                  one per layer, equally spaced
    separate storages                        page                  one per layer, anywhere
    padded pages                             page + padding        one per layer
    BLHNC (layers interleaved in a block)    num_layers * page     one per layer, or one per block
    aliasing groups (hybrid models)          as above              groups share tensors: one layout each

The blob of a chunk holds one part per rank. Inside a part, bytes lie in this order:

    [block in chunk][segment, in the group's order][byte of the page]

without gaps; a part ends with padding up to a multiple of ``PART_ALIGNMENT``, which no move touches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

PART_ALIGNMENT = 64
"""Bytes. A part starts and ends on a cache line, so that two ranks never write the same one."""

MAX_WORD_BYTES = 16
"""The widest access of a device: what a kernel moves at once where the layout's alignment allows."""

BlockIds = Sequence[int] | npt.NDArray[np.int64]
"""Block numbers of one chunk, in the order of their place in the chunk."""


def refuse_copy(made: object, protocol: SupportsIndex) -> NoReturn:
    """Stand in for ``__reduce_ex__`` of what holds addresses: they would be wrong in a copy.

    Raises:
        TypeError: always, before ``copy`` or ``pickle`` has read a byte of the cache.
    """
    name = type(made).__name__
    raise TypeError(f"{name} must be made where its cache is; got a request to copy it")


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous run of bytes of every block.

    Attributes:
        base_address: where block 0 has it, in the address space of its device.
        block_stride: distance between two blocks, in bytes.
        nbytes: its length, in bytes.
        blob_offset: where it goes inside the block's share of a part, in bytes.
    """

    base_address: int
    block_stride: int
    nbytes: int
    blob_offset: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """All segments of one KV cache group.

    Ownership:
        Keeps the tensors alive: the addresses stay valid as long as the layout does.

    Attributes:
        segments: one per tensor, in the group's order.
        tensors: the tensors they were read from, one per segment.
        num_blocks: blocks in the cache.
        blocks_per_chunk: blocks in one chunk.
        block_bytes: payload of one block, in bytes: the sum over its segments.
        part_bytes: bytes of one rank's part of a blob, padding included.
        device: where the segments live.
        views: the engine's own tensors, where *tensors* are views of bytes that were made of them.
    """

    segments: tuple[Segment, ...]
    tensors: tuple[torch.Tensor, ...]
    num_blocks: int
    blocks_per_chunk: int
    block_bytes: int
    part_bytes: int
    device: torch.device
    views: tuple[torch.Tensor, ...] = ()

    __reduce_ex__ = refuse_copy

    @classmethod
    def from_tensors(
        cls,
        segments: Sequence[torch.Tensor],
        page_bytes: Sequence[int],
        blocks_per_chunk: int,
    ) -> "BlockLayout":
        """Read the layout off the tensors of one group.

        Args:
            segments: ``[NB, page]`` int8 or uint8 each, bytes of a page adjacent, any block stride.
            page_bytes: how many bytes of each tensor's page are payload; the rest is padding.
            blocks_per_chunk: blocks in one chunk, at least 1.

        Raises:
            ValueError: the bytes cannot be described. The message names the tensor by its index.
        """
        if not segments or len(segments) != len(page_bytes):
            raise ValueError(
                "segments and page_bytes must be equally long and not empty; "
                f"got {len(segments)} and {len(page_bytes)}"
            )
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk must be at least 1; got {blocks_per_chunk}")
        num_blocks, device = segments[0].shape[0] if segments[0].ndim else 0, segments[0].device
        table: list[Segment] = []
        block_bytes = 0
        for index, (tensor, nbytes) in enumerate(zip(segments, page_bytes, strict=True)):
            _check_segment(f"segments[{index}]", tensor, nbytes, num_blocks, device)
            table.append(Segment(tensor.data_ptr(), tensor.stride(0), nbytes, block_bytes))
            block_bytes += nbytes
        payload = block_bytes * blocks_per_chunk
        return cls(
            segments=tuple(table),
            tensors=tuple(segments),
            num_blocks=num_blocks,
            blocks_per_chunk=blocks_per_chunk,
            block_bytes=block_bytes,
            part_bytes=-(-payload // PART_ALIGNMENT) * PART_ALIGNMENT,
            device=device,
        )

    @property
    def alignment(self) -> int:
        """The largest word, of 16, 8, 4, 2 or 1 bytes, that every run of the layout is made of.

        It divides each base address, block stride, size and offset, and the size of a block.
        """
        numbers = [self.block_bytes, MAX_WORD_BYTES]
        for s in self.segments:
            numbers += (s.base_address, s.block_stride, s.nbytes, s.blob_offset)
        return math.gcd(*numbers)

    def check_blocks(self, block_ids: BlockIds, first: int = 0) -> npt.NDArray[np.int64]:
        """Return *block_ids* as an int64 array after checking that each exists and that they fit.

        Args:
            block_ids: ``[N]``, repeats allowed.
            first: place of the first one inside the chunk.

        Raises:
            ValueError: a block does not exist, or the blocks do not fit the chunk.
        """
        ids = as_block_ids(block_ids)
        if first < 0 or first + ids.size > self.blocks_per_chunk:
            raise ValueError(
                f"blocks must lie in places 0..{self.blocks_per_chunk - 1} of the chunk; "
                f"got {ids.size} blocks from place {first}"
            )
        self.check_range(ids)
        return ids

    def check_range(self, ids: npt.NDArray[np.int64]) -> None:
        """Check that every block exists, of one chunk or of many at once.

        Raises:
            ValueError: one does not; the message gives the first such.
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            wrong = int(ids[(ids < 0) | (ids >= self.num_blocks)][0])
            raise ValueError(f"block ids must be in 0..{self.num_blocks - 1}; got {wrong}")


def as_block_ids(block_ids: BlockIds) -> npt.NDArray[np.int64]:
    """Return *block_ids* as a one-dimensional int64 array.

    Raises:
        ValueError: they are not integers, or not one-dimensional.
    """
    ids = np.asarray(block_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"block ids must be integers [N]; got {ids.dtype} {list(ids.shape)}")
    return ids.astype(np.int64, copy=False)


def _check_segment(
    name: str, tensor: torch.Tensor, nbytes: int, num_blocks: int, device: torch.device
) -> None:
    """Raise a ValueError that names the tensor unless its bytes can be described by a Segment."""
    got = f"got {tensor.dtype} {list(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ValueError(f"{name} must be a dense tensor with memory; got {tensor.layout}")
    if tensor.dtype not in (torch.int8, torch.uint8) or tensor.ndim != 2 or not tensor.numel():
        raise ValueError(f"{name} must be int8 or uint8 [num_blocks, page], not empty; {got}")
    if tensor.device != device or tensor.shape[0] != num_blocks:
        raise ValueError(
            f"{name} must have {num_blocks} blocks on {device}, as the first has; "
            f"{got} on {tensor.device}"
        )
    if not 0 < nbytes <= tensor.shape[1]:
        raise ValueError(f"page_bytes of {name} must be in 1..{tensor.shape[1]}; got {nbytes}")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must have adjacent bytes in a page; got stride {tensor.stride(1)}"
        )
    if num_blocks > 1 and tensor.stride(0) < nbytes:
        raise ValueError(
            f"{name} must have blocks that do not overlap: a stride of {nbytes} bytes or more; "
            f"got {tensor.stride(0)}"
        )
    end = tensor.storage_offset() + (num_blocks - 1) * tensor.stride(0) + nbytes
    if end > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} must lie inside its storage; it ends {end} bytes into it")
