import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.host import HostMover
from kvferry.kernels.layout import BlockLayout

KINDS = ["one_storage", "separate", "padded", "packed", "half_and_half"]
CASES = [
    pytest.param(pages, num_blocks, chunk, first, ids, id=name)
    for name, pages, num_blocks, chunk, first, ids in [
        ("llama-one-block", [4096] * 8, 16, 1, 0, [7]),
        ("deepseek-18KiB", [18432] * 5, 8, 2, 0, [5, 1]),
        ("mla-and-indexer", [656 * 4, 132 * 4] * 3, 8, 4, 0, [3, 0, 7, 7]),
        ("one-segment", [1000], 9, 4, 0, [8, 0, 3, 1]),
        ("neighbours", [512] * 4, 16, 4, 0, [4, 5, 6, 7]),
        ("neighbours-backwards", [512] * 4, 16, 4, 0, [7, 6, 5, 4]),
        ("odd-everything", [1, 3, 577, 63], 7, 3, 0, [6, 2, 4]),
        ("partial-chunk", [100] * 3, 8, 4, 2, [6, 1]),
        ("last-place", [100] * 3, 8, 4, 3, [0]),
        ("repeated", [600] * 3, 8, 4, 0, [2, 2, 5, 2]),
        ("empty", [600] * 3, 8, 4, 1, []),
        ("one-block-cache", [600] * 3, 1, 2, 0, [0, 0]),
    ]
]


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pages", "num_blocks", "chunk", "first", "ids"), CASES)
def test_gather_matches_its_twin(kind, pages, num_blocks, chunk, first, ids, make_cache, make_part):
    cache = make_cache(kind, pages, num_blocks, chunk)
    before = cache.bytes()
    actual, expected = make_part(cache.layout), make_part(cache.layout)

    HostMover(cache.layout).gather(ids, first, actual.address)
    reference.gather_chunk(cache.layout, ids, first, expected.address)

    same(actual.whole, expected.whole)
    same(cache.storages, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pages", "num_blocks", "chunk", "first", "ids"), CASES)
def test_scatter_matches_its_twin(
    kind, pages, num_blocks, chunk, first, ids, make_cache, make_part
):
    actual, expected = (make_cache(kind, pages, num_blocks, chunk) for _ in range(2))
    part = make_part(actual.layout)
    part.whole.random_(0, 256)
    before = part.whole.clone()

    HostMover(actual.layout).scatter(part.address, first, ids)
    reference.scatter_chunk(expected.layout, ids, first, part.address)

    same(actual.storages, expected.storages)
    same(part.whole, before)


def test_aliasing_groups_move_the_same_bytes_apart(make_cache, make_part):
    """A hybrid model's groups share tensors: a block belongs to one group at a time."""
    cache = make_cache("one_storage", [256] * 4, 8, 2)
    full, window = cache.layout.tensors[:2], cache.layout.tensors[::-1]
    layouts = [BlockLayout.from_tensors(t, [256] * len(t), 2) for t in (full, window)]
    before = cache.bytes()
    parts = [make_part(layout) for layout in layouts]
    for layout, part, ids in zip(layouts, parts, ([1, 6], [2, 5]), strict=True):
        HostMover(layout).gather(ids, 0, part.address)
    for tensor in cache.layout.tensors:
        tensor[[1, 2, 5, 6]] = 0
    for layout, part, ids in zip(layouts, parts, ([1, 6], [2, 5]), strict=True):
        HostMover(layout).scatter(part.address, 0, ids)

    expected = before[0]
    for tensor in cache.layout.tensors[2:]:  # only the window group carries these
        start = tensor.data_ptr() - cache.storages[0].data_ptr()
        for block in (1, 6):
            expected[start + block * 256 : start + (block + 1) * 256] = 0
    same(cache.storages[0], expected)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_scatter_undoes_gather_and_touches_nothing_else(data, make_cache, make_part):
    kind = data.draw(st.sampled_from(KINDS))
    alike = data.draw(st.booleans())
    page = st.integers(1, 700)
    count = data.draw(st.integers(1, 6))
    pages = [data.draw(page)] * count if alike else [data.draw(page) for _ in range(count)]
    num_blocks, chunk = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, chunk))
    block = st.integers(0, num_blocks - 1)
    ids = data.draw(st.lists(block, max_size=chunk - first))
    cache = make_cache(kind, pages, num_blocks, chunk, seed=count)
    before = cache.bytes()
    mover, part = HostMover(cache.layout), make_part(cache.layout)

    mover.gather(ids, first, part.address)
    for tensor, nbytes in zip(cache.layout.tensors, pages, strict=True):
        tensor[ids, :nbytes] = 0
    mover.scatter(part.address, first, ids)

    same(cache.storages, before)
    start = 64 + first * cache.layout.block_bytes
    end = start + len(ids) * cache.layout.block_bytes
    assert (part.whole[:start] == 0xA5).all()
    assert (part.whole[end:] == 0xA5).all()


