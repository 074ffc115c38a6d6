"""The life of one transfer (one chunk, one direction), as a table. No I/O, no threads, no clock.

::

             claim             start            pass            finish          release
    QUEUED -----------> CLAIMED ------> MOVING ------> MOVED ---------> DONE -----------> RELEASED
       |                   |            |    |            |                                  ^
       | cancel            | cancel     |    | fail       | fail                             |
       |                   | fail       |    v            v                                  |
       +-------------------+------------|--> FAILED <-----+------------- release ------------+
                                 cancel |      ^
                                        v      | pass, fail
                                    ABANDONED -+

Rule 1: whatever decides a state lives in this file.
Rule 2: nothing here knows which way the bytes go; a store and a load are the same life.

The engine's pages are read or written in MOVING and ABANDONED, and nowhere else. An abandoned
transfer is one that somebody stopped waiting for: its bytes may be torn, so it ends failed.
"""

import enum

from kvferry.kvops.errors import TransferError


class State(enum.IntEnum):
    """Where a transfer is."""

    QUEUED = 0
    CLAIMED = 1
    MOVING = 2
    ABANDONED = 3
    MOVED = 4
    DONE = 5
    FAILED = 6
    RELEASED = 7


class Event(enum.IntEnum):
    """What happens to a transfer."""

    CLAIM = 0
    START = 1
    PASS = 2
    FINISH = 3
    FAIL = 4
    CANCEL = 5
    RELEASE = 6


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.QUEUED, Event.CLAIM): State.CLAIMED,
    (State.QUEUED, Event.CANCEL): State.FAILED,
    (State.CLAIMED, Event.START): State.MOVING,
    (State.CLAIMED, Event.FAIL): State.FAILED,
    (State.CLAIMED, Event.CANCEL): State.FAILED,
    (State.MOVING, Event.PASS): State.MOVED,
    (State.MOVING, Event.FAIL): State.FAILED,
    (State.MOVING, Event.CANCEL): State.ABANDONED,
    (State.ABANDONED, Event.PASS): State.FAILED,
    (State.ABANDONED, Event.FAIL): State.FAILED,
    (State.MOVED, Event.FINISH): State.DONE,
    (State.MOVED, Event.FAIL): State.FAILED,
    (State.DONE, Event.RELEASE): State.RELEASED,
    (State.FAILED, Event.RELEASE): State.RELEASED,
}

TOUCHING = frozenset({State.MOVING, State.ABANDONED})
"""The engine's pages are being read or written."""

UNREAD = frozenset({State.QUEUED, State.CLAIMED})
"""No page has been touched yet; a cancel here leaves no trace."""

AWAITED = UNREAD | {State.MOVING}
"""Whoever wants the pages back waits for these: they are, or may still be, read or written."""

# the same by number: these are asked seven times for each chunk, and an enum is slow to hash
_NEXT = [[TRANSITIONS.get((state, event)) for event in Event] for state in State]
_IS_AWAITED = [state in AWAITED for state in State]
_IS_UNREAD = [state in UNREAD for state in State]


class IllegalTransition(TransferError):
    """A transfer was told to do what its state does not allow."""


def advance(state: State, event: Event) -> State:
    """Return the state after *event*.

    Raises:
        IllegalTransition: *state* does not allow *event*; the message lists what it allows.
    """
    after = _NEXT[state][event]
    if after is None:
        allowed = sorted(e.name.lower() for s, e in TRANSITIONS if s is state)
        raise IllegalTransition(
            f"a transfer that is {state.name.lower()} cannot {event.name.lower()}; it can {allowed}"
        )
    return after


def is_awaited(state: State) -> bool:
    """Say whether *state* is in AWAITED."""
    return _IS_AWAITED[state]


def is_unread(state: State) -> bool:
    """Say whether *state* is in UNREAD."""
    return _IS_UNREAD[state]
