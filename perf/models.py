"""What real models keep in their KV cache: pages per layer and group, as an engine lays them out on one rank.

Perf scripts and the static report take their shapes from here. Sizes are bytes of one layer's page of one block.
"""

from dataclasses import dataclass

BF16, FP8 = 2, 1


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a KV cache spec.

    Attributes:
        name: what kind of layer.
        layers: how many of them.
        page_bytes: per segment of one layer, in the order of the cache; one entry for K and V side by side.
        block_size: tokens of one block; 0 for a state that is not per token.
        num_kv_heads: of this rank; 0 for a latent or a state.
        head_dim: of K and of V, or of a latent.
        itemsize: bytes of one number; 1 for opaque bytes.
    """

    name: str
    layers: int
    page_bytes: tuple[int, ...]
    block_size: int
    num_kv_heads: int = 0
    head_dim: int = 0
    itemsize: int = 1

    @property
    def block_bytes(self) -> int:
        """Payload of one block."""
        return self.layers * sum(self.page_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, all segments; 0 for a state."""
        return sum(self.page_bytes) // self.block_size if self.block_size else 0


@dataclass(frozen=True, slots=True)
class Model:
    """One rank's share of a model's cache.

    Attributes:
        name: model, cache dtype where it is not bf16, and tensor-parallel size.
        groups: KV cache groups.
    """

    name: str
    groups: tuple[Group, ...]

    @property
    def largest_page(self) -> int:
        """Bytes of the largest segment."""
        return max(page for group in self.groups for page in group.page_bytes)


def heads(
    name: str,
    layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    itemsize: int = BF16,
) -> Group:
    """Return a group of layers whose page holds each head's K and V: ``[B, H, N, C]`` of vLLM 0.29 and later."""
    page = block_size * num_kv_heads * 2 * head_dim * itemsize
    return Group(name, layers, (page,), block_size, num_kv_heads, head_dim, itemsize)


def halves(
    name: str,
    layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    itemsize: int = BF16,
) -> Group:
    """Return a group of layers with a K page and a V page: ``[2, NB, BS, H, D]`` and ``[NB, 2, BS, H, D]``."""
    page = block_size * num_kv_heads * head_dim * itemsize
    return Group(name, layers, (page, page), block_size, num_kv_heads, head_dim, itemsize)


def latent(name: str, layers: int, row_bytes: int, block_size: int = 64) -> Group:
    """Return a group of MLA layers: one row of bytes per token."""
    return Group(name, layers, (block_size * row_bytes,), block_size, 0, row_bytes)


MODELS = (
    *(Model(f"llama-3.1-8b tp{tp}", (heads("attention", 32, 8 // tp, 128),)) for tp in (1, 4, 8)),
    *(Model(f"llama-3.1-70b tp{tp}", (heads("attention", 80, 8 // tp, 128),)) for tp in (1, 4, 8)),
    Model("llama-3.1-70b tp8, K and V apart", (halves("attention", 80, 1, 128),)),
    Model("qwen3-32b tp1", (heads("attention", 64, 8, 128),)),
    # 52 layers see a window of 1024 tokens; the engine cuts them into groups of as many as see everything
    Model(
        "gemma-3-27b tp1",
        (
            heads("full", 10, 16, 128),
            *(heads(f"window {i}", 10, 16, 128) for i in range(5)),
            heads("window 5", 2, 16, 128),
        ),
    ),
    Model("deepseek-v3", (latent("latent", 61, 576 * BF16),)),
    Model("deepseek-v3 fp8_ds_mla", (latent("latent", 61, 656),)),
    Model(
        "deepseek-v3.2 fp8_ds_mla",
        (Group("latent and indexer", 61, (64 * 656, 64 * 132), 64, 0, 656 + 132),),
    ),
    Model("gpt-oss-120b tp1", (heads("full", 18, 8, 64), heads("window", 18, 8, 64))),
    # Mamba-2 states of 128 heads x 64 x 128 and a convolution's 8448 x 3, beside pages of 528 tokens
    Model(
        "bamba-9b tp1",
        (
            Group("state", 29, (128 * 64 * 128 * BF16 + 8448 * 3 * BF16,), 0),
            heads("attention", 3, 8, 128, block_size=528),
        ),
    ),
)
"""In the order of the report."""
