"""The scheduler's half on a store with a disk below it: it never waits, it comes back, and it gives up in time."""

import time

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult

from kvferry.connector import compat
from kvferry.connector.disk import Disk
from kvferry.kvops.errors import ArenaBusyError
from kvferry.kvops.metrics import Metrics
from kvferry.kvops.store.disk.admission import Policy
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.tier import DiskTier
from kvferry.kvops.store.io_faults import FaultyIo
from kvferry.kvops.store.io_threads import ThreadIo
from kvferry.kvops.store.store import Store

from .fakes import MIB, Engine, geometry, key, keys

pytestmark = pytest.mark.vllm

HIT, MISS, COMING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


class DiskEngine(Engine):
    """An engine with a real folder below it, and faults on request."""

    def __init__(self, folder, shape=None, policy=None, **settings):
        self.folder = folder
        self.policy = policy or Policy(admission="all", hold_s=1e9)
        super().__init__(shape, make_disk=self._make_disk, **settings)

    def _make_disk(self, store, clock):
        self.io = FaultyIo(ThreadIo(threads=2))
        files = BlobFiles.open(self.folder, self.io, quota_bytes=64 * MIB, sync="never")
        self.tier = DiskTier(store, files, self.io, self.policy, clock)
        return Disk(self.tier, store)

    def settle(self):
        """Let the disk finish, and the scheduler notice."""
        assert self.tier.flush(10)
        self.end_step()

    def find(self, chunks, context):
        return [self.manager.lookup(chunk, context) for chunk in chunks]

    def find_after_waiting(self, chunks, context):
        first = self.find(chunks, context)
        self.settle()
        return first, self.find(chunks, context)


