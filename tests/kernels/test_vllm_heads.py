"""vLLM's own canonical mappings, moved: what ranks of one number wrote, ranks of another read.

The truth is a cache without parallelism: its pages, in vLLM's order, are the canonical pages.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

from kvferry.kernels import heads, reference_heads
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.head_spans import heads_of_rank
from kvferry.kernels.layout import BlockLayout

from .layouts import BF16, Memory, as_bytes, same
from .test_heads import Blobs

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 2, 4, 4, 16, 8


def mappings(views, spec, tp_size, tp_rank):
    """Ask vLLM how each layer's page of this rank maps into its canonical page."""
    names = [f"layer{i}" for i in range(len(views))]
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size, prefill_context_parallel_size=1, world_size=tp_size,
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1, rank=tp_rank,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
    )  # fmt: skip
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    found = derive_canonical_mappings(vllm_config, config, dict(zip(names, views, strict=True)))
    return [found[name] for name in names]


class Rank:
    """One rank's cache, ``[L, B, H, N, C]`` in one of vLLM's orders, and its runs."""

    def __init__(self, order, model, tp_size, tp_rank, device, *, is_empty):
        first, count = heads_of_rank(HEADS, tp_size, tp_rank)
        mine = model[:, :, first : first + count]
        sizes = dict(zip("LBHNC", mine.shape, strict=True))
        whole = Memory(device, 9).tensor(*(sizes[axis] for axis in order))
        self.view = whole.permute(*(order.index(axis) for axis in "LBHNC"))
        if not is_empty:
            self.view.copy_(mine)
        self.mine = mine
        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=count, head_size=DIM, dtype=torch.bfloat16
        )
        pages = [layer.reshape(BLOCKS, -1).view(torch.uint8) for layer in whole]
        layout = BlockLayout.from_tensors(pages, [pages[0].shape[1]] * LAYERS, 1)
        self.mappings = mappings(list(self.view), spec, tp_size, tp_rank)
        self.runs = HeadRuns.from_copy_runs(layout, self.mappings)


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
def test_canonical_blobs_do_not_say_who_wrote_them(order, device, poisoned, interpreted):
    launches = interpreted(heads, "_move_heads_kernel")
    model = Memory(device).tensor(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)
    alone = Rank(order, model, 1, 0, device, is_empty=False)
    blobs = Blobs(poisoned, 2, alone.runs.block_bytes, device)
    ranks = [Rank(order, model, 4, tp_rank, device, is_empty=False) for tp_rank in range(4)]
    for rank in ranks:
        assert all(mapping.parallelism_agnostic for mapping in rank.mappings)
        heads.gather_heads(rank.runs, blobs.entries([3, 1]))
    assert len(launches) == 4
    expected = Blobs(poisoned, 2, alone.runs.block_bytes, device)
    reference_heads.gather_heads(alone.runs, [3, 1], expected.rows)
    same(blobs.whole, expected.whole)
    # the axes of a canonical page are those of a page without parallelism
    axes = (0, 2, 1, 3) if order == "LBNHC" else (0, 1, 2, 3)
    same(blobs.rows[0], as_bytes(model[:, 3].permute(axes)))
    # with 8 ranks two hold copies of each head
    for tp_size, tp_rank in [(1, 0), (2, 1), (4, 2), (8, 5)]:
        rank = Rank(order, model, tp_size, tp_rank, device, is_empty=True)
        heads.scatter_heads(rank.runs, blobs.entries([3, 1]))
        for block in (3, 1):
            same(as_bytes(rank.view[:, block]), as_bytes(rank.mine[:, block]))


def test_latents_are_the_same_on_every_rank(device, poisoned, interpreted):
    interpreted(heads, "_move_heads_kernel")
    pages = [Memory(device, i).tensor(BLOCKS, 1, TOKENS, 576, dtype=BF16) for i in range(LAYERS)]
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=BF16)
    flat = [page.view(BLOCKS, -1).view(torch.uint8) for page in pages]
    layout = BlockLayout.from_tensors(flat, [flat[0].shape[1]] * LAYERS, 1)
    for tp_rank in (0, 3):
        runs = HeadRuns.from_copy_runs(layout, mappings(pages, spec, 4, tp_rank))
        blobs = Blobs(poisoned, 1, runs.block_bytes, device)
        heads.gather_heads(runs, blobs.entries([2]))
        same(blobs.rows[0], torch.cat([page[2] for page in flat]))
