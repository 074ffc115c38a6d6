"""Pure-torch twins of the moves: same arguments, no cleverness.

A twin is the definition of its move. Tests compare bit for bit; perf scripts use it as the slowest
baseline. Change a twin only when the meaning changes.
"""

import ctypes

import torch

from .layout import BlockIds, BlockLayout


def gather_chunk(layout: BlockLayout, block_ids: BlockIds, first: int, address: int) -> None:
    """Copy block ``block_ids[i]`` to place ``first + i`` of the part at *address*."""
    part = _bytes_at(address, layout.part_bytes)
    for place, block_id in enumerate(block_ids, start=first):
        for segment, tensor in zip(layout.segments, layout.tensors, strict=True):
            start = place * layout.block_bytes + segment.blob_offset
            page = tensor[int(block_id), : segment.nbytes]
            part[start : start + segment.nbytes] = page.view(torch.uint8)


def scatter_chunk(layout: BlockLayout, block_ids: BlockIds, first: int, address: int) -> None:
    """Copy place ``first + i`` of the part at *address* to block ``block_ids[i]``, in order."""
    part = _bytes_at(address, layout.part_bytes)
    for place, block_id in enumerate(block_ids, start=first):
        for segment, tensor in zip(layout.segments, layout.tensors, strict=True):
            start = place * layout.block_bytes + segment.blob_offset
            page = tensor[int(block_id), : segment.nbytes]
            page.view(torch.uint8)[:] = part[start : start + segment.nbytes]


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """View host memory as a uint8 tensor."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
