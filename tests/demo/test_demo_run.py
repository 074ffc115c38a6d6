"""The demo for real: two engine processes, one arena."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_demo_of_a_llama(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", "demo", "--model", "llama", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (model,) = found["models"]
    assert found["ok"]
    assert model["identical"]
    assert model["phases"]["own"]["own_hits"] > 0
    for name in ("kvferry", "new_process"):
        # every full block of each prompt: 31 of 32 tokens, in 4 prompts
        assert model["phases"][name]["external_hits"] == 4 * 31 * 32
    assert model["stored_chunks"] >= 4 * 31
    assert model["loaded_chunks"] >= 2 * 4 * 31
    assert model["verified_blobs"] >= model["loaded_chunks"]
    assert model["first_token_changes"] > 0.5
    assert model["swap_changes"] is True
