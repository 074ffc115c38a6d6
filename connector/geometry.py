"""How many bytes a chunk of each KV cache group has: from the engine's table, checked against its tensors."""

from dataclasses import dataclass
from typing import Any

from kvferry.kernels.layout import PART_ALIGNMENT
from kvferry.kvops.errors import UnsupportedEngineError

from . import compat


@dataclass(frozen=True, slots=True)
class Geometry:
    """The offloaded KV cache groups, in the order in which vLLM lists them.

    Attributes:
        group_ids: id of each group, as in the last four bytes of a key.
        tokens_per_chunk: tokens of one chunk of each group.
        page_bytes: bytes of one block of each group on one rank, over all of its layers.
        is_prefix: whether a chunk of the group is useless without all chunks before it (full attention).
        has_mixed_pages: layers of one group differ in page size, so that only the worker knows page_bytes.
        blocks_per_chunk: blocks of one chunk.
        world_size: ranks, each of which holds one part of a blob.
        is_single_group: the model has one KV cache group, so that a block id names a block.
    """

    group_ids: tuple[int, ...]
    tokens_per_chunk: tuple[int, ...]
    page_bytes: tuple[int, ...]
    is_prefix: tuple[bool, ...]
    has_mixed_pages: bool
    blocks_per_chunk: int
    world_size: int
    is_single_group: bool

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of one rank's share of one chunk, for each group."""
        payloads = [self.blocks_per_chunk * page for page in self.page_bytes]
        return tuple(-(-payload // PART_ALIGNMENT) * PART_ALIGNMENT for payload in payloads)


def read_geometry(
    vllm_config: Any, kv_cache_config: Any, blocks_per_chunk: int, tokens_per_block: Any
) -> Geometry:
    """Collect the geometry from the engine's KV cache table.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's table of KV cache groups and tensors.
        blocks_per_chunk: as the spec resolved it.
        tokens_per_block: tokens of one block of each offloaded group, as the spec resolved them.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    group_ids = compat.cacheable_group_ids(kv_cache_config)
    packed = _packed_block_bytes(kv_cache_config)
    pages, prefix, mixed = [], [], False
    for group_id in group_ids:
        group = kv_cache_config.kv_cache_groups[group_id]
        specs = list(compat.layer_specs(group.kv_cache_spec))
        sizes = [getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes) for spec in specs]
        mixed |= len(set(sizes)) > 1
        total = sum(sizes) if len(sizes) > 1 else sizes[0] * len(group.layer_names)
        pages.append(packed or total)
        prefix.append(all(isinstance(spec, FullAttentionSpec) for spec in specs))
    return Geometry(
        group_ids=group_ids,
        tokens_per_chunk=tuple(tokens * blocks_per_chunk for tokens in tokens_per_block),
        page_bytes=tuple(pages),
        is_prefix=tuple(prefix),
        has_mixed_pages=mixed and not packed,
        blocks_per_chunk=blocks_per_chunk,
        world_size=vllm_config.parallel_config.world_size,
        is_single_group=len(kv_cache_config.kv_cache_groups) == 1,
    )


def _packed_block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of a block over all layers and groups where the cache is block-major, else 0."""
    for tensor in kv_cache_config.kv_cache_tensors:
        # layer-major: one layer's blocks follow each other; block-major: one block's layers do
        if len(tensor.layers) > 1 and tensor.layer_stride < tensor.block_stride:
            return int(tensor.block_stride)
    return 0


def check_part_bytes(expected: tuple[int, ...], found: tuple[int, ...], rank: int) -> None:
    """Refuse tensors that don't have the size that the engine's own table says.

    Raises:
        UnsupportedEngineError: they differ; a blob would be cut off or padded with another chunk's bytes.
    """
    if expected != found:
        raise UnsupportedEngineError(
            f"rank {rank} must hold {list(expected)} bytes a chunk, one number for each KV cache group, as the engine's "
            f"table says; got {list(found)}: kvferry can't serve this cache layout"
        )


def has_state_groups(kv_cache_config: Any) -> bool:
    """Return whether a group holds recurrent state (Mamba and its kin) instead of attention pages."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return any(
        isinstance(spec, MambaSpec)
        for group in kv_cache_config.kv_cache_groups
        for spec in compat.layer_specs(group.kv_cache_spec)
    )
