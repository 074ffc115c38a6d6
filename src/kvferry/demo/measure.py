"""One model through the demo: cold, from the engine's own cache, from kvferry, in a new process.

Every number is read off the engine: times by its clock for each request, hits by its counters,
bytes and blobs by kvferry's metrics as the engine serves them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .blobs import ready_blobs
from .checkpoints import Checkpoint
from .dependence import first_token_changes, is_monotonous, swapped_blobs_change
from .engine import Answer, EngineSpec

EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
OWN_HITS = "vllm:prefix_cache_hits"
STORED_CHUNKS = "kvferry:stored_chunks_total"
LOADED_CHUNKS = "kvferry:loaded_chunks_total"
STORED_BYTES = "kvferry:stored_bytes_total"
LOADED_BYTES = "kvferry:loaded_bytes_total"
VERIFIED_BLOBS = "kvferry:verified_blobs_total"
LOAD_FAILURES = "kvferry:load_failures_total"
STORE_SECONDS = 'kvferry:transfer_seconds_sum{direction="store"}'
LOAD_SECONDS = 'kvferry:transfer_seconds_sum{direction="load"}'

_WARM_TOKENS = 256

Metrics = Mapping[str, float]
Progress = Callable[[str], None]


class DemoEngine(Protocol):
    """What the demo does with an engine; ``engine.Engine`` is the real one."""

    start_seconds: float

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Answer]:
        """Answer prompts greedily, one after the other."""
        ...

    def settle(self) -> None:
        """Wait until all stores are published."""
        ...

    def reset(self) -> None:
        """Drop the engine's own prefix cache."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        ...


StartEngine = Callable[[EngineSpec], AbstractContextManager[DemoEngine]]


@dataclass(frozen=True)
class Phase:
    """The same prompts once more, from one source.

    Attributes:
        ttft_s: median time to first token, seconds.
        step_s: median time of a decode step, seconds.
        cached_tokens: prompt tokens that the engine did not compute, all prompts together.
        external_hits: tokens that it says came through the connector.
        own_hits: tokens that it says came from its own prefix cache.
        answers: output tokens of each prompt.
    """

    ttft_s: float
    step_s: float
    cached_tokens: int
    external_hits: int
    own_hits: int
    answers: tuple[tuple[int, ...], ...]


@dataclass
class ModelResult:
    """What one model showed.

    Attributes:
        name, label: of the checkpoint.
        prompts, prompt_tokens: how many prompts, and how long each is.
        phases: ``cold``, ``own`` (the engine's prefix cache), ``kvferry``, ``new_process``.
        stored_chunks, loaded_chunks, stored_bytes, loaded_bytes, verified_blobs, load_failures:
            both processes together, without the checks of dependence.
        store_gbps, load_gbps: bytes moved in the time the transfers took, GB/s; 0 if unknown.
        first_token_changes: share of output tokens that another first prompt token changed;
            ``None`` if not checked.
        swap_changes: whether swapped blobs changed the answer; ``None`` if not checked.
        seconds: wall time of the model, engine starts included.
        failures: what is wrong, one sentence each; empty means passed.
        remarks: what is odd and does not fail the demo.
    """

    name: str
    label: str
    prompts: int
    prompt_tokens: int
    phases: dict[str, Phase] = field(default_factory=dict)
    stored_chunks: int = 0
    loaded_chunks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    verified_blobs: int = 0
    load_failures: int = 0
    store_gbps: float = 0.0
    load_gbps: float = 0.0
    first_token_changes: float | None = None
    swap_changes: bool | None = None
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        """Whether every phase gave the same tokens as the cold one."""
        return len({phase.answers for phase in self.phases.values()}) == 1


@dataclass(frozen=True)
class Plan:
    """How the demo treats one model.

    Attributes:
        checkpoint: the model.
        prompts: how many different prompts; times are medians over them.
        max_tokens: length of each answer.
        checks_dependence: whether to show that wrong blocks would have changed the answers.
        expects_speed: whether loading must be faster than computing.
    """

    checkpoint: Checkpoint
    prompts: int = 4
    max_tokens: int = 16
    checks_dependence: bool = True
    expects_speed: bool = False


