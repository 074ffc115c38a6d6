"""What the scripts of tokens, heads and quantised blocks share: a cache whose numbers have a meaning.

The first way of each case is a memcpy of as many bytes as the others write, in as many pieces: the roof.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from perf.harness import Provider, timed

from kvferry.kernels.rows import RowLayout

POISON = 0xA5
BLOCK = 16
"""Tokens of a block."""


@dataclass(frozen=True)
class Model:
    """A model's cache, bfloat16.

    Attributes:
        name: in the table.
        layers: views of the cache.
        heads: KV heads; 0 for a latent.
        dim: of a head, or of a latent.
    """

    name: str
    layers: int
    heads: int
    dim: int

    @property
    def row_bytes(self) -> int:
        """What one token has, in all layers."""
        return self.layers * 2 * (2 * self.heads * self.dim if self.heads else self.dim)


MODELS = (Model("llama-3.1-8b", 32, 8, 128), Model("deepseek-v3", 61, 0, 576))


class TokenCache:
    """A cache of random numbers, layer by layer, each in a storage of its own.

    Attributes:
        views: ``[NB, H, 16, 2 D]``, a token's heads side by side in memory, or ``[NB, 16, C]``.
        rows: the layout.
        ids: every block once, shuffled.
    """

    def __init__(self, model: Model, num_bytes: int, device: torch.device) -> None:
        self.model, self.device = model, device
        self.count = max(16, num_bytes // (model.row_bytes * BLOCK) // 16 * 16)
        generator = torch.Generator(device).manual_seed(1)
        made = []
        for _ in range(model.layers):
            shape = (
                self.count,
                BLOCK,
                *((model.heads, 2 * model.dim) if model.heads else (model.dim,)),
            )
            layer = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
            made.append(layer.transpose(1, 2) if model.heads else layer)
        self.views = made
        self.rows = RowLayout.from_views(made, "bhnc" if model.heads else "latent")
        self.ids = torch.from_numpy(np.random.default_rng(5).permutation(self.count))

    def buffer(self, size: int) -> torch.Tensor:
        """Return poisoned bytes that the device can reach."""
        bytes_ = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return bytes_.fill_(POISON)

    def fill(self, value: float) -> None:
        """Overwrite the cache."""
        for view in self.views:
            view.fill_(value)

    def kept(self) -> list[torch.Tensor]:
        """Return a copy of the cache."""
        return [view.clone() for view in self.views]

    def put_back(self, kept: Sequence[torch.Tensor]) -> None:
        """Restore the cache."""
        for view, old in zip(self.views, kept, strict=True):
            view.copy_(old)

    def holds(self, kept: Sequence[torch.Tensor]) -> bool:
        """Whether the cache is as it was, bit for bit."""
        pairs = zip(self.views, kept, strict=True)
        return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def memcpy(like: torch.Tensor, pieces: int, device: torch.device) -> Provider:
    """Return contiguous copies of as many bytes, in so many pieces; from a device, in one."""
    to = torch.empty_like(like)
    source = torch.empty(to.numel(), dtype=torch.uint8).random_(0, 256)
    size = to.numel() // pieces
    far = source.to(device)

    def work() -> None:
        if device.type == "cuda":
            to.copy_(far, non_blocking=True)
            return
        for at in range(0, size * pieces, size):
            ctypes.memmove(to.data_ptr() + at, source.data_ptr() + at, size)

    def verify() -> bool:
        return torch.equal(to[: size * pieces], source[: size * pieces])

    return provider("memcpy", device, work, lambda: to.fill_(POISON), verify)


def device_of() -> torch.device:
    """Return the device that the scripts use."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def provider(
    name: str,
    device: torch.device,
    work: Callable[[], object],
    before: Callable[[], object],
    verify: Callable[[], bool],
) -> Provider:
    """Return a way, timed as its device needs it."""
    return Provider(name, timed(work, device), before, verify)


def there_and_back(
    cache: TokenCache,
    buffer: torch.Tensor,
    expected: torch.Tensor,
    kept: Sequence[torch.Tensor],
    ways: dict[str, Callable[[], object]],
    *,
    is_load: bool,
) -> list[Provider]:
    """Return providers that fill *buffer* with *expected*, or bring the cache back to *kept*."""
    if is_load:

        def before() -> None:
            buffer.copy_(expected)
            cache.fill(0.0)

        verify = partial(cache.holds, kept)
    else:

        def before() -> None:
            buffer.fill_(POISON)

        def verify() -> bool:
            return torch.equal(buffer, expected)

    return [provider(name, cache.device, work, before, verify) for name, work in ways.items()]
