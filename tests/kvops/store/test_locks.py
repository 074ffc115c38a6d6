"""Locks on bytes of an arena file: between open files, also of one process, and gone with their holder."""

import os

import pytest

from kvferry.kvops.errors import ArenaBusyError
from kvferry.kvops.store import locks
from kvferry.kvops.store.locks import Lock


@pytest.fixture
def two(path):
    """Two open files of one path."""
    fds = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2)]
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("lock", list(Lock))
def test_one_holds_it(two, lock):
    first, second = two
    assert locks.try_lock(first, lock)
    assert locks.is_held(second, lock)
    assert not locks.is_held(first, lock)
    assert not locks.try_lock(second, lock)
    locks.unlock(first, lock)
    assert not locks.is_held(second, lock)
    assert locks.try_lock(second, lock)


def test_locks_are_apart(two):
    first, second = two
    assert locks.try_lock(first, Lock.CREATE)
    assert locks.try_lock(second, Lock.OWNER)
    assert locks.try_lock(second, Lock.ATTACHED)


def test_many_share_one(two):
    first, second = two
    assert locks.try_lock(first, Lock.ATTACHED, shared=True)
    assert locks.try_lock(second, Lock.ATTACHED, shared=True)
    assert not locks.try_lock(first, Lock.ATTACHED)
    locks.unlock(second, Lock.ATTACHED)
    assert locks.try_lock(first, Lock.ATTACHED)


def test_unlock_without_a_lock_is_no_error(two):
    locks.unlock(two[0], Lock.OWNER)


def test_hold_gives_up_after_its_time(two):
    first, second = two
    with (
        locks.hold(first, Lock.CREATE, timeout_s=1, what="it"),
        pytest.raises(ArenaBusyError, match="it: another process has held its lock for 0 s"),
        locks.hold(second, Lock.CREATE, timeout_s=0, what="it"),
    ):
        pass
    with locks.hold(second, Lock.CREATE, timeout_s=0, what="it"):
        assert locks.is_held(first, Lock.CREATE)
    assert not locks.is_held(first, Lock.CREATE)


def test_hold_lets_go_on_an_error(two):
    first, second = two
    with pytest.raises(KeyError), locks.hold(first, Lock.CREATE, timeout_s=0, what="it"):
        raise KeyError
    assert locks.try_lock(second, Lock.CREATE)


def test_a_killed_holder_holds_nothing(two, path, child):
    holder = child(
        f"import os\nfrom kvferry.kvops.store import locks\nfd = os.open({str(path)!r}, os.O_RDWR)\n"
    ).wait_ready()
    assert holder.ask("print(locks.try_lock(fd, locks.Lock.OWNER), flush=True)") == "True"
    assert locks.is_held(two[0], Lock.OWNER)
    holder.kill()
    assert locks.try_lock(two[0], Lock.OWNER)


def test_another_error_is_not_taken_for_a_held_lock():
    with pytest.raises(OSError, match="Bad file descriptor"):
        locks.try_lock(1 << 20, Lock.OWNER)
