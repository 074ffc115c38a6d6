"""A real engine in a process of its own, driven from outside: one request, one answer.

The child (``engine_process.py``) reads requests as JSON lines on its stdin and answers on a pipe
of its own, so that nothing the engine prints gets in between; what it prints goes to a log file,
whose end is shown when something fails. Every wait has a deadline: an engine that hangs is killed
with all its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvferry.kvops.errors import KVFerryError

_LOG_LINES = 25
_STOP_SECONDS = 20.0
_MAX_THREADS = 16

_ENVIRONMENT = {
    # both halves of the connector in one process, which also starts faster
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Worker threads that spin, each tied to its core, are as fast as this on an idle machine and
    # five times slower on one that has something else to do.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
}


class EngineFailedError(KVFerryError):
    """The engine did not start, did not answer in time, or answered with an error."""


@dataclass(frozen=True)
class EngineSpec:
    """How to start an engine.

    Attributes:
        model: folder of the checkpoint.
        dtype: ``bfloat16`` or ``float32``.
        kv_transfer_config: as for ``--kv-transfer-config``; ``None`` starts without a connector.
        block_size: tokens per block; ``None`` leaves it to the engine.
        max_model_len: longest prompt and answer together, tokens.
        kv_cache_bytes: memory for the engine's own KV cache.
        options: more arguments of ``vllm.LLM``.
        environment: more environment variables; they win over the demo's own.
    """

    model: str
    dtype: str
    kv_transfer_config: Mapping[str, Any] | None = None
    block_size: int | None = None
    max_model_len: int = 4608
    kv_cache_bytes: int = 512 << 20
    options: Mapping[str, Any] | None = None
    environment: Mapping[str, str] | None = None

    def request(self) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM``."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "kv_transfer_config": dict(self.kv_transfer_config)
            if self.kv_transfer_config is not None
            else None,
            "max_model_len": self.max_model_len,
            # a prompt is one step, unless someone asks for less
            "max_num_batched_tokens": max(2048, self.max_model_len),
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        if self.block_size is not None:
            arguments["block_size"] = self.block_size
        return {**arguments, **(self.options or {})}


@dataclass(frozen=True)
class Answer:
    """What the engine made of one prompt.

    Attributes:
        tokens: the output, token ids.
        ttft_s: time from the request's arrival to its first token, seconds, by the engine's clock.
        step_s: mean time of a decode step, seconds; 0 for a single token.
        cached_tokens: prompt tokens that were not computed, wherever they came from.
        finish_reason: ``length``, ``stop`` or ``error``.
    """

    tokens: tuple[int, ...]
    ttft_s: float
    step_s: float
    cached_tokens: int
    finish_reason: str


class Engine:
    """One engine process; a context manager.

    Threads: one caller at a time.
    """

    def __init__(self, spec: EngineSpec, log: Path, *, start_timeout_s: float = 300.0) -> None:
        self._log_path = log
        read_end, write_end = os.pipe()
        environment = {
            "OMP_NUM_THREADS": str(min(_MAX_THREADS, len(os.sched_getaffinity(0)))),
            **os.environ,
            **_ENVIRONMENT,
            **(spec.environment or {}),
        }
        command = [sys.executable, "-m", "kvferry.demo.engine_process", str(write_end)]
        try:
            with log.open("ab") as stream:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write_end,),
                    env=environment,
                    # so that a kill reaches what the engine started
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._read_end = read_end
        self._received = b""
        try:
            self.start_seconds = float(
                self.call("start", start_timeout_s, arguments=spec.request())["seconds"]
            )
        except BaseException:
            self._kill()
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        together: bool = False,
        cache_salt: str | None = None,
        timeout_s: float = 300.0,
    ) -> list[Answer]:
        """Answer *prompts* greedily, one after the other.

        Args:
            prompts: token ids.
            max_tokens: length of each answer, tokens.
            together: submit all at once instead.
            cache_salt: of the requests; prompts with different salts share no cached block.
            timeout_s: for all of them.

        Raises:
            EngineFailedError: the engine failed or took longer.
        """
        answers = self.call(
            "generate",
            timeout_s,
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            together=together,
            cache_salt=cache_salt,
        )["answers"]
        return [Answer(**{**answer, "tokens": tuple(answer["tokens"])}) for answer in answers]

    def settle(self, timeout_s: float = 60.0) -> None:
        """Let the engine step until no transfer is pending, so that all stores are published.

        Raises:
            EngineFailedError: something was still pending at the deadline.
        """
        self.call("settle", timeout_s + 5.0, limit_s=timeout_s)

    def reset(self, *, connector: bool = False, timeout_s: float = 30.0) -> None:
        """Drop the engine's own prefix cache; with *connector* the connector's as well.

        Raises:
            EngineFailedError: the engine refused (blocks are still in use).
        """
        self.call("reset", timeout_s, connector=connector)

    def metrics(self, timeout_s: float = 30.0) -> dict[str, float]:
        """Return the engine's counters and gauges.

        Returns:
            Value by name, and by ``name{label="value",…}`` where there are labels besides the
            engine's and the model's; a histogram gives ``…_count`` and ``…_sum``. The bare name
            always has the sum over all label values.
        """
        values: dict[str, float] = self.call("metrics", timeout_s)["values"]
        return values

    def close(self, timeout_s: float = _STOP_SECONDS) -> None:
        """Shut the engine down in good order; kill it if that takes longer than *timeout_s*."""
        try:
            self.call("stop", timeout_s)
            self._process.wait(timeout_s)
        except (EngineFailedError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()

    def call(self, verb: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            EngineFailedError: no answer in time, the process ended, or it answered with an error.
        """
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            raise EngineFailedError("the engine is closed")
        try:
            stdin.write(json.dumps({"verb": verb, **fields}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise EngineFailedError(self._with_log(f"the engine ended before {verb}")) from None
        line = self._read_line(verb, time.monotonic() + timeout_s, timeout_s)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailedError(
                self._with_log(f"the engine failed at {verb}: {answer['error']}")
            )
        return answer

    def _read_line(self, verb: str, deadline: float, timeout_s: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_end, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._kill()
                    raise EngineFailedError(
                        self._with_log(f"{verb} took longer than {timeout_s:.0f} s")
                    )
                received = os.read(self._read_end, 1 << 20)
                if not received:
                    code = self._process.wait()
                    raise EngineFailedError(
                        self._with_log(f"the engine ended at {verb} with exit code {code}")
                    )
                self._received += received
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _with_log(self, sentence: str) -> str:
        try:
            text = self._log_path.read_text(errors="replace")
        except OSError:
            return sentence
        tail = "\n".join(f"  | {line}" for line in text.splitlines()[-_LOG_LINES:])
        return f"{sentence}\n{tail}\n  (log: {self._log_path})"

    def _kill(self) -> None:
        """End the process and its children; harmless when they are gone."""
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None and not self._process.stdin.closed:
            # closing flushes, and nobody may be there to read
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
