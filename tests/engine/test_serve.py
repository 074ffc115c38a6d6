"""The README's serve command, with a server that answers HTTP: twice the same prompt, and the second one is loaded."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvferry.demo.checkpoints import CHECKPOINTS, ensure_checkpoint

ROOT = Path(__file__).resolve().parents[2]
START_S = 240
ANSWER_S = 60

pytestmark = pytest.mark.vllm


def readme_blocks():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (serve,) = [block for block in blocks if "--kv-transfer-config" in block]
    (ask,) = [block for block in blocks if "/v1/completions" in block]
    return shlex.split(serve), ask.splitlines()


def serve_command(model, port):
    words, _ = readme_blocks()
    assert words[:3] == ["vllm", "serve", "MODEL"]
    # what the README says for the CPU build, whose command line tool does not start
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    tiny = [
        "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--block-size", "32",
        "--max-model-len", "2048", "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "MODEL",
    ]  # fmt: skip
    return [*start, *words[3:], *tiny]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, command, log, port):
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        environment = {
            **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def ask(self, path, payload=None, method=None, timeout=ANSWER_S):
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(
            self.url + path, data=body, method=method, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read().decode()

    def wait_until_ready(self):
        deadline = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("the server did not start:\n" + self.tail())
            try:
                self.ask("/health", timeout=2)
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return

    def tail(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def metric(self, name):
        values = re.findall(
            rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.ask("/metrics"), re.MULTILINE
        )
        return sum(float(value) for value in values)

    def metric_reaches(self, name, least):
        deadline = time.monotonic() + ANSWER_S
        while self.metric(name) < least:
            if time.monotonic() > deadline:
                pytest.fail(
                    f"{name} stays at {self.metric(name)}, expected {least}:\n{self.tail()}"
                )
            time.sleep(0.1)

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("uvicorn", reason="the API server's packages are not installed")
    model = ensure_checkpoint(CHECKPOINTS["llama"])
    port = free_port()
    command = serve_command(model, port)
    at = command.index("--kv-transfer-config") + 1
    transfer = json.loads(command[at])
    # the README's arena is sized for a real model
    assert transfer["kv_connector_extra_config"] == {"arena_bytes": "8GiB"}
    transfer["kv_connector_extra_config"] = {"arena_bytes": "256MiB"}
    command[at] = json.dumps(transfer)
    server = Server(command, tmp_path_factory.mktemp("server") / "server.log", port)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_a_prompt_that_comes_back_is_loaded_and_the_metrics_say_so(server):
    payload = {
        "model": "MODEL",
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    # a tiny model has no tokenizer: the prompt is token ids
    payload["prompt"] = [3 + (7 * number) % 1000 for number in range(1000)]

    def answer():
        (choice,) = json.loads(server.ask("/v1/completions", payload))["choices"]
        return choice["token_ids"]

    first = answer()
    server.metric_reaches("kvferry:stored_chunks_total", 31)
    server.ask("/reset_prefix_cache", method="POST")
    second = answer()

    assert second == first
    assert len(first) == payload["max_tokens"]
    server.metric_reaches("vllm:external_prefix_cache_hits_total", 31 * 32)
    server.metric_reaches("kvferry:loaded_chunks_total", 31)
    server.metric_reaches("kvferry:verified_blobs_total", 31)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_readmes_own_lines_do_the_same(server):
    _, lines = readme_blocks()
    script = "\n".join(lines).replace("localhost:8000", server.url.removeprefix("http://"))
    # the tiny model has no tokenizer; everything else is what the README says
    script = re.sub(r"\"prompt\": \"'\$\(.*\)'\"", "\"prompt\": ['$(seq -s, 3 900)']", script)
    assert "seq -s, 3 900" in script
    loaded = server.metric("kvferry:loaded_chunks_total")
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, timeout=2 * ANSWER_S
    )
    assert done.stdout.count('"object":"text_completion"') == 2, done.stdout + done.stderr
    assert "kvferry:stored_chunks_total" in done.stdout
    server.metric_reaches("kvferry:loaded_chunks_total", loaded + 27)
