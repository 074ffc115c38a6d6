"""The worker's half between real tensors and a real arena, without an engine."""

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvferry.connector.messages import FrameLoadStoreSpec
from kvferry.connector.worker import KVFerryWorker
from kvferry.kernels.layout import BlockLayout
from kvferry.kvops.metrics import Metrics
from kvferry.kvops.transfer.queue import TransferQueue

from .fakes import MIB, Engine, geometry, keys

pytestmark = pytest.mark.vllm

NUM_BLOCKS, PAGE = 40, 512


class Rank:
    """One rank with *groups* KV cache groups of two layers each, over the same memory, as hybrid models have."""

    def __init__(self, groups=1, blocks_per_chunk=2):
        shape = geometry(groups, page_bytes=2 * PAGE, blocks_per_chunk=blocks_per_chunk)
        self.engine = Engine(shape)
        generator = torch.Generator().manual_seed(1)
        layers = [
            torch.randint(-128, 128, (NUM_BLOCKS, PAGE), dtype=torch.int8, generator=generator)
            for _ in range(2)
        ]
        self.layers = layers
        layouts = [
            BlockLayout.from_tensors(layers, [PAGE, PAGE], blocks_per_chunk) for _ in range(groups)
        ]
        self.frames = self.engine.ranks.frames[0]
        queue = TransferQueue.on_host(layouts, self.frames, max_inflight_bytes=MIB)
        self.worker = KVFerryWorker(queue, self.frames, shape)
        self.context = self.engine.request()
        self.job = 0

    def next_job(self):
        self.job += 1
        return self.job

    def finish(self, job):
        assert self.worker._queue.flush(30)
        (ended,) = self.worker.get_finished()
        assert (ended.job_id, ended.success) == (job, True)
        return ended

    def store(self, chunks, blocks, *, sizes=None, indices=None):
        """Store *chunks* from *blocks*; return what the manager took for good."""
        output = self.engine.manager.prepare_store(chunks, self.context)
        job = self.next_job()
        source = GPULoadStoreSpec(
            blocks, group_sizes=sizes or [len(blocks)], block_indices=indices or [0]
        )
        assert self.worker.submit_store(job, source, output.store_spec)
        self.finish(job)
        self.engine.manager.complete_store(set(output.keys_to_store), self.context)
        return [chunk for chunk in chunks if self.engine.store.lookup([chunk])[0].value == "hit"]

    def load(self, chunks, blocks, *, sizes=None, indices=None, spoil=None):
        reader = self.engine.request("reader")
        spec = self.engine.manager.prepare_load(chunks, reader)
        if spoil is not None:
            self.engine.arena.buffer[int(spec.refs[spoil][1]) + 3] ^= 1
        job = self.next_job()
        target = GPULoadStoreSpec(
            blocks, group_sizes=sizes or [len(blocks)], block_indices=indices or [0]
        )
        assert self.worker.submit_load(job, spec, target)
        self.finish(job)
        self.engine.manager.complete_load(set(chunks), reader)
        return job

    def pages(self, blocks):
        return [layer[blocks].clone() for layer in self.layers]

    def poison(self, blocks):
        for layer in self.layers:
            layer[blocks] = 0x5A

    def close(self):
        assert self.engine.leaks() == (0, 0, 0, 0)
        self.worker.shutdown()
        self.worker.shutdown()
        self.engine.close()


@pytest.fixture
def make_rank():
    made = []

    def make(*args, **kwargs):
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_blocks_come_back_to_other_places_bit_for_bit(make_rank):
    rank = make_rank()
    before = rank.pages([3, 7, 1, 30])
    assert rank.store(keys(2), [3, 7, 1, 30]) == keys(2)
    guard = rank.pages([0, 2, 11, 16])
    rank.poison([12, 13, 14, 15])
    rank.load(keys(2), [15, 14, 13, 12])
    assert equal(rank.pages([15, 14, 13, 12]), before)
    assert equal(rank.pages([0, 2, 11, 16]), guard)
    assert rank.worker.take_failed_blocks() == rank.worker.take_failed_jobs() == set()


def test_a_load_may_begin_and_end_inside_a_chunk(make_rank):
    rank = make_rank(blocks_per_chunk=4)
    before = rank.pages(list(range(1, 13)))
    rank.store(keys(3), list(range(1, 13)))
    guard = rank.pages([20, 29])
    rank.load(keys(3), list(range(21, 29)), indices=[2])
    assert equal(rank.pages(list(range(21, 29))), [layer[2:10] for layer in before])
    assert equal(rank.pages([20, 29]), guard)


