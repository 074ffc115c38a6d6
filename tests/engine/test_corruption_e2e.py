"""A real engine on an arena that was damaged, or that belongs to another world: same tokens, no hit.

Engines run in processes of their own (`kvferry.demo.engine`), one after the other on one arena.
"""

import random
import shutil
import tempfile
from pathlib import Path

import pytest

from kvferry.demo.blobs import flip_byte, ready_blobs
from kvferry.demo.checkpoints import CHECKPOINTS, ensure_checkpoint
from kvferry.demo.engine import Engine, EngineSpec
from kvferry.demo.measure import EXTERNAL_HITS, LOAD_FAILURES, LOADED_CHUNKS, VERIFIED_BLOBS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHECKSUM_FAILURES = f'{LOAD_FAILURES}{{reason="checksum"}}'
TOKENS = 600
OUTPUT = 12


@pytest.fixture
def shm():
    """A folder of this test's own on tmpfs (elsewhere if there is none)."""
    tmpfs = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=tmpfs if tmpfs.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def arena(shm):
    return shm / "arena"


@pytest.fixture
def start(arena, tmp_path):
    """Return what starts an engine on the arena; *change* goes into its EngineSpec."""

    def start(name, *, blocks_per_chunk=1, extra=None, **change):
        checkpoint = CHECKPOINTS[name]
        fields = {
            "model": str(ensure_checkpoint(checkpoint)),
            "dtype": checkpoint.dtype,
            "block_size": checkpoint.block_size,
            "max_model_len": 1024,
            "kv_cache_bytes": 128 << 20,
            "kv_transfer_config": {
                "kv_connector": "KVFerryConnector",
                "kv_connector_module_path": "kvferry.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "arena_bytes": "128MiB",
                    "arena_path": str(arena),
                    "blocks_per_chunk": blocks_per_chunk,
                    **(extra or {}),
                },
            },
            **change,
        }
        return Engine(EngineSpec(**fields), tmp_path / f"{name}.log")

    return start


def prompt(seed, tokens=TOKENS):
    source = random.Random(seed)
    return [source.randrange(3, 1024) for _ in range(tokens)]


def ask(engine, *prompts, salt=None):
    """Return the answers after everything they led to is stored."""
    answers = engine.generate(prompts, max_tokens=OUTPUT, cache_salt=salt)
    engine.settle()
    return answers


def loaded_tokens(engine):
    return engine.metrics().get(EXTERNAL_HITS, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mla", "hybrid"])
def test_a_flipped_byte_is_counted_recomputed_and_harmless(start, arena, name):
    questions = [prompt(seed) for seed in range(3)]
    with start(name) as engine:
        cold = ask(engine, *questions)
        assert {answer.cached_tokens for answer in cold} == {0}
    blobs = ready_blobs(arena)
    assert blobs
    with start(name) as engine:
        (clean,) = ask(engine, questions[0])
        assert clean.tokens == cold[0].tokens
        assert clean.cached_tokens > 0
        before = engine.metrics()
        # the last byte, the first, one in the middle: of every blob, so that each chunk is hit
        positions = random.Random(name)
        for blob in blobs:
            flip_byte(arena, blob, positions.choice((0, blob.size // 2, blob.size - 1)))
        engine.reset()
        damaged = ask(engine, *questions)
        after = engine.metrics()
        assert [answer.tokens for answer in damaged] == [answer.tokens for answer in cold]
        assert {answer.finish_reason for answer in damaged} == {"length"}
        assert after[CHECKSUM_FAILURES] > before.get(CHECKSUM_FAILURES, 0)
        assert after[LOADED_CHUNKS] == before[LOADED_CHUNKS]
        # The engine does not store again what it had asked to load: the next request does, and
        # the one after that is served from good blobs.
        for _ in range(2):
            engine.reset()
            repaired = ask(engine, *questions)
            assert [answer.tokens for answer in repaired] == [answer.tokens for answer in cold]
        assert engine.metrics()[LOADED_CHUNKS] > after[LOADED_CHUNKS]
        assert engine.metrics()[CHECKSUM_FAILURES] == after[CHECKSUM_FAILURES]


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_one_bad_blob_between_runs(start, arena, name):
    """Flip one byte of each of the blobs in turn; each costs one failed load, and only its own."""
    question = prompt(1)
    with start(name) as engine:
        (cold,) = ask(engine, question)
    blobs = [blob for blob in ready_blobs(arena) if blob.group == ready_blobs(arena)[0].group]
    victims = [blobs[0], blobs[len(blobs) // 2], blobs[-1]]
    with start(name) as engine:
        for victim in victims:
            before = engine.metrics()
            flip_byte(arena, victim, victim.size // 3)
            engine.reset()
            (answer,) = ask(engine, question)
            after = engine.metrics()
            assert answer.tokens == cold.tokens
            failed = after.get(CHECKSUM_FAILURES, 0) - before.get(CHECKSUM_FAILURES, 0)
            # a sliding-window group loads only the blocks of its last window
            assert failed == 1 or (name == "hybrid" and failed == 0)
            engine.reset()
            (again,) = ask(engine, question)
            assert again.tokens == cold.tokens
            assert engine.metrics().get(CHECKSUM_FAILURES, 0) == after.get(CHECKSUM_FAILURES, 0)
        assert engine.metrics()[CHECKSUM_FAILURES] >= 1


def test_verification_is_what_finds_it(start, arena):
    """With `verify: off` the same damage goes unseen: the check above is not passed by luck."""
    question = prompt(2)
    off = {"verify": "off"}
    with start("llama", extra=off) as engine:
        (cold,) = ask(engine, question)
        for blob in ready_blobs(arena):
            for position in range(2, blob.size, 64):
                flip_byte(arena, blob, position)
        engine.reset()
        (wrong,) = ask(engine, question)
        metrics = engine.metrics()
        assert wrong.cached_tokens > 0
        assert wrong.tokens != cold.tokens
        assert metrics.get(VERIFIED_BLOBS, 0) == 0
        assert metrics.get(LOAD_FAILURES, 0) == 0


@pytest.mark.long
def test_another_world_is_a_miss(start, arena):
    question = prompt(3)
    with start("llama") as engine:
        (cold,) = ask(engine, question)
    worlds = {
        "dtype": ("llama", {"dtype": "bfloat16"}),
        "block size": ("llama", {"block_size": 64}),
        "blocks per chunk": ("llama", {"blocks_per_chunk": 2}),
        "model": ("hybrid", {}),
    }
    for difference, (name, change) in worlds.items():
        with start(name, **change) as engine:
            (answer,) = ask(engine, question)
            assert answer.cached_tokens == 0, difference
            assert loaded_tokens(engine) == 0, difference
    # all of them have stored the same prompt by now; the first world still finds its own
    with start("llama") as engine:
        (answer,) = ask(engine, question)
        assert answer.tokens == cold.tokens
        assert loaded_tokens(engine) == TOKENS // 32 * 32


@pytest.mark.long
def test_two_salts_share_nothing(start):
    question = prompt(4)
    with start("llama") as engine:
        tokens = set()
        for salt in ("one", "two", None):
            (answer,) = ask(engine, question, salt=salt)
            assert answer.cached_tokens == 0
            tokens.add(answer.tokens)
            engine.reset()
        assert loaded_tokens(engine) == 0
        for number, salt in enumerate(("one", "two", None), start=1):
            (answer,) = ask(engine, question, salt=salt)
            tokens.add(answer.tokens)
            engine.reset()
            assert loaded_tokens(engine) == number * (TOKENS // 32 * 32)
        assert len(tokens) == 1
