"""Every cache layout as a named case: random bytes, the layouts read off them, and the truth.

The truth is plain torch indexing of the tensor as it lies in memory: no table of ours is asked.

    @pytest.mark.parametrize("case", LAYOUTS)
    def test_x(case, device):
        cache = case(device)
        cache.expected(group, block)     # uint8 [block_bytes], the block's share of a blob
        cache.expected_row(slot)         # uint8 [row_bytes], where cache.rows is not None
        cache.storages                   # all memory, guard bytes included: compare before and after
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from kvferry.kernels.cache_shapes import Placement, layout_of_placements, layout_of_views
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.rows import RowLayout

GUARD = 64
BF16, U8, F32 = torch.bfloat16, torch.uint8, torch.float32


@dataclass
class Cache:
    """A cache of one or several groups.

    Attributes:
        layouts: one per group.
        storages: uint8, every byte behind the cache: pages, padding, guards.
        blocks: per group, block -> tensors whose bytes, end to end, are the block.
        rows: of group 0, if it has tokens.
        tokens: slot -> tensors whose bytes, end to end, are the row.
    """

    layouts: list[BlockLayout]
    storages: list[torch.Tensor]
    blocks: list[Callable[[int], list[torch.Tensor]]]
    rows: RowLayout | None = None
    tokens: Callable[[int], list[torch.Tensor]] | None = field(default=None)

    def expected(self, group, block):
        return torch.cat([as_bytes(t) for t in self.blocks[group](block)])

    def expected_row(self, slot):
        return torch.cat([as_bytes(t) for t in self.tokens(slot)])


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(U8)


def memory(address, nbytes):
    """View host memory by its address."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def block_bytes(layout, block):
    """Collect a block by the addresses of its segments."""
    out = torch.full((layout.block_bytes,), 0xA5, dtype=torch.uint8)
    for s in layout.segments:
        page = memory(s.base_address + block * s.block_stride, s.nbytes)
        out[s.blob_offset : s.blob_offset + s.nbytes] = page
    return out


def same(actual, expected):
    """Compare bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Memory:
    """Random bytes on a device, with guards around every allocation."""

    def __init__(self, device, seed=0):
        self.device, self.storages = device, []
        self.generator = torch.Generator().manual_seed(seed)

    def bytes(self, count):
        """Return *count* uint8, aligned to 64 bytes, GUARD more on both sides."""
        whole = torch.randint(0, 256, (count + 2 * GUARD,), dtype=U8, generator=self.generator)
        self.storages.append(whole.to(self.device))
        return self.storages[-1][GUARD : GUARD + count]

    def tensor(self, *shape, dtype=BF16):
        count = dtype.itemsize * torch.Size(shape).numel()
        return self.bytes(count).view(dtype).view(shape)


def one_group(memory, views, truth, rows=None, tokens=None, **options):
    layout = layout_of_views(views, **options)
    return Cache([layout], memory.storages, [truth], rows, tokens)


SIZES = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 16}


def five_axes(order, sizes=SIZES, dtype=BF16):
    """vLLM's [L, B, H, N, C] in one of its physical orders; C holds a head's K, then its V."""

    def case(device, seed=0):
        memory = Memory(device, seed)
        whole = memory.tensor(*(sizes[axis] for axis in order), dtype=dtype)
        logical = whole.permute(*(order.index(axis) for axis in "LBHNC"))
        views, half = list(logical), sizes["C"] // 2

        def truth(block):
            if order[0] == "B":
                return [whole[block]]
            # whole[layer] has the axes of order without L
            return [whole[i].select(order.index("B") - 1, block) for i in range(sizes["L"])]

        def tokens(slot):
            block, token = divmod(slot, sizes["N"])
            of_token = logical[:, block, :, token]
            return [part for layer in of_token for part in (layer[:, :half], layer[:, half:])]

        rows = RowLayout.from_views(views, "bhnc")
        return one_group(memory, views, truth, rows, tokens)

    return case


def five_axes_placed(order):
    """The same, from the offsets and strides of the engine's table."""

    def case(device, seed=0):
        cache = five_axes(order)(device, seed)
        whole = cache.storages[0][GUARD:-GUARD]
        strides, step = {}, BF16.itemsize
        for axis in reversed(order):
            strides[axis], step = step, step * SIZES[axis]
        page = SIZES["H"] * SIZES["N"] * SIZES["C"] * BF16.itemsize
        heads_apart = order in ("LHBNC", "BHLNC")
        placed = Placement(
            num_layers=SIZES["L"], page_bytes=page,
            layer_stride=strides["L"], block_stride=strides["B"],
            num_runs=SIZES["H"] if heads_apart else 1, run_stride=strides["H"],
        )  # fmt: skip
        cache.layouts = [layout_of_placements(whole, [placed], SIZES["B"])]
        return cache

    return case


