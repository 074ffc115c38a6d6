"""gather_blocks and scatter_blocks as operators: every layout, against plain indexing of the cache."""

import gc

import numpy as np
import pytest
import torch

from kvferry.kernels.cache_shapes import layout_of_views
from kvferry.kernels.layout import BlockLayout
from kvferry.kvops import ops

from ..kernels.layouts import LAYOUTS  # noqa: TID252 (tests are no package to name)

CPU = torch.device("cpu")
POISON = 0xA5


class Transfer:
    """Some blocks of every group of a cache, each with its own place in poisoned blobs."""

    def __init__(self, cache, *, seed=0, repeats=False):
        self.cache, self.layout = cache, ops.register_layout(cache.layouts)
        rng = np.random.default_rng(seed)
        alignment = self.layout.table.alignment
        self.ids, self.groups, self.offsets, self.counts, self.taken = [], [], [], [], set()
        at = 16
        for group, layout in enumerate(cache.layouts):
            ids = rng.permutation(layout.num_blocks).tolist()
            ids = [b for b in ids if repeats or not self.is_taken(group, b)]
            if repeats:
                ids += ids[:2]
            self.counts.append(len(ids))
            for block in ids:
                # gaps of every size, so that some blocks are neighbours and some are not
                at += int(rng.integers(0, 3)) * alignment
                self.ids.append(block)
                self.groups.append(group)
                self.offsets.append(at)
                at += layout.block_bytes
        self.blobs = torch.full((at + 16,), POISON, dtype=torch.uint8)

    def is_taken(self, group, block):
        """Say whether another group has bytes of this block already."""
        layout = self.cache.layouts[group]
        mine = {
            byte
            for s in layout.segments
            for byte in range(
                s.base_address + block * s.block_stride,
                s.base_address + block * s.block_stride + s.nbytes,
            )
        }
        if mine & self.taken:
            return True
        self.taken |= mine
        return False

    def rows(self):
        return zip(self.groups, self.ids, self.offsets, strict=True)

    def run(self, op, **keywords):
        op(
            self.layout, torch.tensor(self.ids, dtype=torch.int64), self.blobs,
            torch.tensor(self.offsets, dtype=torch.int64), counts=self.counts, **keywords,
        )  # fmt: skip


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", LAYOUTS)
def test_gather_brings_every_block_to_its_place(case):
    cache = case(CPU)
    before = [storage.clone() for storage in cache.storages]
    transfer = Transfer(cache, repeats=True)
    expected = transfer.blobs.clone()
    for group, block, offset in transfer.rows():
        row = cache.expected(group, block)
        expected[offset : offset + row.numel()] = row

    transfer.run(ops.gather_blocks)

    same(transfer.blobs, expected)
    same(cache.storages, before)


@pytest.mark.parametrize("case", LAYOUTS)
def test_scatter_writes_the_blocks_and_nothing_else(case):
    cache, original = case(CPU), case(CPU)
    transfer = Transfer(cache)
    transfer.blobs.random_(0, 256, generator=torch.Generator().manual_seed(3))
    blobs = transfer.blobs.clone()

    transfer.run(ops.scatter_blocks)

    same(transfer.blobs, blobs)
    for group, block, offset in transfer.rows():
        row = cache.expected(group, block)
        same(row, blobs[offset : offset + row.numel()])
    # what was gathered before, scattered again, must restore every byte
    back = Transfer(original)
    back.blobs = torch.zeros_like(blobs)
    back.run(ops.gather_blocks)
    transfer.blobs = back.blobs
    transfer.run(ops.scatter_blocks)
    same(cache.storages, original.storages)


@pytest.mark.parametrize("case", LAYOUTS)
def test_holes_keep_what_they_held(case):
    cache = case(CPU)
    before = [storage.clone() for storage in cache.storages]
    transfer = Transfer(cache)
    full = transfer.blobs.clone()
    for index, (group, block, offset) in enumerate(transfer.rows()):
        if index % 2:
            transfer.ids[index] = -1
            # whatever the offset of a hole is, nothing goes there
            transfer.offsets[index] = (7, -5, 1 << 62)[index % 3]
        else:
            row = cache.expected(group, block)
            full[offset : offset + row.numel()] = row
    transfer.run(ops.gather_blocks)
    same(transfer.blobs, full)
    transfer.run(ops.scatter_blocks)
    same(cache.storages, before)

    transfer.ids = [-1] * len(transfer.ids)
    poisoned = transfer.blobs = torch.full_like(full, POISON)
    transfer.run(ops.gather_blocks)
    transfer.run(ops.scatter_blocks)
    assert (poisoned == POISON).all()
    same(cache.storages, before)


@pytest.fixture
def pages():
    """Return a group of four layers of eight blocks, registered, and its tensors."""
    cache = torch.randint(0, 256, (4, 8, 64), dtype=torch.uint8)
    return cache, ops.register_layout(BlockLayout.from_tensors(list(cache), [64] * 4, 1))


