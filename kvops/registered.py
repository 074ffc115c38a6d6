"""What the operators may touch: caches registered once, named by a number from then on.

An operator never takes an address from its caller. It takes the handle of a registered layout, and
every address follows from the layout's tables; so every argument can be checked before a byte moves.

``caches`` are the layout's storages as flat tensors. An operator that is given them works on
exactly these; without them it works on the memory that was registered. The difference matters under
``torch.compile`` only: there a tensor that an operator writes may be a copy, to be copied back later,
and a write into the registered memory behind it would be undone.
"""

import itertools
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch

from kvferry.kernels.host import HostMover
from kvferry.kernels.layout import BlockLayout, refuse_copy
from kvferry.kernels.table import Int64s, LayoutTable

Span = tuple[int, int]
"""Addresses of the first byte and of the one behind the last."""


class Memory:
    """The storages that a layout lives in.

    Ownership:
        Keeps the storages alive.

    Attributes:
        caches: one flat tensor per storage, in the order of their addresses, of the type that the
            engine's tensor has: a compiled graph cannot write a tensor whose views differ in type.
        device: where they live.
    """

    __slots__ = ("_span_ends", "_span_starts", "_starts", "caches", "device")

    def __init__(
        self, tensors: Iterable[torch.Tensor], spans: Iterable[Span], device: torch.device
    ) -> None:
        """Find the storages behind *tensors*.

        Raises:
            ValueError: a span is not inside one of them.
        """
        self.device = device
        found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._starts = sorted(found)
        self.caches = tuple(_flat(found[start]) for start in self._starts)
        wanted = list(spans)
        for start, end in wanted:
            home = self._home(start)
            if home < 0 or end > self._starts[home] + self.caches[home].nbytes:
                raise ValueError(
                    "layout must keep the tensors that its segments are in; "
                    f"got a segment of {end - start} bytes outside of them"
                )
        spans = _merge(wanted)
        self._span_starts = [start for start, _ in spans]
        self._span_ends = [end for _, end in spans]

    def _home(self, address: int) -> int:
        return bisect_right(self._starts, address) - 1

    def is_used(self, start: int, end: int) -> bool:
        """Say whether the layout uses a byte from *start* to before *end*."""
        # spans are apart and in order: the last one that begins before the end is the one to ask
        last = bisect_left(self._span_starts, end) - 1
        return last >= 0 and self._span_ends[last] > start

    def is_here(self, caches: Sequence[torch.Tensor]) -> bool:
        """Say whether *caches* are the registered storages themselves.

        Raises:
            ValueError: they are not even of the same sizes.
        """
        if len(caches) != len(self.caches):
            raise ValueError(
                f"caches must be the {len(self.caches)} tensors of the layout's `caches`, or none; "
                f"got {len(caches)}"
            )
        for index, (cache, own) in enumerate(zip(caches, self.caches, strict=True)):
            if cache.dtype != own.dtype or cache.shape != own.shape or not cache.is_contiguous():
                raise ValueError(
                    f"caches[{index}] must be a contiguous {own.dtype} {list(own.shape)}; "
                    f"got {cache.dtype} {list(cache.shape)} of strides {list(cache.stride())}"
                )
            if cache.device != self.device:
                raise ValueError(
                    f"caches[{index}] must be on {self.device}; got one on {cache.device}"
                )
        return all(c.data_ptr() == o.data_ptr() for c, o in zip(caches, self.caches, strict=True))

    def moved(self, address: int, caches: Sequence[torch.Tensor]) -> int:
        """Return where *address* is if *caches* stand for the registered storages."""
        home = self._home(address)
        return address - self._starts[home] + caches[home].data_ptr()


