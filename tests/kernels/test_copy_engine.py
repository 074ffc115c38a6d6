"""The copy engine against a driver in host memory that has the real one's entry points."""

import numpy as np
import pytest
import torch

from kvferry.kernels import reference
from kvferry.kernels.copy_engine import CopyEngine, CopyError
from kvferry.kernels.descriptors import BlockRuns, Descriptors
from kvferry.kernels.driver import Driver, DriverError
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.table import HOLE, LayoutTable

from .conftest import LAYOUTS
from .fake_driver import CAPTURE, INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, FakeDriver

PAGES = [96, 160, 96]
STREAM = 0x5000
ANY, BY_STREAM = 3, 1


def engine_of(library, **how):
    return CopyEngine(Driver(library), **how)


class Move:
    """Blocks of one cache and their places in one poisoned part."""

    def __init__(self, make_cache, make_part, kind, ids=(5, 0, HOLE, 3)):
        self.cache = make_cache(kind, PAGES, num_blocks=7, blocks_per_chunk=len(ids))
        self.layout = self.cache.layout
        self.part = make_part(self.layout)
        self.ids = np.array(ids, np.int64)
        places = np.arange(len(ids)) * self.layout.block_bytes
        self.addresses = self.part.address + places.astype(np.int64)
        self.runs = BlockRuns(LayoutTable.from_layouts([self.layout]))

    def memory(self):
        """What a driver lets a copy touch: each storage, and the part."""
        ranges = [(s.data_ptr(), s.data_ptr() + s.numel()) for s in self.cache.storages]
        return [*ranges, (self.part.address, self.part.address + self.layout.part_bytes)]

    def run(self, engine, direction, **how):
        return engine.copy_blocks(
            self.runs, self.ids, self.addresses, [self.ids.size], direction, STREAM, **how
        )

    def each(self):
        return [(i, [block]) for i, block in enumerate(self.ids.tolist()) if block != HOLE]


@pytest.fixture
def move(make_cache, make_part):
    return Move(make_cache, make_part, "half_and_half")


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
@pytest.mark.parametrize("method", ["batch", "loop"])
def test_a_store_and_a_load_move_the_bytes_of_the_reference(make_cache, make_part, kind, method):
    move, twin = Move(make_cache, make_part, kind), Move(make_cache, make_part, kind)
    library = FakeDriver()
    library.memory = move.memory()
    engine = engine_of(library, method=method)

    report = move.run(engine, "d2h")

    for place, block in twin.each():
        reference.gather_chunk(twin.layout, block, place, twin.part.address)
    # guard bytes and the hole are part of the comparison
    assert torch.equal(move.part.whole, twin.part.whole)
    assert (report.method, report.nbytes) == (method, 3 * move.layout.block_bytes)

    for storage in (*move.cache.storages, *twin.cache.storages):
        storage.view(torch.uint8).fill_(0x5A)
    assert move.run(engine, "h2d").descriptors == report.descriptors
    for place, block in twin.each():
        reference.scatter_chunk(twin.layout, block, place, twin.part.address)
    for mine, theirs in zip(move.cache.storages, twin.cache.storages, strict=True):
        assert torch.equal(mine, theirs)


def test_a_transfer_is_one_call_on_the_stream(move):
    library = FakeDriver()
    report = move.run(engine_of(library), "d2h")
    assert [call[:3] for call in library.calls] == [("batch", STREAM, report.descriptors)]
    assert report.submit_seconds > 0
    assert report.describe_seconds > 0


@pytest.mark.parametrize(
    ("direction", "how", "order"),
    [
        ("d2h", {}, BY_STREAM),
        ("d2h", {"frames_are_complete": True}, BY_STREAM),
        ("h2d", {}, ANY),
        ("h2d", {"frames_are_complete": False}, BY_STREAM),
    ],
)
def test_pages_are_read_in_stream_order_and_complete_frames_at_any_time(
    move, direction, how, order
):
    library = FakeDriver()
    move.run(engine_of(library), direction, **how)
    (call,) = library.calls
    assert call[3] == (order, 0, 0, 0, 0, 0)


def test_the_hint_to_leave_the_sms_alone_is_flag_1(move):
    library = FakeDriver()
    move.run(engine_of(library, prefer_overlap=True), "d2h")
    assert library.calls[0][3] == (BY_STREAM, 0, 0, 0, 0, 1)


@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("method", ["batch", "loop"])
def test_the_legacy_default_stream_is_refused_before_a_byte_moves(move, stream, method):
    library = FakeDriver()
    engine = engine_of(library, method=method)
    with pytest.raises(ValueError, match=f"stream must be a stream of its own: .*; got {stream}$"):
        engine.copy_blocks(move.runs, move.ids, move.addresses, [4], "d2h", stream)
    with pytest.raises(ValueError, match="stream must be a stream of its own"):
        engine.copy(move.runs.describe(move.ids, move.addresses, [4], "d2h"), "d2h", stream)
    assert not library.calls


@pytest.mark.parametrize("stream", [None, True, -3, 1.5])
def test_a_stream_that_is_no_handle_is_refused(move, stream):
    with pytest.raises(ValueError, match="stream must be a CUstream handle, an integer"):
        engine_of(FakeDriver()).copy_blocks(move.runs, move.ids, move.addresses, [4], "d2h", stream)


def test_the_stream_of_this_thread_is_a_stream(move):
    library = FakeDriver()
    engine_of(library).copy_blocks(move.runs, move.ids, move.addresses, [4], "d2h", 2)
    assert library.calls[0][1] == 2


