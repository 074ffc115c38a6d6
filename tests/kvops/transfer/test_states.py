import pytest

from kvferry.kvops.transfer.states import (
    AWAITED,
    TOUCHING,
    TRANSITIONS,
    UNREAD,
    Event,
    IllegalTransition,
    State,
    advance,
    is_awaited,
    is_unread,
)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_pair_is_allowed_or_refused(state, event):
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        message = f"{state.name.lower()} cannot {event.name.lower()}"
        with pytest.raises(IllegalTransition, match=message):
            advance(state, event)


def test_every_state_is_reached():
    reachable = {State.QUEUED}
    while new := {TRANSITIONS[k] for k in TRANSITIONS if k[0] in reachable} - reachable:
        reachable |= new
    assert reachable == set(State)


def test_every_life_ends_released():
    """No state but RELEASED is final, and none is met twice, so there is one end for all."""
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.RELEASED}

    def longest(state, seen):
        assert state not in seen, f"a life can go round: {seen}"
        after = [TRANSITIONS[k] for k in TRANSITIONS if k[0] is state]
        return 1 + max((longest(s, seen | {state}) for s in after), default=0)

    assert longest(State.QUEUED, frozenset()) == 6


def test_every_state_before_the_end_can_fail():
    for state in set(State) - {State.DONE, State.FAILED, State.RELEASED}:
        ways = {TRANSITIONS.get((state, event)) for event in Event}
        assert State.FAILED in ways


def test_pages_are_let_go_of_for_good():
    """Once pages are no longer touched, or never will be, no event brings that back."""
    for (before, _), after in TRANSITIONS.items():
        if before not in TOUCHING | UNREAD:
            assert after not in TOUCHING | UNREAD
        if before not in AWAITED:
            assert after not in AWAITED


def test_an_abandoned_transfer_cannot_succeed():
    after = {TRANSITIONS[k] for k in TRANSITIONS if k[0] is State.ABANDONED}
    assert after == {State.FAILED}


@pytest.mark.parametrize("state", State)
def test_the_quick_answers_are_those_of_the_sets(state):
    assert is_awaited(state) == (state in AWAITED)
    assert is_unread(state) == (state in UNREAD)