class RegisteredLayout:
    """The KV cache groups of one engine, as the block operators know them.

    Ownership:
        Whoever registered it holds it; its handle is good until it is gone. Keeps the cache alive.

    Threads:
        Any number at once, as long as no two write the same bytes.

    Attributes:
        handle: the ``layout`` argument of ``torch.ops.kvferry.*``.
        table: the segments, on their device.
        layouts: one per group.
        caches: the storages as flat tensors: the ``caches`` argument.
        memory: the same storages, and which bytes of them are in use.
        movers: per group, what moves it in host memory; none on another device.
        block_bytes: ``[groups]`` int64, payload of one block in bytes.
        num_blocks: ``[groups]`` int64, blocks of each group.
    """

    __slots__ = (
        "__weakref__", "_id_spaces", "_tangled", "block_bytes", "caches", "handle", "layouts",
        "memory", "movers", "num_blocks", "table",
    )  # fmt: skip

    __reduce_ex__ = refuse_copy

    def __init__(self, layouts: Sequence[BlockLayout], handle: int) -> None:
        self.handle = handle
        self.table = LayoutTable.from_layouts(layouts)
        self.layouts = self.table.layouts
        spans = [span for layout in layouts for span in _spans(layout)]
        # of two tensors in one storage the later tells its type: the engine's own, not bytes of it
        tensors = [tensor for layout in layouts for tensor in (*layout.tensors, *layout.views)]
        self.memory = Memory(tensors, spans, self.table.device)
        self.caches = self.memory.caches
        on_host = self.table.device.type == "cpu"
        self.movers = tuple(HostMover(layout) for layout in layouts) if on_host else ()
        self.block_bytes = np.array(self.table.block_bytes, np.int64)
        self.num_blocks = np.array([layout.num_blocks for layout in layouts], np.int64)
        self._id_spaces, self._tangled = _aliases(self.layouts)

    def on(self, caches: Sequence[torch.Tensor]) -> "RegisteredLayout":
        """Return the same layout on *caches*: itself if they are the registered ones, or none."""
        if not caches or self.memory.is_here(caches):
            return self
        moved = [
            replace(
                layout,
                segments=tuple(
                    replace(s, base_address=self.memory.moved(s.base_address, caches))
                    for s in layout.segments
                ),
                tensors=tuple(caches),
                views=(),
            )
            for layout in self.layouts
        ]
        return RegisteredLayout(moved, self.handle)

    def repeated_block(self, block_ids: Int64s, groups: Int64s) -> int | None:
        """Return a block whose bytes another entry has too, or None.

        Args:
            block_ids: ``[N]`` blocks, without holes.
            groups: ``[N]``, the group of each.
        """
        # groups that share their tensors share one numbering of blocks
        keys = block_ids + self._id_spaces[groups]
        order = np.argsort(keys, kind="stable") if (np.diff(keys) <= 0).any() else None
        ordered = keys if order is None else keys[order]
        twice = np.flatnonzero(np.diff(ordered) == 0)
        if twice.size:
            at = twice[0] if order is None else order[twice[0]]
            return int(block_ids[at])
        return self._tangled_block(block_ids, groups)

    def _tangled_block(self, block_ids: Int64s, groups: Int64s) -> int | None:
        """Compare bytes, not numbers, of groups that overlap in other ways."""
        starts, ends, owners = [], [], []
        for group in self._tangled:
            ids = block_ids[groups == group]
            for segment in self.layouts[group].segments:
                start = segment.base_address + ids * segment.block_stride
                starts.append(start)
                ends.append(start + segment.nbytes)
                owners.append(ids)
        if not starts:
            return None
        at = first_overlap(np.concatenate(starts), np.concatenate(ends))
        return None if at is None else int(np.concatenate(owners)[at])


def first_overlap(starts: Int64s, ends: Int64s) -> int | None:
    """Return the index of an interval that another one reaches into, or None.

    Args:
        starts: ``[N]`` int64, first byte of each interval.
        ends: ``[N]`` int64, the byte behind its last; never before *starts*.
    """
    if (starts[1:] >= ends[:-1]).all():
        return None
    order = np.argsort(starts, kind="stable")
    reached = np.flatnonzero(starts[order][1:] < np.maximum.accumulate(ends[order])[:-1])
    return int(order[reached[0] + 1]) if reached.size else None


_Kept = TypeVar("_Kept")


class Registry(Generic[_Kept]):
    """Handles and what they stand for; it keeps nothing alive.

    Threads:
        Any number at once.
    """

    def __init__(self, what: str) -> None:
        """Begin empty; *what* is what an error calls the things in it."""
        self._what = what
        self._kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def add(self, handle: int, thing: _Kept) -> None:
        """Make *thing* known by *handle*."""
        with self._lock:
            self._kept[handle] = thing

    def get(self, handle: int) -> _Kept:
        """Return what *handle* stands for.

        Raises:
            ValueError: nothing, or nothing any more.
        """
        thing = self._kept.get(handle)
        if thing is None:
            raise ValueError(f"layout must be the handle of {self._what}; got {handle}")
        return thing


