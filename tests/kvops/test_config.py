"""Settings: sources, ranges, and one clear sentence for everything that cannot be."""

import dataclasses
import logging
import pickle

import pytest

from kvferry.kvops import trace
from kvferry.kvops.config import (
    ENV_PREFIX,
    GIB,
    MIB,
    OTHER_VARIABLES,
    VLLM_KEYS,
    Config,
    markdown_table,
    unknown_variables,
)
from kvferry.kvops.errors import ConfigError, KVFerryError

NAMES = [row.name for row in Config().explain()]


def variable(name):
    return ENV_PREFIX + name.upper()


def test_defaults():
    config = Config.read({}, {})
    assert config == Config()
    assert config.arena_bytes == 4 * GIB
    assert config.arena_path is None
    assert (config.verify, config.eviction) == ("always", "lru")
    assert config.max_inflight_bytes == GIB
    assert config.transfer_threads == 1
    assert config.on_load_failure == "recompute"
    assert config.pending_timeout_ms == 2000
    assert {row.source for row in config.explain()} == {"default"}


GOOD = [
    ("arena_bytes", "8GiB", 8 * GIB),
    ("arena_bytes", "16MiB", 16 * MIB),
    ("arena_bytes", 1 << 30, 1 << 30),
    ("arena_path", "/dev/shm/kvferry.arena", "/dev/shm/kvferry.arena"),
    ("verify", "sampled", "sampled"),
    ("verify", "off", "off"),
    ("eviction", "lru", "lru"),
    ("max_inflight_bytes", "64 MiB", 64 * MIB),
    ("transfer_threads", 64, 64),
    ("on_load_failure", "fail", "fail"),
    ("pending_timeout_ms", 0, 0),
    ("pending_timeout_ms", 600_000, 600_000),
    ("disk_path", "/mnt/kv", "/mnt/kv"),
    ("disk_path", "/mnt/kv/", "/mnt/kv/"),
    ("disk_bytes", "2TiB", 2 << 40),
    ("disk_bytes", "64MiB", 64 * MIB),
    ("disk_free_floor_bytes", "1MiB", MIB),
    ("disk_write", "pressure", "pressure"),
    ("disk_admission", "all", "all"),
    ("disk_sync", "never", "never"),
    ("disk_io", "aio", "aio"),
    ("disk_timeout_ms", 10, 10),
    ("disk_timeout_ms", 600_000, 600_000),
]


@pytest.mark.parametrize(("name", "given", "value"), GOOD)
def test_accepts(name, given, value):
    from_extra = Config.read({name: given}, {})
    from_environ = Config.read({}, {variable(name): str(given)})
    assert getattr(from_extra, name) == getattr(from_environ, name) == value
    assert from_extra.sources[name] == "extra config"
    assert from_environ.sources[name] == variable(name)


WRONG = [
    # every key x wrong type, wrong unit, outside its range
    *[("arena_bytes", v) for v in (True, None, 1.5e9, [], {}, "", "lots", "8 Gb", "8G", "-1GiB")],
    *[("arena_bytes", v) for v in (0, -1, "0", 16 * MIB - 1, "15.9MiB", "65TiB", float("nan"))],
    *[("max_inflight_bytes", v) for v in (False, None, 2.0, "1 furlong", "4095", 0, -5, "nan")],
    *[
        ("arena_path", v)
        for v in (1, True, [], "", "relative/file", "~/file", "/dev/shm/", "/a\0b")
    ],
    *[("verify", v) for v in (True, False, None, 1, "", "Always", "sometimes", ["always"])],
    *[("eviction", v) for v in (None, 0, "", "fifo", "LRU")],
    *[("transfer_threads", v) for v in (True, None, 1.0, "4", "yes", "", 0, -1, 65, [], "0x1")],
    *[("on_load_failure", v) for v in (None, True, "ignore", "", "Fail")],
    *[("pending_timeout_ms", v) for v in (True, None, 0.5, "2000", "2s", -1, 600_001)],
    *[("disk_path", v) for v in (1, True, [], "", "relative", "~/kv", "/a\0b")],
    *[("disk_bytes", v) for v in (True, None, 1e12, "1T", 0, -1, 64 * MIB - 1, "1025TiB")],
    *[("disk_free_floor_bytes", v) for v in (True, None, 0, "0", "1", 1.5, "a little")],
    *[("disk_write", v) for v in (True, None, 0, "", "evict", "Commit")],
    *[("disk_admission", v) for v in (True, None, 2, "", "second", "ALL")],
    *[("disk_sync", v) for v in (True, False, None, 1, "", "sometimes")],
    *[("disk_io", v) for v in (True, None, 1, "", "io_uring", "AIO")],
    *[("disk_timeout_ms", v) for v in (True, None, 0.5, "5s", 9, 0, -1, 600_001)],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}-{v!r}" for n, v in WRONG])
