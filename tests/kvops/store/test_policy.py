"""Which frame goes first: least recently used."""

import random

import pytest

from kvferry.kvops.store.policy import POLICIES, Lru


class Thing:
    def __init__(self, name):
        self.name = name
        self.entries = 0


def never(_):
    return False


@pytest.fixture
def things():
    return {name: Thing(name) for name in "abcd"}


@pytest.fixture
def lru(things):
    policy = Lru()
    for thing in things.values():
        policy.add(thing)
    return policy


def order(lru):
    return "".join(thing.name for thing in lru.frames())


def test_the_oldest_goes_first(lru, things):
    assert order(lru) == "abcd"
    assert len(lru) == 4
    assert lru.victim(never) is things["a"]


def test_a_touch_makes_it_the_last(lru, things):
    lru.touch(things["a"])
    lru.touch(things["c"])
    assert order(lru) == "bdac"


def test_a_removed_frame_is_forgotten(lru, things):
    lru.touch(things["b"])
    lru.remove(things["b"])
    lru.remove(things["b"])
    lru.touch(things["b"])
    assert order(lru) == "acd"
    assert len(lru) == 3


def test_a_held_frame_is_passed_over_and_counts_as_used(lru, things):
    assert lru.victim(lambda thing: thing.name in "ab") is things["c"]
    assert order(lru) == "cdab"


def test_there_is_no_victim_when_all_are_held(lru, things):
    lru.touch(things["a"])
    assert lru.victim(lambda thing: True) is None
    assert len(lru) == 4


def test_it_does_what_a_list_does_and_its_queue_stays_short():
    rng = random.Random(11)
    lru, model, things = Lru(), [], [Thing(number) for number in range(300)]
    for _ in range(20_000):
        thing = rng.choice(things)
        verb = rng.random()
        if thing not in model:
            lru.add(thing)
            model.append(thing)
        elif verb < 0.85:
            lru.touch(thing)
            model.remove(thing)
            model.append(thing)
        elif verb < 0.95:
            lru.remove(thing)
            model.remove(thing)
            things[thing.name] = Thing(thing.name)
        else:
            assert lru.victim(never) is model[0]
        assert len(lru) == len(model)
        assert len(lru._queue) <= 2 * len(model) + Lru.SPARE_ENTRIES + 1
    assert lru.frames() == model


def test_names_in_the_settings():
    assert set(POLICIES) == {"lru"}


def test_what_comes_and_goes_unused_does_not_pile_up(lru):
    for number in range(10 * Lru.SPARE_ENTRIES):
        thing = Thing(str(number))
        lru.add(thing)
        lru.remove(thing)
    assert len(lru._queue) <= 2 * len(lru) + Lru.SPARE_ENTRIES
    assert order(lru) == "abcd"