LAYOUTS: Registry[RegisteredLayout] = Registry("a registered layout that still exists")
"""Of ``register_layout``."""

# one counter for all registries: a handle of one is never one of another
HANDLES = itertools.count(1)
"""The next handle; never used twice in a process."""


def register_layout(layouts: BlockLayout | Sequence[BlockLayout]) -> RegisteredLayout:
    """Make the KV cache groups of an engine known to the block operators.

    Done once, when the engine has allocated its cache: segment tables go to the device here.

    Args:
        layouts: one per KV cache group, on one device; groups may share tensors.

    Returns:
        What the operators take as ``layout``. They stop knowing it when the last reference is gone.

    Raises:
        ValueError: the layouts cannot be used together, or a group's segments overlap each other.
    """
    groups = [layouts] if isinstance(layouts, BlockLayout) else list(layouts)
    for index, group in enumerate(groups):
        if not isinstance(group, BlockLayout):
            raise ValueError(f"layouts[{index}] must be a BlockLayout; got {type(group).__name__}")
    registered = RegisteredLayout(groups, next(HANDLES))
    LAYOUTS.add(registered.handle, registered)
    return registered


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View the whole storage behind *tensor* as one flat tensor."""
    storage = tensor.untyped_storage()
    dtype = torch.uint8 if storage.nbytes() % tensor.element_size() else tensor.dtype
    size = (storage.nbytes() // dtype.itemsize,)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, size, (1,))


def _spans(layout: BlockLayout) -> list[Span]:
    return [
        (s.base_address, s.base_address + (layout.num_blocks - 1) * s.block_stride + s.nbytes)
        for s in layout.segments
    ]


def _merge(spans: Sequence[Span]) -> list[Span]:
    """Return *spans* in order, joined where they touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _aliases(layouts: Sequence[BlockLayout]) -> tuple[Int64s, list[int]]:
    """Find out how groups share bytes.

    Returns:
        ``[groups]`` int64, what to add to a block id so that two entries have the same number if they
        have the same bytes; and the groups for which numbers do not tell.

    Raises:
        ValueError: segments of one group overlap.
    """
    space = list(range(len(layouts)))
    tangled: set[int] = set()
    for one, left in enumerate(layouts):
        for two in range(one, len(layouts)):
            kinds = _shared_shifts(left, layouts[two], is_same=one == two)
            if one == two and kinds:
                raise ValueError(
                    f"layouts[{one}] must have segments that do not overlap each other; "
                    "got two that share bytes"
                )
            if kinds == {0}:
                old = space[two]
                space = [space[one] if number == old else number for number in space]
            elif kinds:
                tangled |= {one, two}
    # ids are below 2^28; further apart than that, spaces do not meet
    return np.array(space, np.int64) << 32, sorted(tangled)


def _shared_shifts(left: BlockLayout, right: BlockLayout, *, is_same: bool) -> set[int]:
    """Return by how many blocks two groups' numbers differ where they share bytes.

    Block ``i`` of *left* and block ``i - shift`` of *right* share some. ``-1`` stands for
    what no such number describes: other strides.
    """
    a, b = _columns(left), _columns(right)
    near = (a[:, None, 3] > b[None, :, 0]) & (b[None, :, 3] > a[:, None, 0])
    if is_same:
        np.fill_diagonal(near, False)
    first, second = np.nonzero(near)
    if not first.size:
        return set()
    x, y = a[first], b[second]
    alike = x[:, 1] == y[:, 1]
    shifts = {-1} if not alike.all() else set()
    x, y = x[alike], y[alike]
    # of a single block the stride means nothing, and may be 0
    quotient, rest = np.divmod(y[:, 0] - x[:, 0], np.maximum(x[:, 1], 1))
    shifts |= set(quotient[rest < x[:, 2]].tolist())
    shifts |= set((quotient + 1)[rest + y[:, 2] > x[:, 1]].tolist())
    return shifts


def _columns(layout: BlockLayout) -> Int64s:
    """Return ``[segments, 4]``: base address, block stride, bytes, end of the span."""
    ends = [end for _, end in _spans(layout)]
    rows = [
        (s.base_address, s.block_stride, s.nbytes, end)
        for s, end in zip(layout.segments, ends, strict=True)
    ]
    return np.array(rows, np.int64)