def test_refuses_from_extra_config(name, value):
    with pytest.raises(ConfigError) as caught:
        Config.read({name: value}, {})
    message = str(caught.value)
    accepts = {row.name: row.accepts for row in Config().explain()}[name]
    assert message.startswith(f"{name} must be ")
    assert "; got " in message
    assert message.endswith("(from extra config)")
    assert "\n" not in message
    if accepts.startswith("a whole number"):
        assert accepts in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("arena_bytes", t) for t in ("lots", "yes", "8Gb", "1.5", "-1GiB", "0", "1MiB", "nan")],
        ("arena_path", "relative"),
        ("verify", "yes"),
        ("eviction", "mru"),
        *[("max_inflight_bytes", t) for t in ("no", "-1", "1")],
        *[("transfer_threads", t) for t in ("yes", "1.0", "0", "65", "1 thread", "nan", "9" * 99)],
        ("on_load_failure", "retry"),
        *[("pending_timeout_ms", t) for t in ("2s", "-1", "1e3", "600001", "true")],
        ("disk_path", "here"),
        *[("disk_bytes", t) for t in ("all", "-1", "1", "1Tb")],
        ("disk_free_floor_bytes", "none"),
        *[(f"disk_{name}", "yes") for name in ("write", "admission", "sync", "io", "timeout_ms")],
    ],
)
def test_refuses_from_environment(name, text):
    with pytest.raises(ConfigError) as caught:
        Config.read({}, {variable(name): text})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert message.endswith(f"(from the environment variable {variable(name)})")


def test_every_key_is_in_the_tables_above():
    assert {name for name, _ in WRONG} == {name for name, *_ in GOOD} == set(NAMES)


def test_extra_config_beats_environment_beats_default():
    environ = {"KVFERRY_VERIFY": "off", "KVFERRY_TRANSFER_THREADS": "3"}
    config = Config.read({"verify": "sampled"}, environ)
    assert (config.verify, config.transfer_threads) == ("sampled", 3)
    sources = {row.name: row.source for row in config.explain()}
    assert sources["verify"] == "extra config"
    assert sources["transfer_threads"] == "KVFERRY_TRANSFER_THREADS"
    assert sources["arena_bytes"] == "default"


def test_null_in_extra_config_takes_a_path_back():
    config = Config.read({"arena_path": None}, {"KVFERRY_ARENA_PATH": "/dev/shm/x"})
    assert config.arena_path is None
    assert config.sources["arena_path"] == "extra config"


def test_an_empty_variable_is_not_set():
    assert Config.read({}, {"KVFERRY_ARENA_BYTES": ""}) == Config()


def test_reads_this_process_environment(monkeypatch):
    monkeypatch.setenv("KVFERRY_TRANSFER_THREADS", "7")
    assert Config.read().transfer_threads == 7


