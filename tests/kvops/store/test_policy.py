"""Which frame goes first: least recently used."""

import pytest

from kvferry.kvops.store.policy import POLICIES, Lru


@pytest.fixture
def lru():
    policy = Lru()
    for frame in "abcd":
        policy.add(frame)
    return policy


def test_the_oldest_goes_first(lru):
    assert list(lru.candidates()) == ["a", "b", "c", "d"]
    assert len(lru) == 4


def test_a_touch_makes_it_the_last(lru):
    lru.touch("a")
    lru.touch("c")
    assert list(lru.candidates()) == ["b", "d", "a", "c"]


def test_a_removed_frame_is_forgotten(lru):
    lru.remove("b")
    lru.remove("b")
    assert list(lru.candidates()) == ["a", "c", "d"]


def test_names_in_the_settings():
    assert set(POLICIES) == {"lru"}