def halves_first(device, seed=0):
    """[2, NB, BS, H, D], one storage per layer."""
    memory = Memory(device, seed)
    views = [memory.tensor(2, 7, 4, 3, 8) for _ in range(2)]
    return one_group(
        memory, views, lambda b: [half[b] for view in views for half in view],
        RowLayout.from_views(views, "kv_first"),
        lambda s: [half[s // 4, s % 4] for view in views for half in view], block_axis=1,
    )  # fmt: skip


def halves_second(device, seed=0):
    """[NB, 2, BS, H, D]"""
    memory = Memory(device, seed)
    views = [memory.tensor(7, 2, 4, 3, 8) for _ in range(2)]
    return one_group(
        memory, views, lambda b: [view[b] for view in views],
        RowLayout.from_views(views, "kv_second"),
        lambda s: [view[s // 4, half, s % 4] for view in views for half in range(2)],
    )  # fmt: skip


def latent(shape, dtype, layers=2):
    """MLA rows: [NB, 1, BS, C] or [NB, BS, C]."""

    def case(device, seed=0):
        memory = Memory(device, seed)
        views = [memory.tensor(*shape, dtype=dtype) for _ in range(layers)]
        tokens = shape[-2]
        return one_group(
            memory, views, lambda b: [view[b] for view in views],
            RowLayout.from_views(views, "latent"),
            lambda s: [v.view(shape[0], tokens, -1)[s // tokens, s % tokens] for v in views],
        )  # fmt: skip

    return case


def latent_and_indexer(is_block_major):
    """Pages of two sizes in one group: two latents of 656 bytes a token, two indexers of 132."""

    def case(device, seed=0):
        memory, tokens, blocks = Memory(device, seed), 8, 6
        widths = [656, 132, 656, 132]
        if is_block_major:
            whole = memory.tensor(blocks, sum(widths) * tokens, dtype=U8)
            pages = whole.split([width * tokens for width in widths], dim=1)
        else:
            pages = [memory.tensor(blocks, width * tokens, dtype=U8) for width in widths]
        views = [p.unflatten(1, (1, tokens, w)) for p, w in zip(pages, widths, strict=True)]
        return one_group(
            memory, views, lambda b: [page[b] for page in pages],
            RowLayout.from_views(views, "latent"),
            lambda s: [view[s // tokens, 0, s % tokens] for view in views],
        )  # fmt: skip

    return case


def kernel_blocks(order):
    """Blocks of 12 tokens that the attention kernel sees as three of 4."""

    def case(device, seed=0):
        sizes = SIZES | {"B": 15}
        cache = five_axes(order, sizes)(device, seed)
        small = cache.blocks[0]
        views = cache.rows.tensors
        cache.layouts = [layout_of_views(views, num_blocks=5)]

        def truth(block):
            # three small blocks follow each other inside a layer, or inside a head of a layer
            parts = [small(3 * block + i) for i in range(3)]
            by_layer = zip(*parts, strict=True)
            if order == "LHBNC":
                return [torch.stack([p[h] for p in layer]) for layer in by_layer for h in range(2)]
            return [part for layer in by_layer for part in layer]

        cache.blocks = [truth]
        return cache

    return case


def scales_apart(device, seed=0):
    """fp8 pages with fp32 scales per token and head in a tensor beside each."""
    memory = Memory(device, seed)
    views = []
    for _ in range(2):
        views += [memory.tensor(2, 6, 8, 2, 16, dtype=U8), memory.tensor(6, 2, 8, 2, dtype=F32)]
    return one_group(
        memory, views,
        lambda b: [views[0][0, b], views[0][1, b], views[1][b], views[2][0, b], views[2][1, b],
                   views[3][b]],
        block_axis=[1, 0, 1, 0],
    )  # fmt: skip


def padded(page, padding, blocks=5):
    """Opaque pages (a recurrent state, a sliding window) with a stride longer than the page."""

    def case(device, seed=0):
        memory = Memory(device, seed)
        views = [memory.tensor(blocks, page + padding, dtype=U8)[:, :page] for _ in range(3)]
        return one_group(memory, views, lambda b: [view[b] for view in views])

    return case


def aliasing(is_block_major):
    """Three groups over the same bytes, as hybrid models have them: two of two layers, one of one."""

    def case(device, seed=0):
        memory, blocks, page = Memory(device, seed), 6, 96
        if is_block_major:
            layers = memory.tensor(blocks, 2, page, dtype=U8).transpose(0, 1)
        else:
            layers = memory.tensor(2, blocks, page, dtype=U8)
        groups = [list(layers), list(layers), [layers[0]]]
        return Cache(
            [layout_of_views(views) for views in groups], memory.storages,
            [lambda b, views=views: [view[b] for view in views] for views in groups],
        )  # fmt: skip

    return case


def state_and_attention(device, seed=0):
    """A Mamba group: int8 [NB, 1, 1, state], padded to the page of the attention group it aliases."""
    memory, blocks, state = Memory(device, seed), 5, 400
    pages = memory.tensor(2, blocks, 2, 4, 32)
    raw = pages.view(U8).view(2, blocks, 1, 1, 512)
    states = raw[..., :state].view(torch.int8)
    return Cache(
        [layout_of_views(list(states)), layout_of_views(list(pages))], memory.storages,
        [lambda b: [states[0, b], states[1, b]], lambda b: [pages[0, b], pages[1, b]]],
    )  # fmt: skip


def groups_of_several_sizes(device, seed=0):
    """Four groups that share nothing: pages, block counts and alignment differ."""
    memory = Memory(device, seed)
    groups = [
        [memory.tensor(blocks, page, dtype=U8) for page in pages]
        for blocks, pages in ((9, [512, 512]), (3, [1152]), (14, [132, 656, 8]), (1, [48] * 5))
    ]
    return Cache(
        [layout_of_views(views) for views in groups], memory.storages,
        [lambda b, views=views: [view[b] for view in views] for views in groups],
    )  # fmt: skip


def every_second_layer(device, seed=0):
    """A group that owns every second page of a block-major cache: bytes of others in between."""
    memory = Memory(device, seed)
    whole = memory.tensor(5, 6, 80, dtype=U8)
    views = [whole[:, i] for i in (0, 2, 4)]
    return one_group(memory, views, lambda b: [view[b] for view in views])


def odd(device, seed=0):
    """Nothing a power of two, nothing aligned: pages of 1, 3, 577 and 1061 bytes, 7 blocks."""
    memory = Memory(device, seed)
    views = [memory.bytes(7 * (n + 2) + 1)[1:].view(7, -1)[:, :n] for n in (1, 3, 577, 1061)]
    return one_group(memory, views, lambda b: [view[b] for view in views])


ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")

_CASES = {
    **{order: five_axes(order) for order in ORDERS},
    **{f"{order}-placed": five_axes_placed(order) for order in ORDERS},
    # 18 bytes a head and token, nothing a power of two
    **{
        f"{order}-odd": five_axes(order, {"L": 2, "B": 3, "H": 3, "N": 5, "C": 18}, U8)
        for order in ORDERS
    },
    # tensors parallel: one head a rank; one block in the cache
    **{f"{o}-one-head": five_axes(o, SIZES | {"H": 1}) for o in ("LBNHC", "BHLNC")},
    **{f"{o}-one-block": five_axes(o, SIZES | {"B": 1}) for o in ("LBHNC", "BLHNC")},
    "2-NB-BS-H-D": halves_first,
    "NB-2-BS-H-D": halves_second,
    "mla-576-bf16": latent((5, 1, 8, 576), BF16),
    "mla-576-3d-fp16": latent((5, 8, 576), torch.float16),
    "mla-fp8-576": latent((5, 1, 8, 576), U8),
    "fp8_ds_mla-656": latent((5, 1, 8, 656), U8),
    "nvfp4_ds_mla-352": latent((5, 1, 8, 352), U8),
    "indexer-132": latent((5, 1, 64, 132), U8),
    "mla-and-indexer": latent_and_indexer(is_block_major=False),
    "mla-and-indexer-packed": latent_and_indexer(is_block_major=True),
    **{f"kernel-blocks-{o}": kernel_blocks(o) for o in ("LBNHC", "LBHNC", "LHBNC")},
    "fp8-with-scales": scales_apart,
    "padded-pages": padded(544, 32),
    "padded-odd-state": padded(1001, 23),
    "pages-over-a-tile": padded(5000, 8, blocks=3),
    "aliasing-groups": aliasing(is_block_major=False),
    "aliasing-groups-packed": aliasing(is_block_major=True),
    "state-and-attention": state_and_attention,
    "groups-of-several-sizes": groups_of_several_sizes,
    "every-second-layer": every_second_layer,
    "odd-everything": odd,
}

LAYOUTS = [pytest.param(case, id=name) for name, case in _CASES.items()]
ROW_LAYOUTS = [param for param in LAYOUTS if param.values[0](torch.device("cpu")).rows is not None]
