"""Calls whose arguments share memory, results made in inference mode, and copies of what holds addresses."""

import copy
import pickle

import pytest
import torch

from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kvops import ops

PAGE, BLOCKS = 64, 8


def int64s(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def separate(count):
    return [torch.randint(0, 256, (BLOCKS, PAGE), dtype=torch.uint8) for _ in range(count)]


def rows_of_numbers():
    caches = [torch.randn(BLOCKS, 2, 4, 2 * 16).bfloat16() for _ in range(2)]
    return RowLayout.from_views(caches, "bhnc")


MADE = {
    "layout": lambda: BlockLayout.from_tensors(separate(2), [PAGE] * 2, 1),
    "rows": rows_of_numbers,
    "heads": lambda: HeadRuns.from_rows(rows_of_numbers()),
    "quantized": lambda: QuantizedRows.from_rows(rows_of_numbers()),
}
REGISTER = {
    "layout": ops.register_layout,
    "rows": ops.register_rows,
    "heads": ops.register_heads,
    "quantized": ops.register_quantized,
}


def test_ids_in_the_memory_that_a_gather_writes_are_those_of_the_call():
    """The first block lands on the ids of the second one."""
    tensors = separate(2)
    layout = ops.register_layout(BlockLayout.from_tensors(tensors, [PAGE] * 2, 1))
    blobs = torch.zeros(1024, dtype=torch.uint8)
    ids, chunks = blobs.view(torch.int64)[:2], blobs.view(torch.int64)[2:4]
    ids.copy_(int64s(5, 2))
    chunks.copy_(int64s(0, 1))
    done = torch.zeros(2, dtype=torch.int32)
    ops.gather_blocks(
        layout, ids, blobs, int64s(0, 512), blob_ids=chunks, places=int64s(0, 0), done=done
    )
    for block, start in ((5, 0), (2, 512)):
        expected = torch.cat([t[block] for t in tensors])
        torch.testing.assert_close(blobs[start : start + 2 * PAGE], expected, rtol=0, atol=0)
    assert done.tolist() == [1, 1]


def test_ids_in_the_cache_that_a_scatter_writes_are_those_of_the_call():
    """Ids that are read again after the first block would be addresses far outside of the cache."""
    tensors = separate(3)
    layout = ops.register_layout(BlockLayout.from_tensors(tensors, [PAGE] * 3, 1))
    ids = tensors[0].view(torch.int64)[1, :2]
    ids.copy_(int64s(1, 6))
    blobs = torch.full((1024,), 0x3F, dtype=torch.uint8)
    ops.scatter_blocks(layout, ids, blobs, int64s(0, 512))
    assert all((t[[1, 6]] == 0x3F).all() for t in tensors)


@pytest.mark.parametrize("kind", ["heads", "quantized"])
def test_ids_under_a_blob_of_heads_or_codes_are_those_of_the_call(kind):
    made = MADE[kind]()
    layout, gather = REGISTER[kind](made), getattr(ops, f"gather_{kind}")
    size = made.block_bytes
    apart, ids, offsets = 2 * size, int64s(5, 2, 7), int64s(0, 2 * size, 3 * size)
    expected = torch.zeros(apart + 2 * size, dtype=torch.uint8)
    gather(layout, ids, expected, offsets)
    blobs = torch.zeros_like(expected)
    inside = blobs.view(torch.int64)[:3]
    inside.copy_(ids)
    gather(layout, inside, blobs, offsets)
    torch.testing.assert_close(blobs, expected, rtol=0, atol=0)


def test_results_of_inference_mode_are_written_outside_of_it():
    """As an engine's thread makes them and a worker thread passes them."""
    layout = ops.register_layout(MADE["layout"]())
    with torch.inference_mode():
        blobs = torch.zeros(256, dtype=torch.uint8)
        sums, again = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        done, mismatch = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    where = {"blob_ids": int64s(0, 1), "places": int64s(0, 0), "checksums": sums}
    offsets = int64s(0, 128)
    ops.gather_blocks(layout, int64s(3, 4), blobs, offsets, **where, done=done)
    ops.checksum_blocks(blobs, offsets, int64s(128, 128), again)
    assert done.tolist() == [1, 1]
    assert sums.tolist() == again.tolist()
    blobs.numpy()[130] ^= 1
    ops.scatter_blocks(layout, int64s(3, 4), blobs, offsets, **where, mismatch=mismatch)
    assert mismatch.tolist() == [0, 1]


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_holds_addresses_is_not_copied(kind, copied):
    made = MADE[kind]()
    for thing in (made, REGISTER[kind](made)):
        with pytest.raises(
            TypeError, match="must be made where its cache is; got a request to cop"
        ):
            copied(thing)


@pytest.mark.parametrize("kind", ["rows", "heads", "quantized"])
def test_what_is_no_layout_is_not_registered(kind):
    for wrong in (None, MADE["layout"]()):
        with pytest.raises(ValueError, match=r"must be a \w+; got "):
            REGISTER[kind](wrong)


def test_a_single_block_may_have_any_stride():
    memory = torch.zeros(64, dtype=torch.uint8)
    pages = [memory.as_strided((1, 16), (0, 1), start) for start in (0, 8, 32)]
    layout = ops.register_layout([BlockLayout.from_tensors([page], [16], 1) for page in pages])
    blobs, zeros, offsets = torch.ones(32, dtype=torch.uint8), int64s(0, 0), int64s(0, 16)
    with pytest.raises(ValueError, match="block_ids must not name bytes of the cache twice"):
        ops.scatter_blocks(layout, zeros, blobs, offsets, counts=[1, 1, 0])
    assert not memory.any()
    ops.scatter_blocks(layout, zeros, blobs, offsets, counts=[0, 1, 1])
    assert memory.tolist() == [0] * 8 + [1] * 16 + [0] * 8 + [1] * 16 + [0] * 16
