import argparse
import json

import pytest

from kvferry.demo import command, measure, report
from kvferry.demo.measure import ModelResult, Phase

from .fake_engine import starter


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    """The fake engine keeps its prompts in a set: there is no arena file, no checkpoint."""
    monkeypatch.setattr(measure, "ready_blobs", lambda arena: [])
    monkeypatch.setattr(measure, "swapped_blobs_change", lambda *_: True)
    monkeypatch.setattr(command, "ensure_checkpoint", lambda checkpoint: tmp_path)
    monkeypatch.setattr(command.tempfile, "mkdtemp", folder_maker(tmp_path))


def folder_maker(root):
    count = iter(range(100))

    def make(prefix, dir=None):
        folder = root / f"{prefix}{next(count)}"
        folder.mkdir()
        return str(folder)

    return make


def run(capsys, *words, fault=""):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args(words), starter(fault))
    return code, capsys.readouterr()


def test_all_models_pass(capsys, tmp_path):
    code, printed = run(capsys, "--json")
    found = json.loads(printed.out)
    assert code == 0
    assert found["ok"]
    assert [model["name"] for model in found["models"]] == ["llama", "mla", "hybrid", "slow"]
    for model in found["models"]:
        assert model["identical"]
        assert model["own_cache_used"]
        assert model["failures"] == []
        assert model["phases"]["cold"]["external_hits"] == 0
        assert model["phases"]["new_process"]["external_hits"] > 0
        assert model["loaded_chunks"] == model["verified_blobs"] > 0
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_stderr(capsys):
    _, printed = run(capsys, "--model", "llama")
    assert "cold: 4 x 1000 prompt tokens" in printed.err
    assert "cold: 4" not in printed.out


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("wrong tokens", "from kvferry: 4 of 4 answers differ"),
        ("nothing loaded", "kvferry says that nothing was loaded"),
        ("failed load", "loads failed"),
        ("deaf", "another first prompt token changed only 0%"),
        ("crash", "the engine ended at generate with exit code -9"),
    ],
)
def test_a_fault_is_said_and_exits_with_1(capsys, tmp_path, fault, sentence):
    code, printed = run(capsys, "--model", "llama", fault=fault)
    assert code == 1
    assert sentence in printed.out
    assert "FAILED: llama" in printed.out
    # what the engine printed is kept, the arena is not
    assert len(list(tmp_path.iterdir())) == 1


def test_an_engine_without_its_own_cache_says_so(capsys):
    code, printed = run(capsys, "--model", "mla", fault="no own cache")
    assert code == 0
    row = next(line for line in printed.out.splitlines() if line.startswith("DeepSeek"))
    assert " off " in row
    assert "switches its own prefix cache off" in printed.out


def test_keep_leaves_arena_and_logs(capsys, tmp_path):
    _, printed = run(capsys, "--model", "llama", "--keep")
    assert len(list(tmp_path.iterdir())) == 2
    assert "arena: " in printed.err
    assert "logs: " in printed.err


def test_the_seed_makes_the_prompts(capsys):
    answers = []
    for seed in ("7", "7", "8"):
        _, printed = run(capsys, "--model", "llama", "--json", "--seed", seed)
        answers.append(json.loads(printed.out)["models"][0]["phases"]["cold"]["answers"])
    assert answers[0] == answers[1] != answers[2]


def phase(ttft_s, answers=((1, 2),), own=0, external=0):
    return Phase(ttft_s, 0.004, own + external, external, own, answers)


def test_the_table():
    result = ModelResult("llama", "Llama (GQA)", 1, 1000, stored_chunks=31, loaded_chunks=62)
    result.phases = {
        "cold": phase(2.5),
        "own": phase(0.02, own=992),
        "kvferry": phase(0.025, external=992),
        "new_process": phase(0.026, answers=((1, 3),), external=992),
    }
    result.load_gbps = 3.21
    header, row = report.as_text([result]).splitlines()[:2]
    assert " ".join(header.split()) == (
        "model tokens cold own cache kvferry new process identical stored loaded"
        " store GB/s load GB/s verified"
    )
    assert " ".join(row.split()) == (
        "Llama (GQA) 1000 2.50 s 20.0 ms 25.0 ms 26.0 ms NO 31 62 - 3.2 0"
    )


def test_the_table_of_an_engine_that_never_started():
    result = ModelResult("llama", "Llama (GQA)", 4, 1000, failures=["start took longer than 1 s"])
    text = report.as_text([result])
    assert "Llama (GQA): FAILED: start took longer than 1 s" in text
    assert text.endswith("FAILED: llama\n")