@pytest.mark.parametrize("method", ["batch", "loop"])
@pytest.mark.parametrize("failing", range(9))
def test_a_failure_names_the_copy_and_the_bytes_before_it_have_moved(
    make_cache, make_part, method, failing
):
    move = Move(make_cache, make_part, "separate")
    library = FakeDriver()
    library.fail_at, library.fail_with = failing, INVALID_CONTEXT
    copies = move.runs.describe(move.ids, move.addresses, [4], "d2h")
    assert copies.count == 9

    with pytest.raises(CopyError) as caught:
        engine_of(library, method=method).copy(copies, "d2h", STREAM)

    error = caught.value
    assert (error.code, error.index) == (INVALID_CONTEXT, failing)
    call = "cuMemcpyBatchAsync" if method == "batch" else "cuMemcpyAsync"
    assert str(error) == (
        f"copy {failing} of 9: {copies.sizes[failing]} bytes from {copies.sources[failing]:#x} to "
        f"{copies.destinations[failing]:#x}: {call} failed: CUDA_ERROR_INVALID_CONTEXT (this thread "
        "has no CUDA context: call torch.cuda.set_device in it)"
    )
    assert library.copied == failing


def test_a_failure_of_the_whole_batch_says_how_much_it_was(move):
    library = FakeDriver()
    library.fail_whole = CAPTURE
    engine = engine_of(library)
    with pytest.raises(
        CopyError, match=r"^\d+ copies of \d+ bytes: .*CAPTURE_UNSUPPORTED \(a batch copy cannot"
    ) as caught:
        move.run(engine, "d2h")
    assert (caught.value.code, caught.value.index) == (CAPTURE, None)
    assert engine.method == "batch"


def test_a_device_that_turns_out_to_have_no_batch_copy_gets_the_loop_from_then_on(move):
    library = FakeDriver()
    library.fail_whole = NOT_SUPPORTED
    engine = engine_of(library)

    report = move.run(engine, "d2h")

    assert (report.method, engine.method) == ("loop", "loop")
    assert engine.reason == "cuMemcpyBatchAsync failed: CUDA_ERROR_NOT_SUPPORTED"
    assert library.copied == report.descriptors
    kinds = [call[0] for call in library.calls]
    assert kinds == ["batch"] + ["one"] * report.descriptors
    move.run(engine, "h2d")
    assert [call[0] for call in library.calls].count("batch") == 1


def test_one_copy_that_is_not_supported_is_an_error_not_a_reason_to_loop(move):
    library = FakeDriver()
    library.fail_at, library.fail_with = 1, NOT_SUPPORTED
    engine = engine_of(library)
    with pytest.raises(CopyError, match="copy 1 of"):
        move.run(engine, "d2h")
    assert engine.method == "batch"


def test_who_insists_on_the_batch_copy_never_gets_the_loop(move):
    library = FakeDriver()
    library.fail_whole = NOT_SUPPORTED
    with pytest.raises(CopyError, match="NOT_SUPPORTED"):
        move.run(engine_of(library, method="batch"), "d2h")
    assert library.copied == 0
    with pytest.raises(DriverError, match=r"older than CUDA 12\.8"):
        engine_of(FakeDriver(lookup_status=2), method="batch")


def test_an_old_driver_gets_the_loop(move):
    library = FakeDriver(lookup_status=2)
    engine = engine_of(library)
    assert (engine.method, engine.reason) == ("loop", "the driver is older than CUDA 12.8")
    report = move.run(engine, "d2h")
    assert {call[:3] for call in library.calls} == {("one", STREAM, 1)}
    assert len(library.calls) == report.descriptors


@pytest.mark.parametrize("method", ["batch", "loop"])
def test_nothing_to_copy_is_no_call(move, method):
    library = FakeDriver()
    engine = engine_of(library, method=method)
    empty = np.empty(0, np.int64)
    report = engine.copy_blocks(move.runs, empty, empty, [0], "d2h", STREAM)
    assert (report.descriptors, report.nbytes, library.calls) == (0, 0, [])


def test_a_merged_copy_does_not_cross_two_registrations():
    cache = torch.randint(0, 256, (4, 128), dtype=torch.uint8)
    frames = torch.zeros(4 * 128, dtype=torch.uint8)
    table = LayoutTable.from_layouts([BlockLayout.from_tensors([cache], [128], 4)])
    start = frames.data_ptr()
    library = FakeDriver()
    library.memory = [
        (cache.data_ptr(), cache.data_ptr() + 512), (start, start + 256), (start + 256, start + 512),
    ]  # fmt: skip
    ids, addresses = np.arange(4), start + 128 * np.arange(4)

    with pytest.raises(CopyError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        engine_of(library).copy_blocks(BlockRuns(table), ids, addresses, [4], "d2h", STREAM)
    assert caught.value.code == INVALID_VALUE

    runs = BlockRuns(table, frame_cuts=[start + 256])
    report = engine_of(library).copy_blocks(runs, ids, addresses, [4], "d2h", STREAM)
    assert report.descriptors == 2
    assert torch.equal(frames, cache.flatten())


def test_arguments_are_checked(move):
    with pytest.raises(ValueError, match="method must be 'batch', 'loop' or None; got 'fast'"):
        engine_of(FakeDriver(), method="fast")
    copies = Descriptors(*(np.ones(1, np.int64) for _ in range(3)))
    with pytest.raises(ValueError, match="direction must be 'd2h' or 'h2d'; got 'across'"):
        engine_of(FakeDriver()).copy(copies, "across", STREAM)
