"""Caches of random bytes in every layout an engine uses, and parts between guard bytes."""

from dataclasses import dataclass

import pytest
import torch

from kvferry.kernels.layout import BlockLayout

GUARD = 64


@dataclass
class Cache:
    """A cache with the storages behind it, so that tests see bytes between and around pages."""

    layout: BlockLayout
    storages: list

    def bytes(self):
        return [storage.clone() for storage in self.storages]


@dataclass
class Part:
    """A poisoned part with guard bytes on both sides."""

    whole: torch.Tensor
    address: int


def random_bytes(generator, *shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def one_storage(rng, pages, num_blocks):
    """LBHNC: equally spaced when all pages are alike, with a gap after each layer."""
    sizes = [num_blocks * page + GUARD for page in pages]
    whole = random_bytes(rng, sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(pages))]
    return [whole], [
        whole.as_strided((num_blocks, page), (page, 1), start)
        for page, start in zip(pages, starts, strict=True)
    ]


def separate(rng, pages, num_blocks):
    tensors = [random_bytes(rng, num_blocks, page) for page in pages]
    return tensors, tensors


def padded(rng, pages, num_blocks):
    """Each page ends with 24 bytes that are not payload, and 16 more lie between pages."""
    wholes = [random_bytes(rng, num_blocks, page + 40) for page in pages]
    return wholes, [w[:, : page + 24] for w, page in zip(wholes, pages, strict=True)]


def packed(rng, pages, num_blocks):
    """BLHNC: all layers of a block side by side."""
    stride = sum(pages) + GUARD
    whole = random_bytes(rng, num_blocks * stride)
    return [whole], [
        whole.as_strided((num_blocks, page), (stride, 1), sum(pages[:i]))
        for i, page in enumerate(pages)
    ]


def half_and_half(rng, pages, num_blocks):
    """A plane and loose pages together: every second layer in one storage, the others apart."""
    whole, inner = one_storage(rng, pages[::2], num_blocks)
    apart, outer = separate(rng, pages[1::2], num_blocks)
    tensors = [None] * len(pages)
    tensors[::2], tensors[1::2] = inner, outer
    return whole + apart, tensors


LAYOUTS = {f.__name__: f for f in (one_storage, separate, padded, packed, half_and_half)}


@pytest.fixture
def make_cache():
    """Return a maker of caches of random bytes: every bit pattern travels."""

    def make(kind, pages, num_blocks, blocks_per_chunk, seed=42):
        rng = torch.Generator().manual_seed(seed)
        storages, tensors = LAYOUTS[kind](rng, list(pages), num_blocks)
        return Cache(BlockLayout.from_tensors(tensors, pages, blocks_per_chunk), storages)

    return make


@pytest.fixture
def make_part():
    """Return a maker of parts full of 0xA5 between guard bytes of the same value."""

    def make(layout):
        whole = torch.full((layout.part_bytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        return Part(whole, whole.data_ptr() + GUARD)

    return make


@pytest.fixture
def interpreted(monkeypatch):
    """Return ``run(module, "_x_kernel") -> launches``: the shipped kernel, in Triton's interpreter.

    The kernel of *module* is replaced by an interpreter of the same function until the test ends; with
    a CUDA device it runs as it is. Each launch appends its grid to the list. A second call for the same
    kernel returns the same list.
    """
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    class Counted:
        def __init__(self, kernel, launches):
            self.kernel, self.launches = kernel, launches

        def __getitem__(self, grid):
            self.launches.append(grid)
            return self.kernel[grid]

    def run(module, name):
        kernel = getattr(module, name)
        if isinstance(kernel, Counted):
            return kernel.launches
        launches = []
        if not torch.cuda.is_available():
            kernel = InterpretedFunction(kernel.fn)
        monkeypatch.setattr(module, name, Counted(kernel, launches))
        return launches

    return run
