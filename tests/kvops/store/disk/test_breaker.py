"""When the breaker opens, whom it lets through, and how it closes; and what the doorkeeper remembers."""

import logging
import random

import pytest

from kvferry.kvops.store.disk import admission
from kvferry.kvops.store.disk.admission import Doorkeeper
from kvferry.kvops.store.disk.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker("saving to /mnt/kv", clock)


def trip(breaker):
    for _ in range(FAILURES):
        assert breaker.allows()
        breaker.failed("EIO")


def test_it_opens_after_failures_in_a_row_only(breaker):
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed("EIO")
        breaker.succeeded()
    assert breaker.allows()
    trip(breaker)
    assert breaker.is_open
    assert not breaker.allows()


def test_it_says_so_once_and_when_it_is_over(breaker, clock, caplog):
    trip(breaker)
    clock.now += FIRST_PAUSE_S
    assert breaker.allows()
    breaker.failed("EIO")
    clock.now += 2 * FIRST_PAUSE_S
    assert breaker.allows()
    breaker.succeeded()
    errors = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "saving to /mnt/kv failed 3 times in a row (EIO)" in errors[0]
    assert caplog.records[-1].message == "saving to /mnt/kv works again"
    assert not breaker.is_open


def test_one_attempt_after_each_pause_and_pauses_that_double_to_a_bound(breaker, clock):
    trip(breaker)
    pause = FIRST_PAUSE_S
    for _ in range(20):
        clock.now += pause - 0.001
        assert not breaker.allows()
        clock.now += 0.001
        assert breaker.allows()
        assert not breaker.allows()
        breaker.failed("EIO")
        pause = min(2 * pause, LONGEST_PAUSE_S)


def test_failures_of_before_it_opened_do_not_make_the_pause_longer(breaker, clock):
    trip(breaker)
    for _ in range(50):
        breaker.failed("late")
    clock.now += FIRST_PAUSE_S
    assert breaker.allows()


def test_an_attempt_that_is_never_made_does_not_keep_it_open(breaker, clock):
    trip(breaker)
    clock.now += FIRST_PAUSE_S
    assert breaker.allows()
    # nobody had anything to save
    clock.now += FIRST_PAUSE_S
    assert breaker.allows()


def tags(seed, count):
    source = random.Random(seed)
    return [(source.getrandbits(64), source.getrandbits(64)) for _ in range(count)]


def test_the_doorkeeper_knows_what_it_saw_and_few_strangers():
    keeper = Doorkeeper()
    seen = tags(1, 20_000)
    assert sum(keeper.add(tag) for tag in seen) < 20
    assert all(tag in keeper for tag in seen)
    assert all(keeper.add(tag) for tag in seen)
    assert sum(keeper.add(tag) for tag in tags(2, 5_000)) < 25


def test_the_doorkeeper_forgets_the_oldest_first(monkeypatch):
    monkeypatch.setattr(admission, "CAPACITY", 1000)
    keeper = Doorkeeper()
    first, second, third = tags(1, 1000), tags(2, 1000), tags(3, 1000)
    for tag in [*first, *second]:
        keeper.add(tag)
    assert all(keeper.add(tag) for tag in second[:10])
    for tag in third:
        keeper.add(tag)
    assert sum(keeper.add(tag) for tag in first[500:600]) < 10
