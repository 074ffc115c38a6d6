"""The device check on a machine without a device: it lists, rehearses everything, and notices wrong bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from perf import device_check
from perf.device import copy_engine, predictions
from perf.device.rehearsal import rehearse
from perf.device.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, **environment):
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": paths, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def dry_run():
    pytest.importorskip("triton", reason="the kernels are rehearsed in Triton's interpreter")
    return python("-W", "error", "-m", "perf.device_check", "--dry-run")


def test_launches_bind_and_compile_for_a_device(tmp_path):
    pytest.importorskip("triton", reason="it compiles the kernels")
    made = python(
        "tests/perf/compile_launches.py",
        "price",
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert made.returncode == 0, made.stdout + made.stderr
    compiled = {line.split()[0]: int(line.split()[1]) for line in made.stdout.splitlines()}
    assert set(compiled) == {
        "_copy_blocks_kernel", "_move_heads_kernel", "_gather_quantized_kernel", "_scatter_dequantized_kernel",
    }  # fmt: skip
    # plain and with a checksum, there and back
    assert compiled["_copy_blocks_kernel"] >= 4


def test_a_dry_run_rehearses_every_section(dry_run):
    assert dry_run.returncode == 0, dry_run.stdout[-4000:] + dry_run.stderr[-4000:]
    for section in SECTIONS:
        part = dry_run.stdout.split(f"== {section.name}: ")[1].split("\n== ")[0]
        assert ", 0 wrong" in part
        assert "rehearsed on the CPU: 0 cases" not in part
    assert dry_run.stdout.endswith("0 wrong; nothing was timed\n")


def test_a_dry_run_prints_what_a_device_would_move(dry_run):
    line = next(
        x
        for x in dry_run.stdout.splitlines()
        if x.strip().startswith("d2h 64 KiB, 16 KiB a program")
    )
    assert f"{64 << 20} bytes" in line
    assert "32 blocks x 32 segments x 65536 B" in line


def test_a_dry_run_compares_every_move_of_blocks_and_rows(dry_run):
    correct = dry_run.stdout.split("== correctness")[1].split("\n== ")[0].split("cases, 85 s")[1]
    for what in (
        "gather_blocks, host", "scatter_blocks, host", "scatter_blocks, one bit flipped", "gather_slots, host",
        "scatter_slots, host", "gather_heads, one head, host", "scatter_heads, all, host",
        "gather_quantized, host", "scatter_dequantized, host", "batch, d2h", "loop, h2d",
    ):  # fmt: skip
        assert any(what in x and x.rstrip().endswith("yes") for x in correct.splitlines()), what


def test_wrong_bytes_fail_a_rehearsal(monkeypatch, capsys):
    right = copy_engine.HostDriver.copy_batch

    def shorter(self, destinations, sources, sizes, count, attributes, stream):
        right(self, destinations, sources, sizes, count - 1, attributes, stream)

    monkeypatch.setattr(copy_engine.HostDriver, "copy_batch", shorter)
    assert rehearse([section for section in SECTIONS if section.name == "copy_engine"]) == 1
    assert "4 wrong" in capsys.readouterr().out


def test_sections_fit_the_budget():
    assert sum(section.seconds for section in SECTIONS) <= device_check.BUDGET_S
    assert device_check.BUDGET_S <= 7 * 60


def test_an_unknown_section_is_named(capsys):
    assert device_check.main(["--only", "link,nothing"]) == 2
    assert "got nothing" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["nan", "inf", "0", "-1"])
def test_a_budget_is_a_number_of_seconds(budget, capsys):
    assert device_check.main(["--list", "--budget-s", budget]) == 2
    assert "--budget-s must be a positive number; got" in capsys.readouterr().err


def test_a_run_needs_a_folder(capsys):
    assert device_check.main([]) == 2
    assert "--out must name a folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_a_run_needs_a_device(tmp_path, capsys):
    assert device_check.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_predictions_are_the_committed_ones():
    committed = (ROOT / "perf" / "results" / "predictions.md").read_text()
    assert committed == predictions.markdown(), "put the output of perf.device.predictions there"