IDS, OFFSETS = torch.tensor([5, 1]), torch.tensor([256, 0])


def blobs_of(cache, ids=(1, 5)):
    return torch.cat([cache[:, block].flatten() for block in ids])


def test_no_blocks_are_no_work(pages, poisoned):
    cache, layout = pages
    before = cache.clone()
    none = torch.empty(0, dtype=torch.int64)
    for blobs in (poisoned(64), poisoned(0)):
        ops.gather_blocks(layout, none, blobs, none)
        ops.scatter_blocks(layout, none, blobs, none)
        assert (blobs == POISON).all()
    same(cache, before)


def test_blobs_may_be_numpy_or_anything_with_dlpack(pages, poisoned):
    cache, layout = pages

    class Foreign:
        def __init__(self, array):
            self._array = array

        def __dlpack__(self, **keywords):
            return self._array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    blobs = np.full(512, POISON, np.uint8)
    ops.gather_blocks(layout, np.array([5, 1]), Foreign(blobs), Foreign(np.array([256, 0])))
    same(torch.from_numpy(blobs), blobs_of(cache))
    before = cache.clone()
    cache[:, 5] = 0
    ops.scatter_blocks(layout, np.array([5, 1]), blobs, OFFSETS)
    same(cache, before)


class CudaArray:
    """What an array of another library on a device looks like."""

    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (512,), "typestr": "|u1", "data": (0x7F0000000000, False), "version": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([1, 2], "blobs must be a tensor, or an array with __dlpack__ or .*; got list"),
        (None, "blobs must be a tensor, .*; got NoneType"),
        (np.frombuffer(bytes(512), np.uint8), "blobs must be an array that torch can view; got ndarray"),
        (np.array(["a"]), "blobs must be an array that torch can view; got ndarray"),
        pytest.param(
            CudaArray(), "blobs must be an array that torch can view; got CudaArray",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the address is invented"),
        ),
    ],
)  # fmt: skip
def test_what_is_no_array_is_refused_by_name(pages, array, message):
    _, layout = pages
    with pytest.raises(ValueError, match=message):
        ops.gather_blocks(layout, IDS, array, OFFSETS)


def test_a_copy_is_not_taken_for_the_array(pages, monkeypatch):
    # torch copies an array of another device to the current one
    monkeypatch.setattr(
        torch, "as_tensor", lambda array, device: torch.zeros(512, dtype=torch.uint8)
    )
    _, layout = pages
    with pytest.raises(ValueError, match="got CudaArray: it is on another device than the current"):
        ops.gather_blocks(layout, IDS, CudaArray(), OFFSETS)


def test_a_compiled_gather_sees_what_the_graph_wrote_before(pages, poisoned):
    cache, layout = pages

    def step(blobs, ids, offsets):
        cache[2, 5] = 3
        ops.gather_blocks(layout, ids, blobs, offsets)
        blobs.bitwise_xor_(0xFF)

    blobs = poisoned(512)
    torch.compile(step, fullgraph=True, backend="aot_eager")(blobs, IDS, OFFSETS)
    assert (cache[2, 5] == 3).all()
    same(blobs, blobs_of(cache).bitwise_xor(0xFF))


def test_a_compiled_scatter_is_seen_by_what_the_graph_reads_after(pages):
    cache, layout = pages
    blobs = torch.randint(0, 256, (512,), dtype=torch.uint8)

    def step(blobs, ids, offsets):
        ops.scatter_blocks(layout, ids, blobs, offsets)
        return cache[0, 5] + 1

    read = torch.compile(step, fullgraph=True, backend="aot_eager")(blobs, IDS, OFFSETS)
    same(blobs_of(cache), blobs)
    same(read, blobs[256:320] + 1)


def test_a_compiled_graph_may_write_a_cache_that_is_moved_in_bytes(poisoned):
    """As a model does: it writes numbers where the operators move pages."""
    caches = [torch.randn(8, 2, 4, 16).bfloat16() for _ in range(2)]
    layout = ops.register_layout(layout_of_views(caches))

    def step(blobs, ids, offsets):
        caches[0][2, 1] = 3.0
        ops.gather_blocks(layout, ids, blobs, offsets)
        ops.scatter_blocks(layout, ids + 4, blobs, offsets)
        return caches[1][6] + 1.0

    blobs = poisoned(1024)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    read = compiled(blobs, torch.tensor([2, 0]), torch.tensor([0, 512]))
    for old, new, start in ((2, 6, 0), (0, 4, 512)):
        pages = torch.cat([cache[old].view(torch.uint8).flatten() for cache in caches])
        same(blobs[start : start + 512], pages)
        assert all(torch.equal(cache[old], cache[new]) for cache in caches)
    assert (caches[0][2, 1] == 3.0).all()
    assert torch.equal(read, caches[1][2] + 1.0)