@pytest.mark.parametrize("address", [0, -8, None, True, 1.5, 1 << 64])
@pytest.mark.parametrize("ids", [[0], []])
def test_a_bad_address_moves_nothing(address, ids, make_cache):
    cache = make_cache("one_storage", [64] * 2, 4, 2)
    before = cache.bytes()
    mover = HostMover(cache.layout)
    with pytest.raises(ValueError, match="address must be a positive integer"):
        mover.scatter(address, 0, ids)
    with pytest.raises(ValueError, match="address must be a positive integer"):
        mover.gather(ids, 0, address)
    same(cache.storages, before)


@pytest.mark.parametrize(("ids", "first"), [([0, 4], 0), ([0, -1], 0), ([0, 1, 2], 0), ([1], 2)])
def test_a_bad_block_moves_nothing(ids, first, make_cache, make_part):
    cache = make_cache("one_storage", [64] * 2, 4, 2)
    before, part = cache.bytes(), make_part(cache.layout)
    with pytest.raises(ValueError, match="block"):
        HostMover(cache.layout).scatter(part.address, first, ids)
    with pytest.raises(ValueError, match="block"):
        HostMover(cache.layout).gather(ids, first, part.address)
    same(cache.storages, before)
    assert (part.whole == 0xA5).all()


def test_a_cache_that_is_not_in_host_memory_is_refused(make_cache):
    layout = make_cache("one_storage", [64] * 2, 4, 2).layout
    elsewhere = BlockLayout(
        layout.segments, layout.tensors, 4, 2, 128, 256, torch.device("cuda", 0)
    )
    with pytest.raises(ValueError, match="cache on cpu; got one on cuda:0"):
        HostMover(elsewhere)


@pytest.fixture
def no_forced_switches():
    """Let another thread run only where the lock is given up of one's own accord."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def runs_meanwhile(move, max_moves):
    """Say whether another thread got to run while nothing but *move* could have let it."""
    go, seen = threading.Event(), []

    def other():
        go.wait()
        seen.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    go.set()
    # a busy machine may be slow to schedule the other thread: several moves give it time
    for _ in range(max_moves):
        move()
        if seen:
            break
    ran = bool(seen)
    thread.join()
    return ran


@pytest.mark.parametrize("kind", ["one_storage", "separate", "half_and_half"])
@pytest.mark.parametrize("is_load", [False, True])
def test_the_bulk_moves_without_the_interpreter_lock(
    kind, is_load, make_cache, make_part, no_forced_switches
):
    cache = make_cache(kind, [4 << 20] * 4, 2, 2)
    mover, part = HostMover(cache.layout), make_part(cache.layout)
    ids = np.array([1, 0])
    assert runs_meanwhile(lambda: mover.move(ids, 0, part.address, is_load=is_load), max_moves=2000)


def test_a_move_that_kept_the_interpreter_lock_would_show(no_forced_switches):
    a, b = bytearray(64 << 20), bytearray(64 << 20)

    def keep_the_lock():
        a[:] = b

    assert not runs_meanwhile(keep_the_lock, max_moves=20)
