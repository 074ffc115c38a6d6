"""What the spec does around the arena, without an engine."""

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvferry.connector.spec import KVFerrySpec
from kvferry.kvops.config import Config
from kvferry.kvops.store import memory
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.private_arena import private_arena_path

pytestmark = pytest.mark.vllm


def bare_spec(engine_id, **settings):
    spec = object.__new__(KVFerrySpec)
    spec._settings = Config(arena_bytes="16MiB", **settings)
    spec.config = SimpleNamespace(engine_id=engine_id)
    return spec


def test_an_engine_removes_the_private_arenas_of_those_that_did_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "private_directory", lambda: tmp_path)
    left, used = private_arena_path("gave up"), private_arena_path("starting")
    Arena.open(left, 16 << 20, session="gave up").close()
    with Arena.open(used, 16 << 20, session="starting"):
        kept = bare_spec("kept", arena_path=os.fspath(tmp_path / "kept"))._open_arena()
        assert left.exists()
        mine = bare_spec("mine")._open_arena()
        assert not left.exists()
        assert used.exists()
        assert mine.path is not None
        # whoever comes second attaches to it and does not take it for a leftover
        second = bare_spec("mine")._open_arena()
        assert os.path.samestat(os.fstat(second._fd), os.stat(mine.path))
        for arena in (kept, mine, second):
            arena.close()