def measure(
    plan: Plan,
    spec: EngineSpec,
    arena: Path,
    start: StartEngine,
    progress: Progress,
    seed: int,
) -> ModelResult:
    """Run one model through all phases, in two engine processes on one arena.

    Args:
        plan: what to do.
        spec: how to start the engine, with the connector on *arena*.
        arena: the arena's file.
        start: makes the engine of a spec.
        progress: told what is going on.
        seed: of the prompts: random, so that no earlier run can have stored them.

    Raises:
        EngineFailedError: an engine failed.
    """
    checkpoint = plan.checkpoint
    source = random.Random(f"{seed} {checkpoint.name}")
    # one more than counts: its beginning warms the engine up
    warm, *prompts = (
        [source.randrange(3, checkpoint.vocab_size) for _ in range(checkpoint.prompt_tokens)]
        for _ in range(plan.prompts + 1)
    )
    result = ModelResult(checkpoint.name, checkpoint.label, plan.prompts, checkpoint.prompt_tokens)
    progress("starting an engine")
    with start(spec) as engine:
        ask = _Asker(engine, prompts, plan.max_tokens)
        engine.generate([warm[:_WARM_TOKENS]], max_tokens=2)
        engine.settle()
        before = set(ready_blobs(arena))
        progress(f"cold: {plan.prompts} x {checkpoint.prompt_tokens} prompt tokens")
        result.phases["cold"] = ask()
        engine.settle()
        blobs = set(ready_blobs(arena)) - before
        progress("again, from the engine's own prefix cache")
        result.phases["own"] = ask()
        engine.settle()
        engine.reset()
        progress("again after dropping that cache, from kvferry")
        result.phases["kvferry"] = ask()
        engine.settle()
        first = engine.metrics()
        if plan.checks_dependence:
            progress("another first token: do the answers change?")
            result.first_token_changes = first_token_changes(
                engine, prompts, result.phases["cold"].answers, checkpoint.vocab_size
            )
            engine.settle()
    progress("starting a new engine process on the same arena")
    with start(spec) as engine:
        ask = _Asker(engine, prompts, plan.max_tokens)
        engine.generate([warm[-_WARM_TOKENS:]], max_tokens=2)
        progress("again, from kvferry")
        result.phases["new_process"] = ask()
        engine.settle()
        second = engine.metrics()
        if plan.checks_dependence:
            progress("swapped blobs: does the answer change?")
            result.swap_changes = swapped_blobs_change(
                engine, prompts[0], result.phases["cold"].answers[0], arena, blobs
            )
    _count(result, first, second)
    judge(result, plan)
    return result


class _Asker:
    """Asks one engine the same prompts again and reads its counters around it."""

    def __init__(self, engine: DemoEngine, prompts: list[list[int]], max_tokens: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._max_tokens = max_tokens

    def __call__(self) -> Phase:
        before = self._engine.metrics()
        answers = self._engine.generate(self._prompts, max_tokens=self._max_tokens)
        after = self._engine.metrics()

        def grown(name: str) -> int:
            return round(after.get(name, 0.0) - before.get(name, 0.0))

        return Phase(
            ttft_s=statistics.median(answer.ttft_s for answer in answers),
            step_s=statistics.median(answer.step_s for answer in answers),
            cached_tokens=sum(answer.cached_tokens for answer in answers),
            external_hits=grown(EXTERNAL_HITS),
            own_hits=grown(OWN_HITS),
            answers=tuple(answer.tokens for answer in answers),
        )


def _count(result: ModelResult, *processes: Metrics) -> None:
    """Add up the counters of all engine *processes*."""

    def total(name: str) -> float:
        return sum(metrics.get(name, 0.0) for metrics in processes)

    result.stored_chunks = round(total(STORED_CHUNKS))
    result.loaded_chunks = round(total(LOADED_CHUNKS))
    result.stored_bytes = round(total(STORED_BYTES))
    result.loaded_bytes = round(total(LOADED_BYTES))
    result.verified_blobs = round(total(VERIFIED_BLOBS))
    result.load_failures = round(total(LOAD_FAILURES))
    result.store_gbps = _gbps(result.stored_bytes, total(STORE_SECONDS))
    result.load_gbps = _gbps(result.loaded_bytes, total(LOAD_SECONDS))


def _gbps(size: int, seconds: float) -> float:
    return size / seconds / 1e9 if seconds > 0 else 0.0


def judge(result: ModelResult, plan: Plan) -> None:
    """Write what is wrong with *result* into its failures, what is odd into its remarks."""
    cold = result.phases["cold"]
    if cold.cached_tokens:
        result.failures.append(f"the cold run found {cold.cached_tokens} tokens in a cache")
    for name, title in (
        ("own", "from the engine's own cache"),
        ("kvferry", "from kvferry"),
        ("new_process", "from kvferry in a new process"),
    ):
        phase = result.phases[name]
        if phase.answers != cold.answers:
            wrong = sum(a != b for a, b in zip(phase.answers, cold.answers, strict=True))
            result.failures.append(f"{title}: {wrong} of {result.prompts} answers differ")
        if name != "own" and not (phase.external_hits and phase.cached_tokens):
            result.failures.append(f"{title}: the engine says that nothing was loaded")
    if not result.loaded_chunks:
        result.failures.append("kvferry says that nothing was loaded")
    if result.load_failures:
        result.failures.append(f"{result.load_failures} loads failed")
    if result.first_token_changes is not None and result.first_token_changes < 0.5:
        result.failures.append(
            "another first prompt token changed only "
            f"{result.first_token_changes:.0%} of the output: equal tokens prove little"
        )
    if result.swap_changes is False:
        result.failures.append("swapped blobs did not change the answer: were they used at all?")
    if result.loaded_chunks and not result.verified_blobs:
        result.remarks.append("no blob was verified: is KVFERRY_VERIFY set to off?")
    if plan.checks_dependence and all(is_monotonous(tokens) for tokens in cold.answers):
        result.remarks.append("every answer repeats a few tokens")
    if plan.expects_speed and result.phases["kvferry"].ttft_s >= cold.ttft_s:
        result.remarks.append("loading was not faster than computing: is the machine busy?")
