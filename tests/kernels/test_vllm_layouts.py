"""Our layouts of caches that vLLM's own allocator made, in each of its physical orders.

The truth is vLLM's: a layer's view, grouped into blocks by vLLM's own function.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:
    # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

from kvferry.kernels.cache_shapes import Placement, layout_of_placements, layout_of_views
from kvferry.kernels.rows import RowLayout

from .layouts import ORDERS, as_bytes, block_bytes, same

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 5
COMPACT = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")


def names(prefix, count):
    return [f"{prefix}{i}" for i in range(count)]


def full(**changes):
    values = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**values | changes)


def latent(**changes):
    values = {"block_size": 8, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**values | changes)


def one(spec, layers=3):
    return lambda: [KVCacheGroupSpec(names("l", layers), spec)]


def latents_and_indexers():
    indexer = latent(head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
    specs = {name: latent() for name in names("m", 2)} | dict.fromkeys(names("i", 2), indexer)
    group = UniformTypeKVCacheSpecs(block_size=8, kv_cache_specs=specs)
    return [KVCacheGroupSpec(list(specs), group)]


def full_and_windows():
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=32
    )
    specs = {"s": window, "t": window, "f": full()}
    return [KVCacheGroupSpec(names(prefix, 2), spec) for prefix, spec in specs.items()]


def full_and_states():
    state = MambaSpec(
        block_size=16, shapes=((3, 4), (4, 8)), dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=full().page_size_bytes, mamba_cache_mode="align",
    )  # fmt: skip
    return [KVCacheGroupSpec(names("m", 2), state), KVCacheGroupSpec(names("f", 2), full())]


CASES = [
    ("full", one(full()), ORDERS, None),
    ("full-one-head", one(full(num_kv_heads=1)), ORDERS, None),
    ("full-fp8", one(full(dtype=torch.uint8)), COMPACT, None),
    ("wider-keys", one(full(head_size=24, head_size_v=16)), ORDERS, None),
    ("kernel-blocks", one(full(block_size=64)), ("LBNHC", "LBHNC"), 16),
    ("latent", one(latent()), ORDERS, None),
    ("fp8_ds_mla", one(latent(dtype=torch.uint8, state_content_bytes=656)), COMPACT, None),
    ("nvfp4_ds_mla", one(latent(dtype=torch.uint8, state_content_bytes=352)), COMPACT, None),
    ("latents-and-indexers", latents_and_indexers, COMPACT, None),
    ("full-and-windows", full_and_windows, ORDERS, None),
    ("full-and-states", full_and_states, ("LBNHC", "LBHNC"), None),
]
PARAMS = [
    pytest.param(groups, order, kernel_size, id=f"{name}-{order}")
    for name, groups, orders, kernel_size in CASES
    for order in orders
]


def allocate(groups, order, kernel_size):
    """Let vLLM plan and allocate, and fill the cache with random bytes."""
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[order],
        num_gpu_blocks_override=NUM_BLOCKS,
        prefix_cache_retention_interval=None,
    )
    vllm_config = SimpleNamespace(
        cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None)
    )
    config = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 22)
    sizes = None if kernel_size is None else [kernel_size]
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[order], sizes)
    storage = next(iter(views.values())).untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    whole.random_(0, 256, generator=torch.Generator().manual_seed(1))
    return config, views, whole


def in_memory_order(block):
    """Return the bytes of a block of one layer as they lie in memory."""
    axes = sorted(range(block.ndim), key=block.stride, reverse=True)
    return as_bytes(block.permute(axes))


@pytest.mark.parametrize(("groups", "order", "kernel_size"), PARAMS)
def test_blocks_are_the_layers_pages(groups, order, kernel_size):
    config, views, _ = allocate(groups(), order, kernel_size)
    assert config.num_blocks == NUM_BLOCKS
    for group in config.kv_cache_groups:
        of_group = {name: views[name] for name in group.layer_names}
        layout = layout_of_views(of_group, num_blocks=NUM_BLOCKS)
        pages = [group_kernel_blocks(view, NUM_BLOCKS) for view in of_group.values()]
        for block in range(NUM_BLOCKS):
            if order == "BHLNC" and pages[0].shape[1] > 1:
                # heads outside layers: head by head, a layer's tokens at a time
                heads = range(pages[0].shape[1])
                truth = [as_bytes(page[block, head]) for head in heads for page in pages]
            else:
                truth = [in_memory_order(page[block]) for page in pages]
            same(block_bytes(layout, block), torch.cat(truth))


@pytest.mark.parametrize(("groups", "order", "kernel_size"), PARAMS)
def test_the_engines_table_gives_the_same_segments(groups, order, kernel_size):
    config, views, whole = allocate(groups(), order, kernel_size)
    for group in config.kv_cache_groups:
        placements = {}
        for tensor in config.kv_cache_tensors:
            if tensor.layers[0] in group.layer_names:
                first = group_kernel_blocks(views[tensor.layers[0]], NUM_BLOCKS)
                heads = first.shape[-3] if order in ("LHBNC", "BHLNC") else 1
                width = first.element_size()
                placements[tensor.layers[0]] = Placement(
                    num_layers=len(tensor.layers),
                    page_bytes=first[0].numel() * width,
                    layer_stride=tensor.layer_stride,
                    block_stride=tensor.block_stride,
                    offset=tensor.offset,
                    num_runs=heads,
                    run_stride=first.stride(-3) * width,
                )
        placed = layout_of_placements(whole, placements, NUM_BLOCKS)
        of_group = {name: views[name] for name in group.layer_names}
        assert placed.segments == layout_of_views(of_group, num_blocks=NUM_BLOCKS).segments


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_a_tokens_keys_and_values(order):
    _, views, _ = allocate(one(full())(), order, None)
    layers = list(views.values())
    rows = RowLayout.from_views(views, "bhnc")
    assert (rows.num_blocks, rows.block_size, rows.row_bytes) == (NUM_BLOCKS, 16, 3 * 2 * 2 * 8 * 2)
    offset = 0
    for layer in layers:
        for part in (layer[..., :8], layer[..., 8:]):
            for head in range(2):
                address = part[0, head].data_ptr()
                strides = part.stride(0) * 2, part.stride(2) * 2
                assert any(
                    (p.base_address, p.row_offset, p.nbytes) == (address, offset, 16)
                    and (p.block_stride, p.token_stride) == strides
                    for p in rows.pieces
                )
                offset += 16
