"""A real engine with the connector: cold, from the store, after damage, after a restart. Each case in its own process."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
long = pytest.mark.long


def assert_nothing_leaked(result):
    assert result["leaks"] == {"writing_frames": 0, "leases": 0, "orphaned_frames": 0}


# 400 of 400 tokens: a whole prompt may be loaded, the engine computes its last token again
LEAST = 384
ROUNDTRIPS = [
    pytest.param(
        model, blocks, id=f"{model}-{blocks}",
        marks=() if (model, blocks) in (("llama", 1), ("mla", 2), ("hybrid", 4)) else long,
    )
    for model in ("llama", "mla", "hybrid")
    for blocks in (1, 2, 4)
]  # fmt: skip


@pytest.mark.parametrize(("model", "blocks_per_chunk"), ROUNDTRIPS)
def test_what_was_computed_once_is_loaded_with_the_same_tokens(run, model, blocks_per_chunk):
    result = run("roundtrip", model=model, blocks_per_chunk=blocks_per_chunk)
    tokens = result["cold"]["tokens"]
    assert result["different"]["tokens"] != tokens
    assert result["loaded"]["tokens"] == result["computed"]["tokens"] == tokens
    assert result["loaded"]["cached"] >= LEAST
    assert result["hits"] >= LEAST
    assert result["computed"]["cached"] == 0
    assert result["again"]["tokens"] == result["longer"]["tokens"]
    assert result["again"]["cached"] >= LEAST
    assert result["metrics"]["verified_blobs_total"] > 0
    assert "load_failures_total/checksum" not in result["metrics"]
    assert_nothing_leaked(result)


@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="NOT TESTED HERE: vLLM's fp8 KV cache on a CPU needs AVX-512, which this machine lacks",
)
def test_an_fp8_cache_is_loaded_with_the_same_tokens(run):
    result = run("roundtrip", model="llama", kv_cache_dtype="fp8", dtype="bfloat16")
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
    assert result["loaded"]["cached"] >= LEAST
    assert_nothing_leaked(result)


@pytest.mark.parametrize(
    ("model", "group", "chunk", "blocks_per_chunk"),
    [
        pytest.param("llama", 0, 0, 1, id="first", marks=long),
        pytest.param("llama", 0, 5, 1, id="middle"),
        pytest.param("llama", 0, 2, 4, id="last-of-4-blocks", marks=long),
        pytest.param("mla", 0, 3, 2, id="mla", marks=long),
        pytest.param("hybrid", 0, 0, 1, id="hybrid-window", marks=long),
        pytest.param("hybrid", 2, 1, 2, id="hybrid-full"),
    ],
)
def test_a_corrupt_chunk_is_found_once_and_computed_again(
    run, model, group, chunk, blocks_per_chunk
):
    result = run(
        "corrupt", model=model, group=group, chunk=chunk, blocks_per_chunk=blocks_per_chunk
    )
    for later in ("loaded", "again", "third"):
        assert result[later]["tokens"] == result["cold"]["tokens"], later
    assert result["metrics"]["load_failures_total/checksum"] == 1
    assert result["metrics"]["bad_frames_total"] == 1
    assert not {
        name
        for name in result["metrics"]
        if name.startswith("load_failures") and "checksum" not in name
    }
    assert result["third"]["cached"] >= 384, "the chunk was not stored again"
    assert_nothing_leaked(result)


@pytest.mark.parametrize("model", ["llama", pytest.param("hybrid", marks=long)])
def test_a_failed_load_ends_the_request_where_that_is_asked_for(run, model):
    result = run("corrupt", model=model, group=0, chunk=0, policy="fail")
    assert result["loaded"]["finish"] == "error"
    assert result["again"]["tokens"] == result["cold"]["tokens"]
    assert_nothing_leaked(result)


def test_a_hundred_random_flips_never_change_a_token(run):
    result = run("flips")
    assert result["same"] == 100
    assert result["metrics"]["load_failures_total/checksum"] > 50
    assert_nothing_leaked(result)


def test_two_cache_salts_share_nothing(run):
    result = run("salts")
    assert result["two"]["cached"] == 0
    assert result["back"]["cached"] >= 256
    assert result["one"]["tokens"] == result["two"]["tokens"] == result["back"]["tokens"]


def test_an_arena_with_a_path_serves_the_next_engine_of_the_same_kind_only(run, tmp_path):
    first, second, other_dtype, other_chunks = run("restart", path=str(tmp_path / "arena"))
    assert second["tokens"] == first["tokens"]
    assert second["cached"] >= 256
    assert other_dtype["cached"] == 0
    assert other_chunks["cached"] == 0
    assert other_chunks["tokens"] == first["tokens"]


def test_preempted_requests_get_the_same_tokens(run):
    result = run("preempted")
    assert result["preemptions"] > 0
    assert result["hits"] > 0
    assert result["first"] == result["expected"]
    assert result["second"] == result["expected"]
    assert_nothing_leaked(result)


@pytest.mark.parametrize("model", ["hybrid", pytest.param("llama", marks=long)])
def test_resets_while_requests_run_leave_no_wrong_block_behind(run, model):
    """vLLM offers the blocks of running requests anew then, those that a window left to others included."""
    result = run("resets", model=model)
    assert result["wrong"] == 0
    assert result["compared"] >= 100
    assert result["resets"] > 3
    assert result["hits"] > 0
    assert_nothing_leaked(result)


def test_under_the_multi_connector_statistics_work_too(run):
    result = run("multi")
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
    assert result["hits"] >= 256


def test_it_is_known_by_its_name_alone(run):
    result = run("by_name")
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
    assert result["loaded"]["cached"] >= 256


@long
def test_two_ranks_each_keep_their_part_and_one_bad_part_spoils_the_chunk(run_alone):
    result = run_alone("ranks")
    assert result["loaded"]["tokens"] == result["corrupted"]["tokens"] == result["cold"]["tokens"]
    assert result["other"]["tokens"] != result["cold"]["tokens"]
    assert result["loaded"]["cached"] == 384
    assert result["metrics"]["load_failures_total/checksum"] == 1
    assert result["metrics"]["bad_frames_total"] == 1
    assert_nothing_leaked(result)


def test_a_model_with_recurrent_state_starts_with_the_tier_off(run):
    result = run("recurrent")
    assert result["connector"] == "IdleConnector"
    assert result["first"] == result["second"]
