"""``kvferry demo``: store and load with a real engine, and say what came of it."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvferry.kvops.errors import KVFerryError
from kvferry.kvops.store.memory import private_directory

from .checkpoints import CHECKPOINTS, ensure_checkpoint
from .engine import Engine, EngineFailedError, EngineSpec
from .measure import ModelResult, Plan, Progress, StartEngine, measure
from .report import as_json, as_text

PLANS: dict[str, Plan] = {
    "llama": Plan(CHECKPOINTS["llama"]),
    "mla": Plan(CHECKPOINTS["mla"]),
    "hybrid": Plan(CHECKPOINTS["hybrid"]),
    "long": Plan(
        CHECKPOINTS["slow"],
        prompts=1,
        max_tokens=8,
        checks_dependence=False,
        expects_speed=True,
    ),
}
ARENA_BYTES = 512 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options."""
    parser.add_argument(
        "--model",
        choices=[*PLANS, "all"],
        default="all",
        help="which model: grouped-query Llama, DeepSeek's MLA, Gemma 3's sliding windows, a long"
        " prompt, or one after the other (default)",
    )
    parser.add_argument(
        "--arena",
        metavar="PATH",
        help="use this arena file and leave it (default: a new one in shared memory, removed)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave arena and engine logs, say where"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--seed", type=int, help="of the prompts (default: another one each time, reported)"
    )


def run(args: argparse.Namespace, start: Callable[[Path, EngineSpec], Engine] | None = None) -> int:
    """Run the demo; return 0 if every check passed, 1 if not.

    Args:
        args: as declared by ``add_arguments``.
        start: makes an engine from a log file and a spec; a real one by default.

    Raises:
        KVFerryError: vLLM is not installed.
    """
    if start is None:
        if importlib.util.find_spec("vllm") is None:
            raise KVFerryError("the demo needs vLLM: install kvferry's extra `vllm`")
        start = _start_engine
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    names = list(PLANS) if args.model == "all" else [args.model]
    begin = time.monotonic()
    results: list[ModelResult] = []
    with _Folders(args.arena, keep=args.keep) as folders:
        for name in names:
            plan = PLANS[name]
            starter = functools.partial(start, folders.logs / f"{name}.log")
            results.append(_one_model(plan, folders.arena, starter, _Speaker(name, begin), seed))
        failed = any(result.failures for result in results)
        # a failure is explained by what the engine printed
        folders.keep = args.keep or failed
    if args.json:
        report = as_json(results, seed=seed, seconds=time.monotonic() - begin)
        print(json.dumps(report, indent=2))
    else:
        print(as_text(results), end="")
        print(f"the same prompts again: --seed {seed}")
    return 1 if failed else 0


class _Speaker:
    """Progress on stderr: which model, how long it has been, what happens."""

    def __init__(self, name: str, begin: float) -> None:
        self._name = name
        self._begin = begin

    def __call__(self, text: str) -> None:
        elapsed = time.monotonic() - self._begin
        print(f"{elapsed:6.1f} s  {self._name:<6}  {text}", file=sys.stderr, flush=True)


def _one_model(
    plan: Plan, arena: Path, start: StartEngine, progress: Progress, seed: int
) -> ModelResult:
    """Measure one model; an engine that fails is a failure of this model, not of the demo."""
    checkpoint = plan.checkpoint
    begin = time.monotonic()
    try:
        folder = ensure_checkpoint(checkpoint)
        spec = EngineSpec(
            model=str(folder),
            dtype=checkpoint.dtype,
            block_size=checkpoint.block_size,
            max_model_len=checkpoint.prompt_tokens + 2 * plan.max_tokens,
            kv_transfer_config=_kv_transfer_config(arena),
        )
        result = measure(plan, spec, arena, start, progress, seed)
    except EngineFailedError as error:
        result = ModelResult(
            checkpoint.name, checkpoint.label, plan.prompts, checkpoint.prompt_tokens
        )
        result.failures.append(str(error))
    result.seconds = time.monotonic() - begin
    return result


def _kv_transfer_config(arena: Path) -> dict[str, object]:
    """Return what a user would write into ``--kv-transfer-config``."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"arena_bytes": ARENA_BYTES, "arena_path": str(arena)},
    }


def _start_engine(log: Path, spec: EngineSpec) -> Engine:
    return Engine(spec, log)


class _Folders:
    """Where arena and logs lie; removes on exit what is the demo's own.

    Logs stay if ``keep`` is true by then, the arena if it was asked for by name, too.
    """

    def __init__(self, arena: str | None, *, keep: bool) -> None:
        self.keep = keep
        self._keep_arena = keep
        self.logs = Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
        self._own: Path | None = None
        if arena is None:
            self._own = Path(tempfile.mkdtemp(prefix="kvferry-demo-", dir=_arena_root()))
        self.arena = Path(arena or "").absolute() if self._own is None else self._own / "arena"

    def __enter__(self) -> _Folders:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None and not self._keep_arena:
            shutil.rmtree(self._own, ignore_errors=True)
        elif self._keep_arena:
            print(f"arena: {self.arena}", file=sys.stderr)
        if self.keep:
            print(f"logs: {self.logs}", file=sys.stderr)
        else:
            shutil.rmtree(self.logs, ignore_errors=True)


def _arena_root() -> Path:
    """Return shared memory, or the folder for temporary files where that is too small."""
    shared = private_directory()
    try:
        room = shutil.disk_usage(shared).free
    except OSError:
        room = 0
    # containers often have 64 MiB of it
    return shared if room > ARENA_BYTES * 1.1 else Path(tempfile.gettempdir())
