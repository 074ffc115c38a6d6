"""The scheduler's half on a real store, without a model: what vLLM may ask, in every order it does."""

import gc
import sys

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult

from kvferry.kvops.metrics import Metrics

from .fakes import MIB, Engine, geometry, key, keys

pytestmark = pytest.mark.vllm


@pytest.fixture
def make_engine():
    made = []

    def make(shape=None, **settings):
        made.append(Engine(shape, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def engine(make_engine):
    one = make_engine()
    yield one
    assert one.leaks() == (0, 0, 0, 0)


def found(engine, chunks, context=None):
    context = context or engine.request("reader")
    return [engine.manager.lookup(chunk, context) for chunk in chunks]


HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


class TestStoring:
    def test_what_was_stored_is_found(self, engine):
        assert engine.stored(keys(5)) == keys(5)
        assert found(engine, keys(6)) == [HIT] * 5 + [MISS]

    def test_what_is_there_is_not_stored_again(self, engine):
        engine.stored(keys(3))
        assert engine.stored(keys(5)) == keys(5)[3:]
        assert engine.stored(keys(5)) == []

    def test_a_message_lists_frames_in_the_order_of_groups_and_chunks(self, make_engine):
        engine = make_engine(geometry(2))
        chunks = keys(3, group=0) + keys(3, group=1)
        output = engine.manager.prepare_store(chunks, engine.request())
        assert output.keys_to_store == chunks
        assert output.store_spec.group_frames == (3, 3)
        frames = [engine.store.frames[chunk] for chunk in chunks]
        assert output.store_spec.refs.tolist() == [
            [f.header, f.offset, f.generation] for f in frames
        ]

    def test_a_chunk_is_published_only_when_every_rank_wrote_its_part(self, make_engine):
        engine = make_engine(geometry(world_size=2))
        context = engine.request()
        output = engine.manager.prepare_store(keys(2), context)
        engine.ranks.write(output.store_spec, rank=0)
        engine.manager.complete_store(set(keys(2)), context)
        assert found(engine, keys(2)) == [MISS] * 2
        assert engine.leaks() == (0, 0, 0, 0)
        assert engine.counted(Metrics.ABORTED_STORES) == 2
        engine.stored(keys(2), engine.request("another"))
        assert found(engine, keys(2)) == [HIT] * 2

    def test_behind_a_chunk_that_was_given_up_nothing_of_the_request_is_published(self, engine):
        context = engine.request()
        first = engine.manager.prepare_store(keys(5), context)
        second = engine.manager.prepare_store(keys(2, start=5), context)
        engine.ranks.write(first.store_spec, failing=(2,))
        engine.ranks.write(second.store_spec)
        # a set, as vLLM passes it: the order is that of reservation all the same
        engine.manager.complete_store(set(keys(5)), context)
        engine.manager.complete_store(set(keys(2, start=5)), context)
        assert found(engine, keys(7)) == [HIT] * 2 + [MISS] * 5
        assert engine.stored(keys(9), context) == []
        assert engine.stored(keys(9), engine.request("another")) == keys(9)[2:]

    def test_a_window_chunk_that_was_given_up_leaves_the_other_chunks_useful(self, make_engine):
        engine = make_engine(geometry(2, is_prefix=(True, False)))
        context = engine.request()
        output = engine.manager.prepare_store(keys(3, group=0) + keys(3, group=1), context)
        engine.ranks.write(output.store_spec, failing=(3,))
        engine.manager.complete_store(set(output.keys_to_store), context)
        assert found(engine, keys(3, group=0)) == [HIT] * 3
        assert found(engine, keys(3, group=1)) == [MISS, HIT, HIT]

    def test_a_prefix_chunk_that_was_given_up_takes_the_window_chunks_with_it(self, make_engine):
        engine = make_engine(geometry(2, is_prefix=(False, True)))
        context = engine.request()
        output = engine.manager.prepare_store(keys(2, group=0) + keys(2, group=1), context)
        engine.ranks.write(output.store_spec, failing=(2,))
        engine.manager.complete_store(set(output.keys_to_store), context)
        assert found(engine, output.keys_to_store) == [MISS] * 4

    def test_a_store_that_failed_as_a_whole_publishes_nothing(self, engine):
        context = engine.request()
        output = engine.manager.prepare_store(keys(3), context)
        engine.ranks.write(output.store_spec)
        engine.manager.complete_store(set(keys(3)), context, success=False)
        assert found(engine, keys(3)) == [MISS] * 3


class TestOverload:
    def test_beyond_the_bound_in_flight_the_rest_of_a_request_is_skipped(self, make_engine):
        engine = make_engine(max_inflight_bytes=10 * 4096)
        context = engine.request()
        output = engine.manager.prepare_store(keys(25), context)
        assert output.keys_to_store == keys(10)
        assert engine.counted(Metrics.SKIPPED_STORES, "inflight") == 15
        assert engine.manager.prepare_store(keys(2, start=25), context).keys_to_store == []
        assert engine.counted(Metrics.SKIPPED_STORES, "sticky") == 2
        engine.ranks.write(output.store_spec)
        engine.manager.complete_store(set(output.keys_to_store), context)
        # room again, but a chunk behind a gap can't be found: still nothing of this request
        assert engine.stored(keys(30), context) == []
        assert engine.stored(keys(20), engine.request("another")) == keys(20)[10:]

    def test_of_several_groups_the_leading_chunks_of_each_fit(self, make_engine):
        engine = make_engine(geometry(3), max_inflight_bytes=6 * 4096)
        chunks = [key(n, group) for group in range(3) for n in range(5)]
        output = engine.manager.prepare_store(chunks, engine.request())
        assert output.keys_to_store == [key(n, group) for group in range(3) for n in range(2)]
        assert output.store_spec.group_frames == (2, 2, 2)

    def test_positions_the_engine_knows_decide_what_comes_first(self, make_engine):
        engine = make_engine(geometry(2), max_inflight_bytes=2 * 4096)
        context = engine.request()
        if not hasattr(context, "set_offload_key_position"):
            pytest.skip("this vLLM keeps no positions")
        for number, end in ((key(0, 0), 320), (key(1, 0), 352), (key(0, 1), 64), (key(1, 1), 96)):
            context.set_offload_key_position(number, end)
        chunks = [key(0, 0), key(1, 0), key(0, 1), key(1, 1)]
        assert engine.manager.prepare_store(chunks, context).keys_to_store == [key(0, 1), key(1, 1)]

    def test_a_store_full_of_leased_chunks_takes_what_fits_and_counts_the_rest(self, make_engine):
        engine = make_engine(geometry(page_bytes=MIB))
        assert len(engine.stored(keys(10))) == 8, "the bound in flight is half of the arena"
        engine.stored(keys(8, start=8), engine.request("more"))
        there = [chunk for chunk in keys(16) if chunk in engine.store.frames]
        engine.end_step()
        reader, held = engine.request("reader"), there[:-3]
        engine.manager.prepare_load(held, reader)
        before = engine.counted(Metrics.SKIPPED_STORES, "no_room")
        context = engine.request("late")
        output = engine.manager.prepare_store(keys(8, start=50), context)
        assert output.keys_to_store == keys(3, start=50)
        assert engine.counted(Metrics.SKIPPED_STORES, "no_room") == before + 5
        engine.ranks.write(output.store_spec)
        engine.manager.complete_store(set(output.keys_to_store), context)
        assert engine.stored(keys(8, start=80), context) == []
        engine.manager.complete_load(held, reader)
        assert engine.stored(keys(5, start=50), engine.request("later")) == keys(2, start=53)

    def test_the_least_recently_used_chunks_make_room_and_a_prefix_outlives_its_tail(
        self, make_engine
    ):
        engine = make_engine(geometry(page_bytes=MIB))
        first = engine.request("first")
        engine.stored(keys(6), first)
        engine.manager.on_request_finished(first)
        second = engine.request("second")
        engine.stored(keys(6, start=10), second)
        engine.manager.on_request_finished(second)
        engine.end_step()
        engine.stored(keys(6, start=20), engine.request("third"))
        left = found(engine, keys(6))
        assert MISS in left, "nothing had to go"
        assert left == sorted(left, key=lambda answer: answer is MISS), (
            "a chunk outlived its prefix"
        )
        assert found(engine, keys(6, start=20)) == [HIT] * 6


class TestPending:
    def test_a_chunk_being_written_is_pending_until_the_deadline_of_the_request(self, engine):
        writer, reader = engine.request("writer"), engine.request("reader")
        output = engine.manager.prepare_store(keys(3), writer)
        assert found(engine, keys(3), reader) == [PENDING] * 3
        engine.clock.now += 1.9
        assert found(engine, keys(3), reader) == [PENDING] * 3
        engine.clock.now += 0.2
        assert found(engine, keys(3), reader) == [MISS] * 3
        assert found(engine, keys(3), reader) == [MISS] * 3
        assert engine.counted(Metrics.PENDING_TIMEOUTS) == 1
        assert found(engine, keys(3), engine.request("other")) == [PENDING] * 3
        engine.ranks.write(output.store_spec)
        engine.manager.complete_store(set(keys(3)), writer)
        assert found(engine, keys(3), reader) == [HIT] * 3

    def test_a_chunk_whose_writer_died_is_a_miss(self, engine):
        writer, reader = engine.request("writer"), engine.request("reader")
        engine.manager.prepare_store(keys(2), writer)
        assert found(engine, keys(2), reader) == [PENDING] * 2
        arena = engine.store.arena
        # no process has this start time: its pid belongs to another one by now
        arena.words[arena.attach_word + 1] += 1
        engine.clock.now += 0.3
        assert found(engine, keys(2), reader) == [MISS] * 2
        engine.manager.complete_store(set(keys(2)), writer, success=False)

    def test_with_a_timeout_of_zero_nobody_waits(self, make_engine):
        engine = make_engine(pending_timeout_ms=0)
        engine.manager.prepare_store(keys(1), engine.request())
        assert found(engine, keys(1)) == [MISS]

    def test_what_a_dead_engine_left_half_written_is_a_miss(self, make_engine, tmp_path):
        from kvferry.kvops.store.arena import Arena
        from kvferry.kvops.store.store import Store

        path = tmp_path / "arena"
        with Arena.open(path, 16 * MIB, session="dead") as arena:
            store = Store.open(arena, namespace=bytes(16))
            assert store.put(keys(2), [bytes(4096)] * 2) == [True, True]
            store.reserve(keys(2, start=2), 4096)
            store.close()
        engine = make_engine(arena=Arena.open(path, 16 * MIB, session="alive"))
        assert found(engine, keys(4)) == [HIT, HIT, MISS, MISS]


class TestLoading:
    def test_a_load_holds_its_frames_until_it_ends(self, engine):
        engine.stored(keys(4))
        reader = engine.request("reader")
        found(engine, keys(4), reader)
        spec = engine.manager.prepare_load(keys(4), reader)
        engine.end_step()
        assert engine.store.delete(keys(4)) == [False] * 4
        engine.ranks.read(spec)
        engine.manager.complete_load(set(keys(4)), reader)
        assert engine.store.delete(keys(4)) == [True] * 4

    def test_a_hit_is_held_until_the_step_ends(self, engine):
        engine.stored(keys(2))
        engine.end_step()
        found(engine, keys(1))
        assert engine.store.delete(keys(2)) == [False, True]
        engine.end_step()
        assert engine.store.delete(keys(1)) == [True]

    def test_a_frame_that_went_away_before_the_load_becomes_a_failed_one(self, engine):
        engine.stored(keys(3))
        engine.end_step()
        engine.store.delete([key(1)])
        reader = engine.request("reader")
        spec = engine.manager.prepare_load(keys(3), reader)
        assert spec.refs[1].tolist() == [-1, -1, -1]
        assert (spec.refs[[0, 2]] > 0).all()
        engine.ranks.read(spec)
        engine.manager.complete_load(set(keys(3)), reader)

    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_a_chunk_that_failed_to_load_is_a_miss_and_its_frame_is_freed_after_the_last_load(
        self, engine, bad
    ):
        engine.stored(keys(3))
        one, two = engine.request("one"), engine.request("two")
        spec = engine.manager.prepare_load(keys(3), one)
        other = engine.manager.prepare_load(keys(3), two)
        engine.ranks.read(spec, failing=(bad,))
        engine.manager.complete_load(set(keys(3)), one)
        assert found(engine, keys(3))[bad] is MISS
        assert engine.store.stats()["leases"] == 3
        engine.end_step()
        engine.ranks.read(other)
        engine.manager.complete_load(set(keys(3)), two)
        engine.end_step()
        assert engine.store.counts["bad"] == 1
        assert engine.stored(keys(3), engine.request("again")) == [key(bad)]
        assert found(engine, keys(3)) == [HIT] * 3

    def test_hits_are_said_to_come_from_host_memory(self, engine):
        source = engine.manager.get_load_source(key(0), engine.request())
        assert source is None or source.value == "host"


class TestReset:
    def test_nothing_stored_before_is_found_after(self, engine):
        engine.stored(keys(5))
        engine.manager.reset_cache()
        assert found(engine, keys(5)) == [MISS] * 5
        assert not engine.manager.has_pending_work()
        assert engine.stored(keys(5)) == keys(5)

    def test_with_a_hundred_jobs_in_flight_nothing_leaks_and_nothing_old_is_found(
        self, make_engine
    ):
        engine = make_engine(geometry(world_size=2))
        stores, loads = [], []
        engine.stored(keys(50))
        for number in range(50):
            context = engine.request(f"s{number}")
            stores.append(engine.manager.prepare_store(keys(3, start=1000 + 3 * number), context))
            reader = engine.request(f"l{number}")
            loads.append(engine.manager.prepare_load([key(number)], reader))
        engine.manager.reset_cache()
        assert engine.manager.has_pending_work()
        # vLLM drops the completions of stale jobs: the marks that the workers leave are all there is
        for number, (store, load) in enumerate(zip(stores, loads, strict=True)):
            engine.ranks.write(store.store_spec, failing=(1,) if number % 3 == 0 else ())
            engine.ranks.read(load, failing=(0,) if number % 5 == 0 else ())
            engine.end_step()
            assert engine.manager.has_pending_work() is (number < 49)
        assert engine.leaks() == (0, 0, 0, 0)
        assert found(engine, keys(50)) == [MISS] * 50
        assert found(engine, keys(150, start=1000)) == [MISS] * 150
        assert engine.stored(keys(50)) == keys(50)
        # the whole arena is to be had again
        assert engine.store.stats()["used_bytes"] == 50 * 8192

    def test_a_request_that_lives_through_a_reset_stores_nothing_more(self, engine):
        """Its blocks may be of old weights, and vLLM offers them anew with those that a window left to others."""
        context = engine.request()
        output = engine.manager.prepare_store(keys(3), context)
        engine.manager.reset_cache()
        assert engine.manager.prepare_store(keys(3), context).keys_to_store == []
        assert engine.counted(Metrics.SKIPPED_STORES, "sticky") == 3
        engine.ranks.write(output.store_spec)
        engine.manager.complete_store(set(keys(3)), context)
        engine.end_step()
        assert found(engine, keys(3), context) == [MISS] * 3
        assert engine.stored(keys(3), engine.request("another")) == keys(3)
        # and it may use what others store
        assert found(engine, keys(3), context) == [HIT] * 3

    def test_bytes_of_stale_jobs_count_against_the_bound_until_the_workers_are_done(
        self, make_engine
    ):
        engine = make_engine(max_inflight_bytes=4 * 4096)
        old = engine.manager.prepare_store(keys(3), engine.request())
        engine.manager.reset_cache()
        assert engine.manager.prepare_store(keys(4), engine.request("a")).keys_to_store == keys(1)
        engine.ranks.write(old.store_spec)
        engine.end_step()
        assert engine.manager.prepare_store(
            keys(3, start=5), engine.request("b")
        ).keys_to_store == keys(3, start=5)

    def test_a_dead_worker_does_not_keep_the_engine_awake(self, make_engine):
        engine = make_engine()
        engine.manager.prepare_store(keys(3), engine.request())
        engine.manager.reset_cache()
        assert engine.manager.has_pending_work()
        engine.clock.now += 61
        assert not engine.manager.has_pending_work()


class TestCost:
    def test_a_lookup_builds_nothing(self, engine):
        engine.stored(keys(64))
        chunks, context, lookup = keys(128), engine.request(), engine.manager.lookup
        for chunk in chunks:
            lookup(chunk, context)
        gc.collect()
        gc.disable()
        try:
            before = sys.getallocatedblocks()
            for _ in range(10):
                for chunk in chunks:
                    lookup(chunk, context)
            grown = sys.getallocatedblocks() - before
        finally:
            gc.enable()
        assert grown < 8

    def test_a_lookup_calls_nothing_but_a_dictionary(self, engine):
        engine.stored(keys(8))
        chunks, context, called = keys(16), engine.request(), []

        def trace(frame, event, function):
            if event == "c_call":
                called.append(function.__name__)

        sys.setprofile(trace)
        try:
            for chunk in chunks:
                engine.manager.lookup(chunk, context)
        finally:
            sys.setprofile(None)
        assert set(called) <= {"get", "setprofile"}
