"""What the scripts of block moves share: a paged cache, blobs, and the ways to move one into the other.

Ways (providers), of which the first is the baseline and the roof:

    memcpy           one contiguous copy per blob, of as many bytes as the blob has
    memcpy_whole     one contiguous copy of all blobs: large enough to bypass the caches
    kvferry          torch.ops.kvferry, one call per transfer
    index_copy       index_select of each layer, then a copy into the blobs (scatter: index_copy_)
    block_loop       one copy per block and layer, by torch
    descriptors      one (source, destination, bytes) per block and layer made by numpy, then one copy each:
                     what an engine's own offloading does
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from perf.harness import Provider, timed

from kvferry.kernels.layout import BlockLayout
from kvferry.kvops import ops

POISON = 0xA5
TRANSFER_BLOCKS = 32
"""Blocks of one call: a request of 512 tokens."""


@dataclass(frozen=True)
class Model:
    """A model's cache.

    Attributes:
        name: in the table.
        layers: pages of a block.
        page_bytes: of one layer, 16 tokens.
    """

    name: str
    layers: int
    page_bytes: int

    @property
    def block_bytes(self) -> int:
        """All layers."""
        return self.layers * self.page_bytes


MODELS = (
    # 16 tokens x 8 heads x 128 x bf16 x (K, V)
    Model("llama-3.1-8b", 32, 64 << 10),
    # 16 tokens x 576 x bf16
    Model("deepseek-v3", 61, 18 << 10),
)


class Moves:
    """One model's cache with all blocks in use, blobs for them, and contiguous bytes for the baseline."""

    def __init__(
        self, model: Model, num_bytes: int, device: torch.device, *, one_storage: bool
    ) -> None:
        self.model, self.device = model, device
        count = max(TRANSFER_BLOCKS, num_bytes // model.block_bytes)
        self.count = count // TRANSFER_BLOCKS * TRANSFER_BLOCKS
        shape = self.count, model.page_bytes
        if one_storage:
            self.layers = list(torch.empty(model.layers, *shape, dtype=torch.uint8, device=device))
        else:
            self.layers = [
                torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(model.layers)
            ]
        for seed, layer in enumerate(self.layers):
            layer.random_(0, 256, generator=torch.Generator(device).manual_seed(seed))
        self.pinned = device.type == "cuda"
        size = self.count * model.block_bytes
        self.blobs = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned).random_(0, 256)
        self.plain = self.blobs.to(device, copy=True)
        self.rows = self.blobs.view(self.count, model.layers, model.page_bytes)
        self.layout = ops.register_layout(
            BlockLayout.from_tensors(self.layers, [model.page_bytes] * model.layers, 1)
        )
        self.ids = torch.from_numpy(np.random.default_rng(5).permutation(self.count))
        self.offsets = torch.arange(self.count) * model.block_bytes

    def gathered(self) -> bool:
        """Whether every blob holds its block."""
        ids = self.ids.to(self.device)
        return all(
            torch.equal(self.rows[:, index].to(self.device), layer[ids])
            for index, layer in enumerate(self.layers)
        )

    def poison(self) -> None:
        """Poison the blobs."""
        self.blobs.fill_(POISON)

    def poison_cache(self) -> None:
        """Poison the cache."""
        for layer in self.layers:
            layer.fill_(POISON)

    def transfers(self) -> list[slice]:
        """Return the blocks of each call."""
        return [slice(n, n + TRANSFER_BLOCKS) for n in range(0, self.count, TRANSFER_BLOCKS)]

    def memcpy(self, *, is_load: bool) -> Callable[[], None]:
        """Return one contiguous copy per blob."""
        size = self.model.block_bytes
        if self.device.type == "cpu":
            blobs, plain, move = self.blobs.data_ptr(), self.plain.data_ptr(), ctypes.memmove
            to, source = (plain, blobs) if is_load else (blobs, plain)

            def copy() -> None:
                for at in range(0, self.count * size, size):
                    move(to + at, source + at, size)

            return copy
        to, source = (self.plain, self.blobs) if is_load else (self.blobs, self.plain)
        pairs = list(zip(to.split(size), source.split(size), strict=True))

        def enqueue() -> None:
            for one, other in pairs:
                one.copy_(other, non_blocking=True)

        return enqueue

    def memcpy_whole(self, *, is_load: bool) -> Callable[[], None]:
        """Return one contiguous copy of everything."""
        to, source = (self.plain, self.blobs) if is_load else (self.blobs, self.plain)
        if self.device.type == "cpu":
            addresses = to.data_ptr(), source.data_ptr(), to.numel()
            return lambda: ctypes.memmove(*addresses)
        return lambda: to.copy_(source, non_blocking=True)

    def kvferry(self, *, is_load: bool) -> Callable[[], None]:
        """Return one operator call per transfer."""
        op = ops.scatter_blocks if is_load else ops.gather_blocks
        calls = [(self.ids[part], self.offsets[part]) for part in self.transfers()]

        def work() -> None:
            for ids, offsets in calls:
                op(self.layout, ids, self.blobs, offsets)

        return work

    def index_copy(self, *, is_load: bool) -> Callable[[], None]:
        """Return index_select and a copy, layer by layer; the other way index_copy_."""
        shape = TRANSFER_BLOCKS, self.model.page_bytes
        space = torch.empty(shape, dtype=torch.uint8, device=self.device)
        calls = [(self.ids[part].to(self.device), self.rows[part]) for part in self.transfers()]

        def gather() -> None:
            for ids, rows in calls:
                for index, layer in enumerate(self.layers):
                    torch.index_select(layer, 0, ids, out=space)
                    rows[:, index].copy_(space, non_blocking=True)

        def scatter() -> None:
            for ids, rows in calls:
                for index, layer in enumerate(self.layers):
                    space.copy_(rows[:, index], non_blocking=True)
                    layer.index_copy_(0, ids, space)

        return scatter if is_load else gather

    def block_loop(self, *, is_load: bool) -> Callable[[], None]:
        """Return one copy per block and layer."""
        ids = self.ids.tolist()

        def work() -> None:
            for row, block in zip(self.rows, ids, strict=True):
                for blob, layer in zip(row, self.layers, strict=True):
                    to, source = (layer[block], blob) if is_load else (blob, layer[block])
                    to.copy_(source, non_blocking=True)

        return work

    def descriptors(self, *, is_load: bool) -> Callable[[], None]:
        """Return descriptors for every block and layer, and one copy each."""
        page = self.model.page_bytes
        calls = [(self.ids[part].numpy(), self.offsets[part].numpy()) for part in self.transfers()]
        bases = np.array([layer.data_ptr() for layer in self.layers])
        blobs, steps = self.blobs.data_ptr(), np.arange(self.model.layers) * page
        copy = ctypes.memmove

        def work() -> None:
            for ids, offsets in calls:
                pages = (bases[None] + ids[:, None] * page).ravel()
                places = (blobs + offsets[:, None] + steps[None]).ravel()
                sizes = np.full(pages.size, page)
                to, source = (pages, places) if is_load else (places, pages)
                for one, other, size in zip(
                    to.tolist(), source.tolist(), sizes.tolist(), strict=True
                ):
                    copy(one, other, size)

        return work

    def providers(self, *, is_load: bool) -> list[Provider]:
        """Return every way, with its check."""
        before = self.poison_cache if is_load else self.poison
        expected = self.blobs.clone() if is_load else None

        def scattered() -> bool:
            return torch.equal(self.blobs, expected) and self.gathered()

        verify = scattered if is_load else self.gathered

        def contiguous() -> bool:
            return torch.equal(self.blobs, self.plain.cpu())

        made = []
        for name in (
            "memcpy",
            "memcpy_whole",
            "kvferry",
            "index_copy",
            "block_loop",
            "descriptors",
        ):
            is_plain = name.startswith("memcpy")
            if name == "descriptors" and self.device.type != "cpu":
                # there it is a batch of the copy engine: perf/bench_copy_engine.py
                continue
            work = getattr(self, name)(is_load=is_load)
            poison = (self.plain.zero_ if is_load else self.poison) if is_plain else before
            made.append(
                Provider(name, timed(work, self.device), poison, contiguous if is_plain else verify)
            )
        return made
