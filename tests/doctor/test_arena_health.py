"""The doctor and the real store: an arena in use, at rest, and damaged; nothing in it is changed."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvferry.doctor import arenas
from kvferry.doctor.machine import Machine
from kvferry.kvops.config import MIB, Config
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.store import Store


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "kvferry-test.arena"


def examine(path, arena_bytes=16 * MIB):
    before = hashlib.sha256(path.read_bytes()).digest()
    config = Config(arena_path=str(path), arena_bytes=arena_bytes)
    findings = {f.name: f for f in arenas.arenas(Machine(environ={}), config, [])}
    assert hashlib.sha256(path.read_bytes()).digest() == before
    return findings[str(path)]


def test_an_arena_in_use(path):
    with Arena.open(path, 16 * MIB, session="doctor") as arena:
        assert examine(path).level == "ok"
        store = Store.open(arena, namespace=bytes(16))
        store.put([bytes(36)], [b"\xa5" * 5000])
        finding = examine(path)
        store.close()
    assert finding.level == "ok"
    assert finding.value.startswith(f"live pid {os.getpid()}; format ")
    assert "1 ready" in finding.value
    assert finding.data["used_bytes"] > 0


ENGINE = """
import sys
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.store import Store
with Arena.open(sys.argv[1], 16 << 20, session="doctor") as arena:
    store = Store.open(arena, namespace=bytes(16))
    store.put([bytes(36)], [bytes(5000)])
    store.close()
"""


def test_an_arena_at_rest(path):
    subprocess.run([sys.executable, "-c", ENGINE, str(path)], check=True, timeout=60)
    finding = examine(path)
    assert finding.level == "ok"
    assert finding.value.startswith("resting; format ")
    assert "1 ready" in finding.value


def test_another_size_than_the_settings_say(path):
    Arena.open(path, 16 * MIB, session="doctor").close()
    finding = examine(path, 32 * MIB)
    assert (finding.level, f"Set arena_bytes to {16 * MIB}" in finding.advice) == ("bad", True)


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 16 * MIB - 1])
def test_a_file_cut_short(path, size):
    Arena.open(path, 16 * MIB, session="doctor").close()
    with path.open("r+b") as stream:
        stream.truncate(size)
    finding = examine(path)
    assert (finding.level, finding.value.startswith("not readable: ")) == ("bad", True)


@pytest.mark.parametrize("first", [0, 8, 64, 512])
def test_a_file_overwritten_at_the_start(path, first):
    Arena.open(path, 16 * MIB, session="doctor").close()
    with path.open("r+b") as stream:
        stream.seek(first)
        stream.write(b"\xa5" * 4096)
    finding = examine(path)
    assert finding.value
    assert finding.level in ("ok", "warn", "bad")
