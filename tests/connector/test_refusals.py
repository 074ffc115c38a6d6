"""What a real engine says to a configuration or an arena that it can't use: one sentence, and nothing is lost."""

import os
import struct
import tempfile
from pathlib import Path

import pytest

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.store import Store

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
long = pytest.mark.long

ARENA_BYTES = 64 << 20
KEY, NAMESPACE, BLOB = b"k" * 36, b"somebody-else-16", b"b" * 4096


@pytest.fixture
def shm():
    """A folder of this test's own on tmpfs (elsewhere if there is none)."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        yield Path(folder)


def fill(path, arena_bytes=ARENA_BYTES):
    """Leave an arena with one blob at *path*."""
    with Arena.open(path, arena_bytes, session="before", populate=False) as arena:
        store = Store.open(arena, namespace=NAMESPACE)
        assert store.put([KEY], [BLOB]) == [True]


def holds_the_blob(path, arena_bytes=ARENA_BYTES):
    out = bytearray(len(BLOB))
    with Arena.open(path, arena_bytes, session="after", populate=False) as arena:
        return Store.open(arena, namespace=NAMESPACE).get([KEY], [out]) == [True] and out == BLOB


def assert_refused(result, kind, *says):
    assert result["type"] == kind, result
    for part in says:
        assert part in result["message"]
    assert "\n" not in result["message"]
    assert result["cause"] == "None"


PLAIN = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_module_path": None,
    "kv_connector_extra_config": {"spec_name": "KVFerrySpec", "spec_module_path": "kvferry.vllm"},
}


@pytest.mark.parametrize(
    ("extra", "transfer", "kind", "says"),
    [
        pytest.param(
            {"arena_byte": "1GiB"},
            None,
            "ConfigError",
            "did you mean 'arena_bytes'",
            id="unknown-key",
        ),
        pytest.param(
            {"arena_bytes": "1 parsec"}, None, "ConfigError", "arena_bytes must be", id="unit"
        ),
        pytest.param(
            {"canonical_layout": True},
            None,
            "ConfigError",
            "canonical_layout must be false",
            id="canonical",
        ),
        pytest.param(
            {"spec_name": "CPUOffloadingSpec"},
            None,
            "ConfigError",
            "spec_name must be left out",
            id="spec",
        ),
        pytest.param(
            {"arena_bytes": "64TiB"}, None, "ArenaSpaceError", "arena_bytes must fit", id="no-room"
        ),
        pytest.param(
            {"arena_path": "/proc/no/such"}, None, "ArenaSpaceError", "/proc/no/such", id="no-place"
        ),
        pytest.param({}, PLAIN, "UnsupportedEngineError", "KVFerryConnector", id="plain-connector"),
    ],
)
def test_what_cannot_be_served_is_refused_with_one_sentence(run, extra, transfer, kind, says):
    result = run("refused", extra=extra, transfer=transfer)
    assert_refused(result, kind, says)


def test_an_arena_that_a_live_process_owns_is_refused_and_goes_on(run, shm):
    path = shm / "live.arena"
    with Arena.open(path, ARENA_BYTES, session="live", populate=False) as arena:
        store = Store.open(arena, namespace=NAMESPACE)
        assert store.put([KEY], [BLOB]) == [True]
        result = run("refused", extra={"arena_path": str(path)})
        assert_refused(result, "ArenaBusyError", f"pid {os.getpid()}", "arena_path")
        out = bytearray(len(BLOB))
        assert store.get([KEY], [out]) == [True]
        assert out == BLOB
        assert arena.workers_alive() == 0


def test_an_arena_of_another_version_is_refused_and_kept(run, shm):
    path = shm / "old.arena"
    fill(path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", fmt.FORMAT_VERSION + 1))
    before = path.read_bytes()
    result = run("refused", extra={"arena_path": str(path)})
    assert_refused(
        result, "ArenaMismatchError", f"format version {fmt.FORMAT_VERSION + 1}", str(path)
    )
    assert path.read_bytes() == before


@long
def test_an_arena_of_another_size_is_refused_and_kept(run, shm):
    path = shm / "small.arena"
    fill(path, ARENA_BYTES // 2)
    result = run("refused", extra={"arena_path": str(path)})
    assert_refused(
        result, "ArenaMismatchError", f"arena_bytes must be {ARENA_BYTES // 2}", str(path)
    )
    assert holds_the_blob(path, ARENA_BYTES // 2)


@long
def test_a_file_that_is_no_arena_is_refused_and_kept(run, shm):
    path = shm / "letter.txt"
    path.write_text("Dear reader, this is not an arena.")
    path.chmod(0o600)
    result = run("refused", extra={"arena_path": str(path)})
    assert_refused(result, "ArenaMismatchError", "must be a kvferry arena", str(path))
    assert path.read_text() == "Dear reader, this is not an arena."


def test_a_full_tmpfs_is_refused_and_nothing_is_left_on_it(run, shm):
    result = run("refused_on_a_full_tmpfs", folder=str(shm))
    if "skip" in result:
        pytest.skip(f"a tmpfs can't be mounted here: {result['skip']}")
    assert_refused(result, "ArenaSpaceError", "arena_bytes must fit")
    assert result["left"] == []
