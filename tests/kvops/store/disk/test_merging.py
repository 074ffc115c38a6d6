"""Neighbours on the disk travel in one request, and do not fail together."""

import time

import pytest

from kvferry.kvops.store.disk import requests
from kvferry.kvops.store.disk import tier as tier_module
from kvferry.kvops.store.disk.format import blob_tag
from kvferry.kvops.store.disk.jobs import Status

from ..chunks import blob, keys, put, read  # noqa: TID252
from .test_tier import World, statuses

SIZE = 20_000
DONE = Status.DONE


@pytest.fixture
def world(tmp_path, open_store):
    world = World(tmp_path / "disk", open_store)
    yield world
    world.close()


@pytest.fixture
def tier(world):
    return world.open()


def watch(world):
    """Return a list that fills with (direction, pieces) of every request."""
    seen = []
    submit = world.io.submit

    def watching(asked):
        taken = submit(asked)
        seen.extend((r.direction.value, len(r.pieces)) for r in asked[:taken])
        return taken

    world.io.submit = watching
    return seen


def test_blobs_that_lie_side_by_side_share_requests_both_ways(world, tier):
    put(world.store, keys(40), SIZE)
    seen = watch(world)
    assert statuses(tier.save(keys(40), wait=True)) == [DONE] * 40
    assert sum(pieces for _, pieces in seen) == 80
    assert len(seen) <= 1 + 40 // requests.MERGED_BLOBS + 2
    tier = world.reopen()
    seen = watch(world)
    assert statuses(tier.load(keys(40), wait=True)) == [DONE] * 40
    assert sum(pieces for _, pieces in seen) == 80
    assert len(seen) < 10
    assert read(world.store, keys(40), SIZE) == [blob(k, SIZE) for k in keys(40)]


def test_large_blobs_travel_alone(world, tier):
    size = requests.MERGED_BYTES
    put(world.store, keys(5), size)
    seen = watch(world)
    assert statuses(tier.save(keys(5), wait=True)) == [DONE] * 5
    assert seen == [("write", 2)] * 5


def test_a_prefix_in_another_order_still_comes_back_whole(world, tier):
    put(world.store, keys(30), SIZE)
    tier.save(keys(30), wait=True)
    wanted = keys(30)[::-1][::2] + keys(30)[::3]
    tier = world.reopen()
    answers = statuses(tier.load(wanted, wait=True))
    assert set(answers) == {DONE, Status.PENDING}
    assert read(world.store, wanted, SIZE) == [blob(k, SIZE) for k in wanted]


@pytest.mark.parametrize("fault", ["aio_write_error", "write_error", "short_write", "no_space"])
def test_one_failed_request_is_taken_apart_and_everybody_else_is_saved(world, tier, fault):
    put(world.store, keys(10), SIZE)
    # the shared request fails, then one of those that it is taken apart into
    with world.io.fault(fault, count=2, match=lambda call: call.kind == "write") as met:
        answers = statuses(tier.save(keys(10), wait=True))
    assert met.hits == 2
    assert sorted(answers, key=str) == sorted([Status.ERROR] + [DONE] * 9, key=str)
    saved = [k for k, answer in zip(keys(10), answers, strict=True) if answer is DONE]
    tier = world.reopen()
    assert statuses(tier.load(saved, wait=True)) == [DONE] * 9
    assert read(world.store, saved, SIZE) == [blob(k, SIZE) for k in saved]


@pytest.mark.parametrize(
    ("fault", "status"), [("aio_read_error", Status.ERROR), ("short_read", Status.CORRUPT)]
)
def test_one_failed_request_is_taken_apart_and_everybody_else_is_loaded(world, tier, fault, status):
    put(world.store, keys(10), SIZE)
    tier.save(keys(10), wait=True)
    tier = world.reopen()
    with world.io.fault(fault, count=2, match=lambda call: call.kind == "read") as met:
        answers = statuses(tier.load(keys(10), wait=True))
    assert met.hits == 2
    assert sorted(answers, key=str) == sorted([status] + [DONE] * 9, key=str)
    loaded = [k for k, answer in zip(keys(10), answers, strict=True) if answer is DONE]
    assert read(world.store, loaded, SIZE) == [blob(k, SIZE) for k in loaded]
    assert tier.stats()["inflight_bytes"] == 0


def test_a_flipped_bit_spoils_one_blob_of_a_shared_request(world, tier):
    put(world.store, keys(20), SIZE)
    tier.save(keys(20), wait=True)
    place = sorted(world.files.entries(), key=lambda e: e.place.offset)[7].place
    world.close()
    (path,) = world.folder.glob("seg-*.blobs")
    with path.open("r+b") as file:
        file.seek(place.offset + place.header_bytes + 99)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    tier = world.open()
    answers = statuses(tier.load(keys(20), wait=True))
    assert answers.count(Status.CORRUPT) == 1
    assert answers.count(DONE) == 19


def test_the_driver_has_the_first_chunks_of_a_call_before_the_last_are_looked_at(
    world, tier, monkeypatch
):
    monkeypatch.setattr(tier_module, "TOGETHER", 4)
    put(world.store, keys(10), SIZE)
    asked = []
    ask = tier._driver.ask
    monkeypatch.setattr(tier._driver, "ask", lambda moves: asked.append(len(moves)) or ask(moves))
    assert statuses(tier.save(keys(10), wait=True)) == [DONE] * 10
    world.store.delete(keys(10))
    assert statuses(tier.load(keys(10), wait=True)) == [DONE] * 10
    assert asked == [4, 4, 2] * 2


def test_a_chunk_that_is_asked_for_twice_in_a_call_comes_once(world, tier):
    put(world.store, keys(2), SIZE)
    first, second = keys(2)
    handle = tier.save([first, second, first], wait=True)
    assert statuses(handle) == [DONE, DONE, Status.PENDING]
    world.store.delete([first, second])
    handle = tier.load([first, second, first], wait=True)
    assert statuses(handle) == [DONE, DONE, Status.PENDING]
    assert tier.stats()["inflight_bytes"] == 0
    assert read(world.store, keys(2), SIZE) == [blob(k, SIZE) for k in keys(2)]


def test_the_journal_is_rewritten_when_nobody_waits_for_the_disk(world, tier):
    wanted = keys(1100)
    put(world.store, wanted, 1000)
    assert statuses(tier.save(wanted, wait=True)) == [DONE] * len(wanted)
    assert world.files.stats()["rewrites"] == 0
    world.files.remove([blob_tag(world.store.namespace, key) for key in wanted])
    world.io.wake()
    until_s = time.monotonic() + 30
    while not world.files.stats()["rewrites"]:
        assert time.monotonic() < until_s
    assert world.files.stats()["journal_bytes"] == 64
