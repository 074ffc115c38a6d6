"""The child of ``engine.py``: a vLLM engine that answers requests, ``python -m`` with a pipe's fd.

Requests come as JSON lines on stdin, one answer line each goes to the pipe. It ends when stdin
ends, so that it never outlives who started it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.kvops.metrics import PREFIX

_OWN_LABELS = ("model_name", "engine")

# how often an engine that can't be asked is made to step
_NUDGES = 3


class Server:
    """The engine and what can be asked of it: one method per verb, named after it."""

    def __init__(self) -> None:
        self._llm: Any = None

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start the engine with *arguments* of ``vllm.LLM``."""
        begin = time.perf_counter()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        config = arguments.pop("kv_transfer_config")
        if config is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**config)
        self._llm = LLM(**arguments)
        return {"seconds": time.perf_counter() - begin}

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        together: bool,
        cache_salt: str | None,
    ) -> dict[str, Any]:
        """Answer *prompts* greedily."""
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        answers = [
            _answer(output)
            for batch in batches
            for output in self._generate(batch, max_tokens, cache_salt)
        ]
        return {"answers": answers}

    def settle(self, limit_s: float) -> dict[str, Any]:
        """Step the engine until it has nothing left to do, or raise TimeoutError.

        The scheduler knows whether transfers are pending; one that can't be asked (it lives in
        another process) is given a few steps by requests too short to be stored.
        """
        deadline = time.monotonic() + limit_s
        engine = self._llm.llm_engine
        core = getattr(engine.engine_core, "engine_core", None)
        scheduler = getattr(core, "scheduler", None)
        if scheduler is None:
            for _ in range(_NUDGES):
                self._generate([[3]], 1, None)
            return {}
        while scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"transfers were still pending after {limit_s:.0f} s")
            engine.step()
        # its last report is in the metrics only after one more step
        self._generate([[3]], 1, None)
        return {}

    def reset(self, connector: bool) -> dict[str, Any]:
        """Drop the prefix cache."""
        extra = {"reset_connector": True} if connector else {}
        if not self._llm.reset_prefix_cache(**extra):
            raise RuntimeError("the engine did not drop its prefix cache: blocks are in use")
        return {}

    def metrics(self) -> dict[str, Any]:
        """Return counters, gauges and histograms' counts and sums, by name."""
        return {"values": {**_flat(self._llm.get_metrics()), **_own_metrics()}}

    def stop(self) -> dict[str, Any]:
        """Shut the engine down."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        return {}

    def _generate(self, prompts: list[list[int]], max_tokens: int, salt: str | None) -> Any:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        extra = {} if salt is None else {"cache_salt": salt}
        return self._llm.generate(
            [{"prompt_token_ids": prompt, **extra} for prompt in prompts],
            parameters,
            use_tqdm=False,
        )


def _answer(output: Any) -> dict[str, Any]:
    """Return a request's output as the fields of ``engine.Answer``."""
    completion, metrics = output.outputs[0], output.metrics
    steps = len(completion.token_ids) - 1
    decode = metrics.last_token_ts - metrics.first_token_ts
    return {
        "tokens": list(completion.token_ids),
        "ttft_s": metrics.first_token_latency,
        "step_s": decode / steps if steps > 0 else 0.0,
        "cached_tokens": output.num_cached_tokens or 0,
        "finish_reason": str(completion.finish_reason),
    }


def _flat(metrics: Iterable[Any]) -> dict[str, float]:
    """Return the engine's own snapshot of its metrics by name."""
    values: dict[str, float] = {}
    for metric in metrics:
        if hasattr(metric, "value"):
            _add(values, metric.name, metric.labels, metric.value)
        elif hasattr(metric, "sum"):
            _add(values, f"{metric.name}_count", metric.labels, metric.count)
            _add(values, f"{metric.name}_sum", metric.labels, metric.sum)
    return values


def _own_metrics() -> dict[str, float]:
    """Return kvferry's metrics: the engine serves them, but leaves them out of its snapshot."""
    from prometheus_client import REGISTRY

    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        if family.name.startswith(PREFIX):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    _add(values, sample.name, sample.labels, sample.value)
    return values


def _add(values: dict[str, float], name: str, labels: Mapping[str, str], value: float) -> None:
    """Add one reading under its bare name and, if it has labels of its own, under those too."""
    text = ",".join(
        f'{label}="{labels[label]}"' for label in sorted(labels) if label not in _OWN_LABELS
    )
    for key in (name, f"{name}{{{text}}}") if text else (name,):
        values[key] = values.get(key, 0.0) + float(value)


def main() -> None:
    """Serve until stdin ends or ``stop`` is asked for."""
    server = Server()
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        for line in sys.stdin:
            request = json.loads(line)
            verb = request.pop("verb")
            try:
                answer = getattr(server, verb)(**request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            pipe.write(json.dumps(answer) + "\n")
            pipe.flush()
            if verb == "stop":
                # the engine is down; tearing down the interpreter around it takes seconds
                os._exit(0)


if __name__ == "__main__":
    main()
