"""A process is its pid and its start time: a reused pid is no life, nor is a zombie."""

import os
import subprocess
import sys
import time

import pytest

from kvferry.kvops.store import liveness
from kvferry.kvops.store.liveness import is_alive, own_start_time, session_digest, start_time


def test_this_process_lives():
    assert own_start_time() == start_time(os.getpid()) > 0
    assert is_alive(os.getpid(), own_start_time())


@pytest.mark.parametrize("shift", [-1, 1, 1 << 40])
def test_a_reused_pid_is_another_process(shift):
    assert not is_alive(os.getpid(), own_start_time() + shift)


@pytest.mark.parametrize(("pid", "start"), [(0, 0), (0, 5), (1 << 40, 5)])
def test_a_free_entry_is_nobody(pid, start):
    assert not is_alive(pid, start)


def test_a_process_without_start_time_is_dead():
    assert not is_alive(os.getpid(), 0)


def test_a_zombie_is_dead():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = start_time(process.pid)
    assert is_alive(process.pid, start)
    process.kill()
    deadline = time.monotonic() + 10
    while is_alive(process.pid, start):
        assert time.monotonic() < deadline
    # not waited for until here: the pid was a zombie's
    process.wait()
    process.stdin.close()
    assert not is_alive(process.pid, start)


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        pytest.param(b"7 (vllm) S 1 2" + b" 0" * 16 + b" 12345 0", 12345, id="plain"),
        pytest.param(b"7 (a) Z (b c) R 1 2" + b" 0" * 16 + b" 99 0", 99, id="brackets"),
        pytest.param(b"7 (vllm) Z 1 2" + b" 0" * 16 + b" 12345 0", 0, id="zombie"),
        pytest.param(b"7 (vllm) X 1 2" + b" 0" * 16 + b" 12345 0", 0, id="dead"),
    ],
)
def test_any_command_name_is_read(monkeypatch, stat, expected):
    monkeypatch.setattr(liveness.Path, "read_bytes", lambda _: stat)
    assert start_time(7) == expected


def test_sessions_have_digests_of_their_own():
    names = ["", "a", "b", "engine-0", "engine-1"]
    digests = {session_digest(name) for name in names}
    assert len(digests) == len(names)
    assert all(0 < digest < 1 << 64 for digest in digests)
    assert session_digest("a") == session_digest("a")
