"""A real engine with a disk below its memory: restarted with a cold arena, damaged, switched off."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
long = pytest.mark.long

LEAST = 384


def assert_nothing_leaked(result):
    assert result["leaks"] == {"writing_frames": 0, "leases": 0, "orphaned_frames": 0}


@pytest.mark.parametrize(
    ("model", "blocks_per_chunk"),
    [
        pytest.param("llama", 1, id="llama"),
        pytest.param("hybrid", 2, id="hybrid", marks=long),
        pytest.param("mla", 4, id="mla", marks=long),
        pytest.param("hybrid", 1, id="hybrid-1", marks=long),
    ],
)
def test_after_a_restart_with_cold_memory_a_prompt_comes_from_the_disk(
    run, tmp_path, model, blocks_per_chunk
):
    result = run("disk", folder=str(tmp_path), model=model, blocks_per_chunk=blocks_per_chunk)
    assert result["loaded"]["tokens"] == result["again"]["tokens"] == result["cold"]["tokens"]
    assert result["other"]["tokens"] != result["cold"]["tokens"]
    assert result["loaded"]["cached"] >= LEAST
    assert result["hits"] >= LEAST
    assert result["metrics"]["disk_chunks_total/load"] > 0
    assert result["metrics"]["disk_bytes_total/load"] > 0
    assert "load_failures_total/checksum" not in result["metrics"]
    assert_nothing_leaked(result)


@pytest.mark.parametrize(("model", "at"), [("llama", 5), pytest.param("hybrid", 7, marks=long)])
def test_a_damaged_blob_on_the_disk_is_a_miss_and_never_a_wrong_token(run, tmp_path, model, at):
    result = run("disk", folder=str(tmp_path), model=model, flip=at)
    assert result["blobs"] > at
    assert result["loaded"]["tokens"] == result["again"]["tokens"] == result["cold"]["tokens"]
    assert result["metrics"]["disk_failures_total/load/corrupt"] == 1
    # it never reached memory: no load of the engine failed
    assert not any(name.startswith("load_failures_total") for name in result["metrics"])
    assert_nothing_leaked(result)


def test_what_left_memory_comes_back_from_the_disk_in_the_same_engine(run, tmp_path):
    result = run("disk", folder=str(tmp_path), restart=False)
    assert result["written"]["disk_chunks_total/save"] == result["blobs"] > 0
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
    assert result["hits"] >= LEAST
    assert_nothing_leaked(result)


@long
@pytest.mark.parametrize(
    "extra",
    [
        {"disk_io": "aio"},
        {"disk_io": "threads"},
        {"disk_sync": "always"},
        {"disk_sync": "never"},
        {"verify": "off"},
    ],
    ids=lambda extra: "-".join(*extra.items()),
)
def test_every_way_of_doing_it_gives_the_same_tokens(run, tmp_path, extra):
    result = run("disk", folder=str(tmp_path), extra=extra)
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
    assert result["hits"] >= LEAST
    assert_nothing_leaked(result)


@long
def test_who_does_not_wait_computes(run, tmp_path):
    result = run("disk", folder=str(tmp_path), extra={"pending_timeout_ms": 0})
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
    assert result["hits"] == 0
    assert_nothing_leaked(result)


@long
def test_with_the_default_admission_what_came_once_is_not_written(run, tmp_path):
    result = run("disk", folder=str(tmp_path), extra={"disk_admission": "reused"}, restart=False)
    assert "disk_chunks_total/save" not in result["written"]
    assert result["written"]["disk_skipped_saves_total/admission"] == result["blobs"]
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
