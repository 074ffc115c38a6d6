"""The scripts that kill and stress a real engine, for a few rounds; by hand they run for as long as one likes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]


def last_line(script, *arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.returncode


def test_an_engine_killed_while_it_stores_leaves_nothing_half_written():
    report, status = last_line("kill_engine.py", "--runs", "3")
    assert report["bad"] == 0
    assert report["while_writing"] >= 2
    assert status == 0


@pytest.mark.parametrize("gpu_blocks", ["160", "40"], ids=["roomy", "preempting"])
def test_many_requests_with_aborts_get_the_same_tokens_and_leak_nothing(gpu_blocks):
    report, status = last_line("stress_engine.py", "--requests", "120", "--gpu-blocks", gpu_blocks)
    assert report["different"] == []
    assert report["leaks"] == {}
    assert status == 0