@pytest.mark.parametrize("key", sorted(VLLM_KEYS))
def test_keys_of_vllm_pass_untouched(key):
    assert Config.read({key: object()}, {}) == Config()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("arena_byte", "arena_bytes"),
        ("arena-bytes", "arena_bytes"),
        ("ARENA_BYTES", "arena_bytes"),
        ("verfiy", "verify"),
        ("blocks_per_chunks", "blocks_per_chunk"),
        ("cpu_bytes_to_use", "arena_bytes"),
        ("eviction_policy", "eviction"),
        ("pending_timeout_s", "pending_timeout_ms"),
    ],
)
def test_unknown_key_suggests_the_nearest(key, near):
    with pytest.raises(ConfigError) as caught:
        Config.read({key: 1}, {})
    assert f"unknown key {key!r}" in str(caught.value)
    assert f"did you mean {near!r}?" in str(caught.value)


def test_unknown_key_with_nothing_near_lists_all():
    with pytest.raises(ConfigError) as caught:
        Config.read({"zzz": 1}, {})
    for name in [*NAMES, *VLLM_KEYS]:
        assert name in str(caught.value)


@pytest.mark.parametrize("extra", ["text", ["arena_bytes"], 3, {1: 2}])
def test_extra_config_must_be_an_object(extra):
    with pytest.raises(ConfigError, match="kv_connector_extra_config"):
        Config.read(extra, {})


def test_a_misspelt_variable_is_said_and_others_are_left_alone(caplog):
    environ = {"KVFERRY_ARENA_BYTE": "8GiB", "KVFERRY_SOMETHING": "1", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING):
        assert Config.read({}, environ) == Config()
    assert caplog.messages == [
        "KVFERRY_ARENA_BYTE is not a setting; did you mean KVFERRY_ARENA_BYTES?"
    ]
    assert unknown_variables(environ) == {
        "KVFERRY_ARENA_BYTE": "KVFERRY_ARENA_BYTES",
        "KVFERRY_SOMETHING": None,
    }


def test_variables_that_are_no_settings_are_known_too(caplog):
    with caplog.at_level(logging.WARNING):
        assert Config.read({}, dict.fromkeys(OTHER_VARIABLES, "/tmp/run.json")) == Config()
    assert caplog.messages == []
    assert unknown_variables(dict.fromkeys(OTHER_VARIABLES, "1")) == {}
    assert unknown_variables({"KVFERRY_TRACES": "1"}) == {"KVFERRY_TRACES": trace.VARIABLE}
    assert trace.VARIABLE in OTHER_VARIABLES


def test_inflight_bytes_are_capped_at_half_of_the_arena():
    config = Config.read({"arena_bytes": "64MiB", "max_inflight_bytes": "1GiB"}, {})
    assert config.max_inflight_bytes == 32 * MIB
    capped = "extra config, capped at half of arena_bytes"
    assert config.sources["max_inflight_bytes"] == capped
    again = dataclasses.replace(config, arena_bytes=16 * MIB)
    assert again.max_inflight_bytes == 8 * MIB
    assert again.sources["max_inflight_bytes"] == capped


def test_yaml_off_gets_a_hint():
    with pytest.raises(ConfigError, match="with quotes"):
        Config.read({"verify": False}, {})


def test_constructor_checks_too():
    assert Config(arena_bytes="1GiB").arena_bytes == GIB
    with pytest.raises(ConfigError, match=r"verify must be .*; got 'maybe' \(from argument\)"):
        Config(verify="maybe")


def test_config_error_is_a_value_error_and_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, KVFerryError)


def test_frozen_hashable_and_travels_to_other_processes():
    config = Config.read({"arena_bytes": "64MiB"}, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.verify = "off"
    assert hash(config) == hash(Config(arena_bytes=64 * MIB))
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.sources == config.sources


def test_explain_and_table_say_everything_about_every_setting():
    rows = Config.read({"arena_bytes": "8GiB"}, {}).explain()
    assert rows[0][:4] == ("arena_bytes", "8 GiB", "extra config", "bytes")
    table = markdown_table()
    for row in rows:
        assert row.help.endswith(".")
        assert row.accepts
        assert row.variable == variable(row.name)
        assert f"| `{row.name}` | {row.default} |" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1