@pytest.fixture
def make_engine(tmp_path):
    made = []

    def make(shape=None, **settings):
        made.append(DiskEngine(tmp_path / "disk", shape, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def cold(make_engine):
    """An engine with cold memory; chunks 0 to 9 are on its disk."""
    warm = make_engine()
    warm.stored(keys(10))
    warm.settle()
    warm.close()
    engine = make_engine()
    yield engine
    engine.manager.shutdown()
    if engine.was_unmapped:
        assert engine.leaks() == (0, 0, 0, 0)


def until(condition):
    """Wait for another thread."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_whole_prefix_is_asked_for_at_once_and_found_in_a_later_step(cold):
    context = cold.request()
    first, then = cold.find_after_waiting(keys(12), context)
    assert first == [COMING] * 10 + [MISS] * 2
    assert then == [HIT] * 10 + [MISS] * 2
    assert cold.tier.counts["loaded"] == 10


def test_while_the_drive_is_stuck_lookups_say_retry_until_the_deadline_and_miss_after_it(cold):
    context = cold.request()
    with cold.io.fault("aio_read_timeout") as fault:
        for _ in range(5):
            assert cold.find(keys(3), context) == [COMING] * 3
            cold.end_step()
            until(lambda: fault.hits)
            cold.clock.now += 0.3
        cold.clock.now += 1.0
        assert cold.find(keys(3), context) == [MISS] * 3
        assert cold.find(keys(3), context) == [MISS] * 3
        assert cold.counted(Metrics.PENDING_TIMEOUTS) == 1
        # one read of three neighbours, however often they were asked for
        assert fault.hits == 1
    cold.settle()
    assert cold.find(keys(3), cold.request("next")) == [HIT] * 3


def test_who_must_not_wait_does_not_make_the_disk_work(make_engine, cold):
    cold.close()
    engine = make_engine(pending_timeout_ms=0)
    assert engine.find(keys(3), engine.request()) == [MISS] * 3
    assert engine.io.counts["read"] == 0


def test_what_came_up_is_loaded_and_its_source_is_the_disk_once(cold):
    context = cold.request()
    _, then = cold.find_after_waiting(keys(2), context)
    assert then == [HIT, HIT]
    host, disk = compat.hit_sources()
    # vLLM asks after it has prepared the load
    spec = cold.manager.prepare_load(keys(2), context)
    assert cold.manager.get_load_source(key(0), context) is disk
    cold.ranks.read(spec)
    cold.manager.complete_load(keys(2), context)
    assert cold.find(keys(2), context) == [HIT, HIT]
    spec = cold.manager.prepare_load(keys(2), context)
    assert cold.manager.get_load_source(key(0), context) is host
    cold.ranks.read(spec)
    cold.manager.complete_load(keys(2), context)


def test_what_came_up_stays_while_others_fill_the_memory(make_engine):
    shape = geometry(page_bytes=MIB)
    engine = make_engine(shape)
    engine.stored(keys(3))
    engine.settle()
    engine.close()
    engine = make_engine(shape)
    context = engine.request()
    _, then = engine.find_after_waiting(keys(3), context)
    assert then == [HIT] * 3
    for number in range(40):
        engine.end_step()
        engine.stored([key(100 + number)])
    assert engine.find(keys(3), context) == [HIT] * 3
    spec = engine.manager.prepare_load(keys(3), context)
    engine.ranks.read(spec)
    engine.manager.complete_load(keys(3), context)
    for number in range(40):
        engine.end_step()
        engine.stored([key(200 + number)])
    assert engine.store.lookup(keys(3)) != [HIT] * 3
    engine.settle()


def test_by_default_a_chunk_goes_down_when_it_is_used_again(make_engine):
    engine = make_engine(policy=Policy())
    engine.stored(keys(4))
    engine.settle()
    assert engine.tier.counts["saved"] == 0
    context = engine.request()
    assert engine.find(keys(2), context) == [HIT, HIT]
    engine.ranks.read(engine.manager.prepare_load(keys(2), context))
    engine.manager.complete_load(keys(2), context)
    engine.settle()
    assert engine.tier.counts["saved"] == 2
    assert [engine.tier.contains(k) for k in keys(4)] == [True, True, False, False]


def test_after_a_reset_nothing_of_before_is_found(cold):
    context = cold.request()
    with cold.io.fault("aio_read_timeout"):
        assert cold.find(keys(3), context) == [COMING] * 3
        cold.manager.reset_cache()
        assert cold.manager.has_pending_work()
        assert cold.find(keys(3), context) == [MISS] * 3
    cold.settle()
    cold.end_step()
    assert not cold.manager.has_pending_work()
    assert cold.find(keys(10), context) == [MISS] * 10


def test_a_failing_drive_is_left_alone_and_the_engine_computes(cold, caplog):
    context = cold.request()
    with cold.io.fault("aio_read_error"):
        for number in range(5):
            cold.find([key(number)], context)
            cold.settle()
            # one that could not be read is not asked for again at once
            assert cold.find([key(number)], context) == [MISS]
    assert cold.tier.counts["load_error"] == 3
    assert cold.tier.stats()["loads_off"] == 1
    assert sum("failed 3 times in a row" in r.message for r in caplog.records) == 1
    # and it is asked again after its pause
    cold.clock.now += 1.1
    late = cold.request("late")
    first, then = cold.find_after_waiting([key(7)], late)
    assert (first, then) == ([COMING], [HIT])
    assert cold.tier.stats()["loads_off"] == 0


def test_a_corrupt_chunk_ends_the_prefix_and_is_not_asked_for_again(cold):
    context = cold.request()
    with cold.io.fault("bit_flip_read", count=1, match=lambda call: call.kind == "read"):
        assert cold.find(keys(3), context) == [COMING] * 3
        cold.settle()
    answers = cold.find(keys(3), context)
    assert sorted(answers, key=str) == sorted([HIT, HIT, MISS], key=str)
    assert cold.tier.counts["load_corrupt"] == 1
    cold.disk.count(cold.manager.tally)
    assert cold.counted(Metrics.DISK_FAILURES, "load", "corrupt") == 1


def test_the_arena_stays_mapped_under_a_drive_that_does_not_answer(cold, monkeypatch):
    monkeypatch.setattr(cold.tier, "close", lambda: DiskTier.close(cold.tier, timeout_s=0.2))
    context = cold.request()
    with cold.io.fault("aio_read_timeout") as fault:
        cold.find(keys(1), context)
        cold.end_step()
        until(lambda: fault.hits)
        cold.manager.shutdown()
        assert not cold.was_unmapped
        # and with this process: a drive may still write there
        with pytest.raises(ArenaBusyError):
            Store.open(cold.arena, namespace=bytes(16))
    cold.io.inner.close(10)


def test_a_prefix_larger_than_the_bound_in_flight_comes_step_by_step(make_engine):
    shape = geometry(page_bytes=256 << 10)
    warm = make_engine(shape)
    warm.stored(keys(20))
    warm.settle()
    warm.close()
    engine = make_engine(shape, policy=Policy(max_inflight_bytes=512 << 10, hold_s=1e9))
    context = engine.request()
    answers = engine.find(keys(20), context)
    assert set(answers) == {COMING, LookupResult.RETRY}
    for _ in range(20):
        engine.settle()
        answers = engine.find(keys(20), context)
        if answers == [HIT] * 20:
            break
    assert answers == [HIT] * 20


def test_where_half_of_the_memory_is_taken_the_rest_of_a_prefix_is_computed_soon(make_engine):
    shape = geometry(page_bytes=MIB)
    warm = make_engine(shape)
    for number in range(12):
        warm.stored([key(number)])
    warm.settle()
    warm.close()
    engine = make_engine(shape)
    context = engine.request()
    engine.find(keys(12), context)
    engine.settle()
    # somebody else might take his chunks now, and leave their room
    assert MISS not in engine.find(keys(12), context)
    engine.settle()
    engine.clock.now += 0.6
    answers = engine.find(keys(12), context)
    hits = answers.index(MISS)
    assert 0 < hits <= 8
    assert answers == [HIT] * hits + [MISS] * (12 - hits)


def test_a_window_asks_for_its_own_chunks_only(cold):
    """vLLM looks from the end, and stops when a window of chunks is there or coming."""
    from types import SimpleNamespace

    scheduler = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
    ).OffloadingConnectorScheduler
    context = cold.request()
    host = SimpleNamespace(manager=cold.manager)
    assert scheduler._sliding_window_lookup(host, keys(10), 2, context) is None
    cold.settle()
    assert cold.tier.counts["loaded"] == 2
    assert scheduler._sliding_window_lookup(host, keys(10), 2, context) == 10


def test_a_wait_that_ended_well_leaves_the_next_one_its_whole_time(cold):
    context = cold.request()
    cold.find_after_waiting(keys(1), context)
    cold.ranks.read(cold.manager.prepare_load(keys(1), context))
    cold.manager.complete_load(keys(1), context)
    cold.clock.now += 100
    assert cold.find(keys(3), context) == [HIT, COMING, COMING]
    cold.settle()


def warmed(make_engine, shape, count):
    """Leave chunks on the disk; return an engine with cold memory for twice as many as it may bring up at once."""
    warm = make_engine(shape, arena_bytes=32 * MIB)
    for number in range(count):
        warm.stored([key(number)])
    warm.settle()
    warm.close()
    return make_engine(shape, arena_bytes=32 * MIB)


def wait_for(engine, chunks, context, seconds=0.1):
    for _ in range(12):
        answers = engine.find(chunks, context)
        if set(answers) <= {HIT, MISS}:
            break
        engine.settle()
        engine.clock.now += seconds
    return answers


def test_chunks_of_a_request_that_is_gone_make_room_for_others(make_engine):
    engine = warmed(make_engine, geometry(page_bytes=MIB), 24)
    assert wait_for(engine, keys(12), engine.request("aborted")) == [HIT] * 12
    engine.end_step()
    assert wait_for(engine, keys(12, start=12), engine.request("next")) == [HIT] * 12


def test_two_prompts_that_fit_one_after_the_other_both_come_from_the_disk(make_engine):
    engine = warmed(make_engine, geometry(page_bytes=MIB), 20)
    one, two = engine.request("one"), engine.request("two")
    assert wait_for(engine, keys(10), one) == [HIT] * 10
    assert MISS not in engine.find(keys(10, start=10), two)
    engine.ranks.read(engine.manager.prepare_load(keys(10), one))
    engine.manager.complete_load(keys(10), one)
    assert wait_for(engine, keys(10, start=10), two) == [HIT] * 10