@pytest.mark.parametrize(
    ("bad", "blocks"), [(0, {20, 21}), (1, {22, 23}), (2, {24})], ids=["first", "middle", "last"]
)
def test_the_blocks_of_a_corrupt_chunk_are_reported_and_the_others_loaded(make_rank, bad, blocks):
    rank = make_rank()
    before = rank.pages([1, 2, 3, 4, 5])
    rank.store(keys(3), [1, 2, 3, 4, 5, 6])
    job = rank.load(keys(3), [20, 21, 22, 23, 24], spoil=bad)
    assert rank.worker.take_failed_blocks() == blocks
    assert rank.worker.take_failed_jobs() == {job}
    assert rank.worker.take_failed_blocks() == rank.worker.take_failed_jobs() == set()
    good = [at for at in range(5) if 20 + at not in blocks]
    assert equal(rank.pages([20 + at for at in good]), [layer[good] for layer in before])


def test_a_frame_that_is_gone_fails_its_blocks_alone(make_rank):
    rank = make_rank()
    rank.store(keys(3), [1, 2, 3, 4, 5, 6])
    rank.engine.end_step()
    rank.engine.store.delete(keys(1, start=1))
    rank.poison([22, 23])
    rank.load(keys(3), [20, 21, 22, 23, 24, 25])
    assert rank.worker.take_failed_blocks() == {22, 23}
    assert (rank.pages([22, 23])[0] == 0x5A).all()
    rank.worker.report()
    assert rank.worker.tally._totals[Metrics.LOAD_FAILURES.name, ("gone",)] == 1


def test_a_load_of_frames_that_are_all_gone_ends_too(make_rank):
    rank = make_rank()
    rank.load(keys(2), [20, 21, 22, 23])
    assert rank.worker.take_failed_blocks() == {20, 21, 22, 23}


class TestHoles:
    """vLLM leaves out blocks behind a sliding window without saying which."""

    def test_a_chunk_without_its_beginning_is_left_out(self, make_rank):
        rank = make_rank(2, blocks_per_chunk=4)
        chunks = keys(2, group=0) + keys(3, group=1)
        # group 1 begins with the last block of its first chunk
        blocks = [*range(1, 9), 11, *range(12, 20)]
        stored = rank.store(chunks, blocks, sizes=[8, 9], indices=[0, 3])
        # it hangs together with what comes after it, in both groups; what comes before it is good
        assert stored == keys(1, group=0)
        rank.load(stored, [30, 31, 32, 33], sizes=[4, 0], indices=[0, 0])
        assert equal(rank.pages([30, 31, 32, 33]), rank.pages([1, 2, 3, 4]))

    def test_a_window_group_keeps_its_whole_chunks(self, make_rank):
        rank = make_rank(2, blocks_per_chunk=4)
        shape = rank.engine.geometry
        object.__setattr__(shape, "is_prefix", (True, False))
        chunks = keys(2, group=0) + keys(3, group=1)
        blocks = [*range(1, 9), 11, *range(12, 20)]
        stored = rank.store(chunks, blocks, sizes=[8, 9], indices=[0, 3])
        assert stored == keys(2, group=0) + keys(3, group=1)[1:]
        rank.load(keys(3, group=1)[1:2], [30, 31, 32, 33], sizes=[0, 4], indices=[0, 4])
        assert equal(rank.pages([30, 31, 32, 33]), rank.pages([12, 13, 14, 15]))

    def test_where_it_is_not_certain_which_blocks_are_missing_nothing_is_stored(self, make_rank):
        rank = make_rank(blocks_per_chunk=4)
        assert rank.store(keys(3), list(range(1, 11)), indices=[0]) == []
        rank.context = rank.engine.request("another")
        assert rank.store(keys(3), list(range(1, 11)), indices=[3]) == []
        rank.context = rank.engine.request("third")
        assert rank.store(keys(3), list(range(1, 15)), indices=[0]) == []


def test_a_wait_before_anything_was_read_cancels_the_store_and_publishes_nothing(make_rank):
    rank = make_rank()
    output = rank.engine.manager.prepare_store(keys(8), rank.context)
    job = rank.next_job()
    rank.worker.submit_store(
        job,
        GPULoadStoreSpec(list(range(16)), group_sizes=[16], block_indices=[0]),
        output.store_spec,
    )
    rank.worker.wait({job})
    # the blocks are the engine's again
    rank.poison(list(range(16)))
    rank.finish(job)
    rank.engine.manager.complete_store(set(output.keys_to_store), rank.context)
    rank.poison([20, 21])
    stored = [chunk for chunk in keys(8) if rank.engine.store.lookup([chunk])[0].value == "hit"]
    assert stored == keys(8)[: len(stored)]
    for chunk in stored:
        rank.load([chunk], [20, 21])
        assert not (rank.pages([20])[0] == 0x5A).all()


def test_a_message_holds_numbers_only_and_survives_pickling():
    import pickle

    spec = FrameLoadStoreSpec.from_rows([(64, 4096, 1 << 40)], [1])
    back = pickle.loads(pickle.dumps(spec))
    assert back.refs.dtype == np.int64
    assert back.refs.tolist() == [[64, 4096, 1 << 40]]
    assert len(pickle.dumps(spec)) < 400