def test_a_graph_that_cannot_see_the_cache_is_refused(pages, poisoned):
    _, layout = pages

    def step(blobs, ids, offsets):
        torch.ops.kvferry.gather_blocks(layout.handle, [], ids, blobs, offsets)

    with pytest.raises(Exception, match="caches must be the layout's `caches`"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(poisoned(512), IDS, OFFSETS)


def test_caches_elsewhere_are_used_instead_of_the_registered_ones(pages, poisoned):
    cache, layout = pages
    before = cache.clone()
    other = cache.clone().bitwise_xor_(0xFF)
    blobs = poisoned(512)
    torch.ops.kvferry.gather_blocks(layout.handle, [other.flatten()], IDS, blobs, OFFSETS)
    same(blobs, blobs_of(other))
    torch.ops.kvferry.scatter_blocks(layout.handle, [other.flatten()], IDS, blobs ^ 1, OFFSETS)
    same(blobs_of(other), blobs ^ 1)
    same(cache, before)


def test_opcheck_passes(pages, poisoned):
    _, layout = pages
    numbers = torch.tensor([0, 1])
    for name in ("gather_blocks", "scatter_blocks"):
        op = getattr(torch.ops.kvferry, name).default
        arguments = (layout.handle, list(layout.caches), IDS, poisoned(512), OFFSETS)
        torch.library.opcheck(op, arguments)
        flags = {"done": torch.zeros(2, dtype=torch.int32)}
        keywords = {"blob_ids": numbers, "places": torch.zeros_like(numbers), **flags}
        torch.library.opcheck(op, arguments, keywords)


def test_a_layout_that_is_gone_is_not_known_any_more(pages, poisoned):
    tensors = torch.zeros(2, 8, 64, dtype=torch.uint8)
    layout = ops.register_layout(BlockLayout.from_tensors(list(tensors), [64] * 2, 1))
    handle = layout.handle
    assert handle != pages[1].handle
    del layout
    gc.collect()
    with pytest.raises(ValueError, match=f"layout must be the handle .* exists; got {handle}"):
        torch.ops.kvferry.gather_blocks(handle, [], IDS, poisoned(512), OFFSETS)


def test_what_has_not_been_registered_is_refused(pages):
    cache, _ = pages
    blobs = blobs_of(cache)
    for move in (ops.gather_blocks, ops.scatter_blocks, ops.gather_heads, ops.gather_quantized):
        with pytest.raises(ValueError, match=r"layout must be what register_layout.* got list"):
            move([cache], IDS, blobs, OFFSETS)
    with pytest.raises(ValueError, match=r"layout must be what register_layout.* got BlockLayout"):
        ops.gather_slots(layout_of_views(list(cache)), IDS, blobs)


def test_a_group_whose_segments_overlap_is_not_registered():
    cache = torch.zeros(8, 64, dtype=torch.uint8)
    twice = BlockLayout.from_tensors([cache, cache], [64, 32], 1)
    with pytest.raises(ValueError, match=r"layouts\[0\] must have segments that do not overlap"):
        ops.register_layout(twice)


def test_a_layout_without_its_tensors_is_not_registered():
    one, two = (torch.zeros(8, 64, dtype=torch.uint8) for _ in range(2))
    layout = BlockLayout.from_tensors([one], [64], 1)
    stray = BlockLayout(layout.segments, (two,), 8, 1, 64, 64, CPU)
    with pytest.raises(ValueError, match="layout must keep the tensors that its segments are in"):
        ops.register_layout(stray)
    with pytest.raises(ValueError, match=r"layouts\[1\] must be a BlockLayout; got Tensor"):
        ops.register_layout([layout, one])


def test_groups_that_share_bytes_may_not_write_them_twice(poisoned):
    """Same numbering (aliasing tensors), and another one (blocks of half the size)."""
    cache = torch.zeros(8, 64, dtype=torch.uint8)
    whole = BlockLayout.from_tensors([cache], [64], 1)
    again = BlockLayout.from_tensors([cache], [64], 1)
    halves = BlockLayout.from_tensors([cache.view(16, 32)], [32], 1)
    blobs, offsets = poisoned(256), torch.tensor([0, 64])
    same_numbers = ops.register_layout([whole, again])
    half_numbers = ops.register_layout([whole, halves])

    def scatter(layout, *ids):
        ops.scatter_blocks(layout, torch.tensor(ids), blobs, offsets, counts=[1, 1])

    for layout, bad, good in ((same_numbers, (3, 3), (3, 4)), (half_numbers, (3, 7), (3, 8))):
        with pytest.raises(ValueError, match="block_ids must not name bytes of the cache twice"):
            scatter(layout, *bad)
        assert not cache.any()
        scatter(layout, *good)
        assert cache.any()
        cache.zero_()
