"""Caches of every kind of layout, built twice from the same bytes: on the device, and on the CPU for the twins."""

import dataclasses
from collections.abc import Callable

import torch

from kvferry.kernels.cache_shapes import layout_of_views
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.rows import RowLayout

GUARD_BYTES = 256
U8, BF16, FP16 = torch.uint8, torch.bfloat16, torch.float16


@dataclasses.dataclass
class Cache:
    """A paged cache.

    Attributes:
        layouts: one per group.
        storages: ``[bytes]`` uint8 each, everything behind the cache, guard bytes included.
        rows: of group 0, where it has tokens.
    """

    layouts: list[BlockLayout]
    storages: list[torch.Tensor]
    rows: RowLayout | None = None


class Memory:
    """Random bytes on a device: the same ones for the same requests in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(7)
        self.storages: list[torch.Tensor] = []

    def bytes(self, count: int) -> torch.Tensor:
        """Return ``[count]`` uint8 with guard bytes on both sides."""
        whole = torch.randint(
            0, 256, (count + 2 * GUARD_BYTES,), dtype=U8, generator=self._generator
        ).to(self._device)
        self.storages.append(whole)
        return whole[GUARD_BYTES : GUARD_BYTES + count]

    def numbers(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of any bit patterns."""
        return self.bytes(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


Builder = Callable[[torch.device], Cache]


def attention(order: str, sizes: dict[str, int], dtype: torch.dtype = BF16) -> Builder:
    """Build layers of ``[B, H, N, C]``, a head's K then its V, in one of the physical orders that vLLM knows."""

    def build(device: torch.device) -> Cache:
        memory = Memory(device)
        whole = memory.numbers(*(sizes[axis] for axis in order), dtype=dtype)
        views = list(whole.permute(*(order.index(axis) for axis in "LBHNC")))
        return Cache([layout_of_views(views)], memory.storages, RowLayout.from_views(views, "bhnc"))

    return build


def halves(num_blocks: int, tokens: int, heads: int, dim: int, layers: int) -> Builder:
    """Build layers of ``[2, NB, BS, H, D]``."""

    def build(device: torch.device) -> Cache:
        memory = Memory(device)
        views = [
            memory.numbers(2, num_blocks, tokens, heads, dim, dtype=BF16) for _ in range(layers)
        ]
        rows = RowLayout.from_views(views, "kv_first")
        return Cache([layout_of_views(views, block_axis=1)], memory.storages, rows)

    return build


def latent(num_blocks: int, tokens: int, widths: list[int], dtype: torch.dtype) -> Builder:
    """Build layers of ``[NB, BS, width]``: latents, and indexer rows beside them."""

    def build(device: torch.device) -> Cache:
        memory = Memory(device)
        views = [memory.numbers(num_blocks, tokens, width, dtype=dtype) for width in widths]
        rows = RowLayout.from_views(views, "latent")
        return Cache([layout_of_views(views)], memory.storages, rows)

    return build


def opaque(num_blocks: int, pages: list[int], padding: int, shift: int = 0) -> Builder:
    """Build pages of any bytes, *padding* bytes between two of them, *shift* bytes off an aligned start."""

    def build(device: torch.device) -> Cache:
        memory = Memory(device)
        views = [
            memory.bytes(num_blocks * (page + padding) + shift)[shift:].view(num_blocks, -1)[
                :, :page
            ]
            for page in pages
        ]
        return Cache([layout_of_views(views)], memory.storages)

    return build


def hybrid(page: int, state: int) -> Builder:
    """Build three groups: two that alias the same pages (one of states, padded), one of its own with other sizes."""

    def build(device: torch.device) -> Cache:
        memory = Memory(device)
        pages = memory.numbers(2, 9, page, dtype=U8)
        others = [memory.numbers(5, 3 * page, dtype=U8), memory.numbers(5, 1056, dtype=U8)]
        groups = [[pages[0, :, :state], pages[1, :, :state]], list(pages), others]
        return Cache([layout_of_views(group) for group in groups], memory.storages)

    return build


def caches(tiny: bool) -> dict[str, Builder]:
    """Return the caches by name; small enough for twins on a CPU."""
    llama = {"L": 3, "B": 11, "H": 8, "N": 16, "C": 256}
    if tiny:
        llama = {"L": 2, "B": 5, "H": 2, "N": 4, "C": 16}
    tokens, latent_width = (4, 64) if tiny else (64, 576)
    return {
        "llama LBNHC": attention("LBNHC", llama),
        "llama LHBNC, heads apart": attention("LHBNC", llama),
        "llama BLHNC, one run a block": attention("BLHNC", llama),
        "kv first": halves(7, 4 if tiny else 16, 2, 16 if tiny else 128, 2),
        "mla 576 bf16": latent(6, tokens, [latent_width] * 3, BF16),
        "mla 656 B and indexer 132 B": latent(6, tokens, [656, 132, 656, 132], U8),
        "hybrid, three groups": hybrid(2048 if tiny else 32 << 10, 1040 if tiny else 20_000),
        "padded pages, words of 8 bytes": opaque(7, [1008, 4048], 24),
        "padded pages, words of 4 bytes": opaque(7, [1008, 4048], 20),
        "words of 4 bytes": opaque(7, [1004], 4),
        "words of 2 bytes": opaque(7, [1002, 302], 2),
        "single bytes": opaque(7, [1001, 3], 6, shift=1),
        **({} if tiny else {"llama LBNHC fp16": attention("LBNHC", {**llama, "L": 1}, FP16)}),
    }
