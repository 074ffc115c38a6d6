"""Arenas in memory of their own and arena files on tmpfs, closed whatever a test does."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.store import Store

from .chunks import ARENA_BYTES, NAMESPACE

HERE = Path(__file__).parent
TMPFS = Path("/dev/shm")


@pytest.fixture
def shm():
    """A folder of this test's own on tmpfs (elsewhere if there is none)."""
    with tempfile.TemporaryDirectory(dir=TMPFS if TMPFS.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def path(shm):
    return shm / "test.arena"


@pytest.fixture
def open_arena():
    """Open arenas that are closed at the end; in anonymous memory if no path is given."""
    with contextlib.ExitStack() as stack:

        def make(path=None, arena_bytes=ARENA_BYTES, *, session="engine"):
            arena = Arena.open(path, arena_bytes, session=session, populate=False)
            return stack.enter_context(arena)

        yield make


@pytest.fixture
def open_store(open_arena):
    """Open stores on arenas of their own, with a worker's view attached."""

    def make(path=None, arena_bytes=ARENA_BYTES, *, session="engine", ranks=1, **kwargs):
        arena = open_arena(path, arena_bytes, session=session)
        arena.attach()
        kwargs = {"namespace": NAMESPACE, "parts": ranks, **kwargs}
        store = Store.open(arena, **kwargs)
        verify = kwargs.get("verify", "always")
        return store, [Frames(arena, rank, verify=verify) for rank in range(ranks)]

    return make


@pytest.fixture
def storm():
    """Run one of the scripts of this folder that crash and damage arenas; return what it prints."""

    def run(script, *args, timeout_s=120):
        command = [sys.executable, HERE / script, *map(str, args)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run


class Child:
    """A Python process that does what it is told, piece by piece, and answers with one line each."""

    def __init__(self, prelude):
        loop = "\nimport sys\nprint('ready', flush=True)\nfor line in sys.stdin:\n    exec(line)\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", prelude + loop],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def pid(self):
        return self.process.pid

    def wait_ready(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def send(self, code):
        self.process.stdin.write(f"exec({code!r})\n")
        self.process.stdin.flush()

    def answer(self):
        return self.process.stdout.readline().strip()

    def ask(self, code):
        self.send(code)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def child():
    """Start processes that are killed at the end."""
    children = []

    def start(prelude):
        children.append(Child(prelude))
        return children[-1]

    yield start
    for one in children:
        if not one.process.stdout.closed:
            one.kill()
