"""What does kvferry cost an engine that never hits, and what does a hit save? Real vLLM, a model slow enough to matter.

    python -m perf.bench_engine --assert
    python -m perf.bench_engine --chat      # what offload_prompt_only costs a conversation

Throughput: the same new prompts (no hits) go to an engine without a connector and to one with kvferry, in turn; the
ratio is taken pair by pair. Time to first token: a 4,000-token prompt is computed, then found in the engine's own prefix
cache, then, after that cache is dropped, loaded from kvferry. Tokens are compared every time.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from perf.harness import (
    Case,
    Figure,
    Gate,
    Provider,
    headline,
    parser,
    print_table,
    rounds_of,
    write_csv,
)  # fmt: skip

from kvferry.demo.checkpoints import CHECKPOINTS, Checkpoint, ensure_checkpoint
from kvferry.demo.engine import Answer, Engine, EngineSpec

MODEL = "slow"
PROMPTS = 4
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 24
LONG_TOKENS = 4000
ARENA = "2GiB"

LEAST_THROUGHPUT = 0.97
MOST_TTFT = 0.3
MOST_STEPS = 2.0

TURNS = 5
TURN_TOKENS = 200
ANSWER_TOKENS = 160
LEAST_STEP_MS = 20.0


def spec_of(checkpoint: Checkpoint, *, connector: bool, prompt_only: bool = True) -> EngineSpec:
    """Return how to start the engine with or without kvferry."""
    extra = {"arena_bytes": ARENA, "offload_prompt_only": prompt_only}
    config = {
        "kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return EngineSpec(
        model=str(ensure_checkpoint(checkpoint)), dtype=checkpoint.dtype, block_size=checkpoint.block_size,
        kv_transfer_config=config if connector else None,
        # two engines share the machine: each may use all cores, and only one is asked at a time
        environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )  # fmt: skip


def prompts_of(seed: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def timed(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Answer]]:
    """Return the seconds that a batch took, and its answers."""
    begin = time.perf_counter()
    answers = engine.generate(prompts, max_tokens=max_tokens, together=True, timeout_s=600)
    return time.perf_counter() - begin, answers


def throughput(checkpoint: Checkpoint, folder: Path, pairs: int) -> tuple[list[Figure], float]:
    """Return figures for both engines, in microseconds an output token, and the median decode step in ms."""
    times: dict[str, list[float]] = {"without": [], "kvferry": []}
    same, steps = True, []
    with (
        Engine(
            spec_of(checkpoint, connector=False), folder / "without.log", start_timeout_s=300
        ) as without,
        Engine(
            spec_of(checkpoint, connector=True, prompt_only=False),
            folder / "with.log",
            start_timeout_s=300,
        ) as ours,
    ):
        engines = {"without": without, "kvferry": ours}
        for pair in range(pairs + 1):
            prompts = prompts_of(1000 + pair, PROMPTS, PROMPT_TOKENS, checkpoint.vocab_size)
            order = list(engines) if pair % 2 else list(reversed(engines))
            tokens = {}
            for name in order:
                seconds, answers = timed(engines[name], prompts, OUTPUT_TOKENS)
                tokens[name] = [a.tokens for a in answers]
                steps += [a.step_s * 1e3 for a in answers]
                if pair:
                    times[name].append(seconds / (PROMPTS * OUTPUT_TOKENS) * 1e6)
            same = same and tokens["without"] == tokens["kvferry"]
            print(f"pair {pair} of {pairs} done", file=sys.stderr, flush=True)
    case = Case("throughput, 0 % hits", 0, 1, [Provider(name, lambda: None) for name in engines])
    figures = [
        Figure(
            case,
            name,
            times[name],
            same,
            [a / b for a, b in zip(times[name], times["without"], strict=True)],
        )
        for name in engines
    ]
    return figures, statistics.median(steps)


def first_token(
    checkpoint: Checkpoint, folder: Path, rounds: int
) -> tuple[list[Figure], float, float]:
    """Return figures of the three ways to a first token, the median step in s, and the tokens loaded a round."""
    times: dict[str, list[float]] = {"computed": [], "own_cache": [], "kvferry": []}
    same, steps, cached = True, [], []
    with Engine(
        spec_of(checkpoint, connector=True), folder / "ttft.log", start_timeout_s=300
    ) as engine:
        for number in range(rounds + 1):
            prompt = prompts_of(2000 + number, 1, LONG_TOKENS, checkpoint.vocab_size)
            answers = {}
            for way in times:
                if way == "kvferry":
                    engine.reset()
                answers[way] = engine.generate(prompt, max_tokens=8, timeout_s=600)[0]
                engine.settle()
            same = same and len({a.tokens for a in answers.values()}) == 1
            if number:
                cached.append(answers["kvferry"].cached_tokens)
                for way, answer in answers.items():
                    times[way].append(answer.ttft_s * 1e6)
                    steps.append(answer.step_s)
            print(f"round {number} of {rounds} done", file=sys.stderr, flush=True)
    case = Case("TTFT, 4,000 tokens", 0, 1, [Provider(name, lambda: None) for name in times])
    figures = [
        Figure(case, way, us, same, [a / b for a, b in zip(us, times["computed"], strict=True)])
        for way, us in times.items()
    ]
    return figures, statistics.median(steps), min(cached)


def chat(checkpoint: Checkpoint, folder: Path) -> list[Figure]:
    """Return the time to first token of the later turns of a conversation whose KV left the engine between turns.

    The baseline stores prompts only, which is vLLM's default: the last answer is computed again in the next turn.
    """
    times: dict[str, list[float]] = {"prompt_only": [], "all_tokens": []}
    tokens: dict[str, list[tuple[int, ...]]] = {name: [] for name in times}
    for name in times:
        spec = spec_of(checkpoint, connector=True, prompt_only=name == "prompt_only")
        with Engine(spec, folder / f"{name}.log", start_timeout_s=300) as engine:
            text: list[int] = []
            missing = []
            for turn in range(TURNS):
                text += prompts_of(3000 + turn, 1, TURN_TOKENS, checkpoint.vocab_size)[0]
                answer = engine.generate([text], max_tokens=ANSWER_TOKENS, timeout_s=600)[0]
                tokens[name].append(answer.tokens)
                if turn:
                    times[name].append(answer.ttft_s * 1e6)
                    missing.append(len(text) - answer.cached_tokens)
                text += answer.tokens
                engine.settle()
                engine.reset()
                print(f"{name}: turn {turn + 1} of {TURNS} done", file=sys.stderr, flush=True)
            print(f"{name}: prompt tokens computed in turns 2 to {TURNS}: {missing}")
    same = tokens["prompt_only"] == tokens["all_tokens"]
    base = times["prompt_only"]
    case = Case(
        f"chat, TTFT of turns 2-{TURNS}", 0, 1, [Provider(name, lambda: None) for name in times]
    )
    return [
        Figure(case, name, us, same, [a / b for a, b in zip(us, base, strict=True)])
        for name, us in times.items()
    ]


def main() -> int:
    """Run the benchmark."""
    made = parser("bench_engine", __doc__)
    made.add_argument(
        "--chat", action="store_true", help="only the conversation with and without stored answers"
    )
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    args = made.parse_args()
    checkpoint = CHECKPOINTS[MODEL]
    if args.list or args.dry_run:
        print(
            f"throughput, 0 % hits: {PROMPTS} prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} out: without, kvferry"
        )
        print(f"TTFT: one prompt of {LONG_TOKENS} tokens: computed, own_cache, kvferry")
        return 0
    rounds = rounds_of(args)
    print(headline())
    if args.chat:
        with tempfile.TemporaryDirectory() as name:
            conversation = chat(checkpoint, Path(name))
        print_table(conversation)
        if args.csv:
            write_csv(args.csv, "bench_engine", conversation)
        return 0 if all(figure.match for figure in conversation) else 1
    with tempfile.TemporaryDirectory() as name:
        costs, step_ms = throughput(checkpoint, Path(name), rounds)
        saves, step_s, cached = first_token(
            checkpoint, Path(name), max(5, rounds) if not args.quick else rounds
        )
    figures = costs + saves
    print_table(figures)
    low, high = min(costs[1].ratios), max(costs[1].ratios)
    print(f"throughput ratio over {rounds} pairs: median {1 / costs[1].ratio:.4f}, {1 / high:.4f} to {1 / low:.4f}; "
          f"decode step {step_ms:.1f} ms; {cached} of {LONG_TOKENS} tokens loaded")  # fmt: skip
    if args.csv:
        write_csv(args.csv, "bench_engine", figures)
    _, own, ours = saves
    late = (ours.p50 - own.p50) / 1e6 / step_s
    gates = [
        Gate("decode step, ms", step_ms, LEAST_STEP_MS, at_least=True),
        Gate(
            "throughput at 0 % hits / without", 1 / costs[1].ratio, LEAST_THROUGHPUT, at_least=True
        ),
        Gate("TTFT from kvferry / computed", ours.ratio, MOST_TTFT),
        Gate("TTFT from kvferry - own cache, engine steps", late, MOST_STEPS),
        Gate("tokens loaded", cached, LONG_TOKENS - 64, at_least=True),
    ]
    for gate in gates:
        print(gate)
    wrong = any(not figure.match for figure in figures)
    return 1 if wrong or (args.gates and not all(gate.holds for gate in gates)) else 0


if __name__ == "__main__":
    sys.exit(main())
