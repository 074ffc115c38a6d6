"""Checksums, done flags and mismatch flags of the block operators, against the bytes themselves."""

import numpy as np
import pytest
import torch

from kvferry.kernels.checksum import SEED, checksum_bytes
from kvferry.kernels.host_checksum import checksum_tensor
from kvferry.kernels.layout import BlockLayout
from kvferry.kvops import ops

PAGE, LAYERS, BLOCKS = 48, 3, 8
ROW = PAGE * LAYERS


def signed(word):
    return word - (1 << 64) if word >> 63 else word


class Chunks:
    """Three chunks of up to three blocks in frames with headers: two words, then the blocks."""

    HEADER, FRAME = 16, 16 + 3 * ROW

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        shape = LAYERS, BLOCKS, PAGE
        self.cache = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        layouts = BlockLayout.from_tensors(list(self.cache), [PAGE] * LAYERS, 3)
        self.layout = ops.register_layout(layouts)
        self.frames = torch.full((3 * self.FRAME,), 0xA5, dtype=torch.uint8)
        self.heads = self.frames.view(torch.int64)[:: self.FRAME // 8]
        self.done = self.frames.view(torch.int32)[2 :: self.FRAME // 4]
        # a full chunk out of order, one with a hole, one of a hole alone
        self.ids = torch.tensor([4, 0, 6, 2, -1, 7, -1])
        self.blobs = torch.tensor([0, 0, 0, 1, 1, 1, 2])
        self.places = torch.tensor([2, 0, 1, 0, 1, 2, 0])
        self.offsets = self.blobs * self.FRAME + self.HEADER + self.places * ROW
        self.where = {"blob_ids": self.blobs, "places": self.places}

    def gather(self, **results):
        ops.gather_blocks(self.layout, self.ids, self.frames, self.offsets, **self.where, **results)

    def scatter(self, **results):
        ops.scatter_blocks(
            self.layout, self.ids, self.frames, self.offsets, **self.where, **results
        )

    def sums(self):
        """Return the checksums of what is in the frames, by the definition."""
        whole = self.frames.numpy()
        made = []
        for blob in (0, 1):
            total = SEED
            for place in range(3):
                if (blob, place) != (1, 1):
                    start = blob * self.FRAME + self.HEADER + place * ROW
                    share = checksum_bytes(whole[start : start + ROW], place * ROW) - SEED
                    total = (total + share) % (1 << 64)
            made.append(signed(total))
        return made


@pytest.fixture
def chunks():
    return Chunks()


POISON_WORD = signed(0xA5A5A5A5A5A5A5A5)


def test_a_gather_writes_checksums_and_flags_into_the_headers(chunks):
    chunks.gather(checksums=chunks.heads, done=chunks.done)
    assert chunks.heads.tolist() == [*chunks.sums(), POISON_WORD]
    assert chunks.done.tolist()[:2] == [1, 1]
    # nothing of the last chunk moved: its frame is as it was
    assert (chunks.frames[2 * chunks.FRAME :] == 0xA5).all()
    # the full chunk's checksum is that of its bytes
    blob = chunks.frames[chunks.HEADER : chunks.FRAME]
    assert chunks.heads[0] == signed(checksum_bytes(blob.numpy()))


def test_a_scatter_flags_the_blob_that_changed_and_no_other(chunks):
    chunks.gather(checksums=chunks.heads)
    before = chunks.cache.clone()
    mismatch, done = torch.full((3,), 7, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    chunks.scatter(checksums=chunks.heads, mismatch=mismatch, done=done)
    assert mismatch.tolist() == [7, 7, 7]
    assert done.tolist() == [1, 1, 0]
    torch.testing.assert_close(chunks.cache, before, rtol=0, atol=0)

    for at in (chunks.FRAME + chunks.HEADER, chunks.FRAME + chunks.HEADER + 3 * ROW - 1):
        mismatch.zero_()
        chunks.frames[at] ^= 0x10
        chunks.scatter(checksums=chunks.heads, mismatch=mismatch)
        assert mismatch.tolist() == [0, 1, 0]
        chunks.frames[at] ^= 0x10
    # bytes of a hole are no part of it
    chunks.frames[chunks.FRAME + chunks.HEADER + ROW] ^= 0x10
    mismatch.zero_()
    chunks.scatter(checksums=chunks.heads, mismatch=mismatch)
    assert mismatch.tolist() == [0, 0, 0]


def test_checksum_blocks_says_what_the_gather_said(chunks):
    chunks.gather(checksums=chunks.heads)
    sums = torch.full((6,), 5)
    offsets = torch.tensor([chunks.HEADER, 0, 3])
    sizes = torch.tensor([3 * ROW, 0, 21])
    ops.checksum_blocks(chunks.frames, offsets, sizes, sums[::2])
    odd = signed(checksum_bytes(chunks.frames[3:24].numpy().copy()))
    assert sums.tolist() == [chunks.heads[0], 5, signed(SEED), 5, odd, 5]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 15, 16, 17, 4096, 4100])
def test_torch_makes_the_same_checksum(size, random_bytes):
    data = random_bytes(size)
    assert checksum_tensor(data).item() == signed(checksum_bytes(data.numpy()))


def test_a_layout_of_odd_bytes_has_no_checksums():
    cache = torch.zeros(4, 24, dtype=torch.uint8)
    layout = ops.register_layout(BlockLayout.from_tensors([cache], [24], 1))
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="checksums must be left out unless the layout is aligned"):
        ops.gather_blocks(
            layout, one, torch.zeros(24, dtype=torch.uint8), one,
            blob_ids=one, places=one, checksums=torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip


@pytest.mark.parametrize("is_load", [False, True])
def test_a_blob_has_a_limit_and_one_group(is_load, poisoned):
    first, second = (torch.zeros(300, 8, dtype=torch.uint8) for _ in range(2))
    layouts = [BlockLayout.from_tensors([t], [8], 1) for t in (first, second)]
    layout, op = ops.register_layout(layouts), ops.scatter_blocks if is_load else ops.gather_blocks
    ids, blobs = torch.arange(256), poisoned(256 * 8)
    where = {"blob_ids": torch.zeros_like(ids), "places": ids}
    with pytest.raises(ValueError, match="blob_ids must name each blob at most 255 times"):
        op(layout, ids, blobs, ids * 8, counts=[256, 0], **where)
    few = {name: values[:2] for name, values in where.items()}
    with pytest.raises(ValueError, match="blob_ids must keep each blob to one group"):
        op(layout, ids[:2], blobs, ids[:2] * 8, counts=[1, 1], **few)
    assert (blobs == 0xA5).all()
    assert not first.any()


def test_opcheck_passes_with_every_result(chunks):
    common = (chunks.layout.handle, list(chunks.layout.caches), chunks.ids, chunks.frames)
    sums, flags = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    where = {"blob_ids": chunks.blobs, "places": chunks.places, "checksums": sums}
    torch.library.opcheck(
        torch.ops.kvferry.gather_blocks.default, (*common, chunks.offsets), where | {"done": flags}
    )
    torch.library.opcheck(
        torch.ops.kvferry.scatter_blocks.default, (*common, chunks.offsets),
        where | {"mismatch": flags, "done": flags.clone()},
    )  # fmt: skip
    sizes = torch.full((3,), 3 * ROW)
    offsets = torch.from_numpy(np.arange(3) * Chunks.FRAME)
    torch.library.opcheck(
        torch.ops.kvferry.checksum_blocks.default, (chunks.frames, offsets, sizes, sums)
    )
