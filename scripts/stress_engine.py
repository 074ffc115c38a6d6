"""Stress a real engine: many requests, shared prefixes, aborts, an arena far too small, and the same tokens.

    python scripts/stress_engine.py --requests 500
    python scripts/stress_engine.py --requests 120 --gpu-blocks 40      # under preemption
    python scripts/stress_engine.py --requests 200 --disk               # what leaves the arena goes to a disk

Three child processes run the same requests: twice without the connector, once with it. Requests on which the first two
differ are left out (batching changes rounding; at most 1 %). Fails on a different token, an engine error, a lease or a
frame that is left over, or when nothing was loaded.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = 32
FAMILIES = 25
MAX_DIFFERING = 0.01


def make_requests(count: int, seed: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return requests with shared prefixes, when each arrives, and which are aborted after how many steps."""
    rng = random.Random(seed)
    families = [[rng.randrange(3, vocabulary) for _ in range(640)] for _ in range(FAMILIES)]
    requests = []
    for number in range(count):
        shared = rng.randrange(0, 17) * BLOCK
        own = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 200))]
        requests.append(
            {
                "prompt": rng.choice(families)[:shared] + own,
                "max_tokens": rng.randrange(4, 40),
                "arrives": number // 3 * 2,
                "abort_after": rng.randrange(0, 12) if rng.random() < 0.1 else None,
            }
        )
    return requests


def run_engine(args: argparse.Namespace) -> None:
    """Run all requests in this process and write what came out to ``args.out``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # threads that spin while they wait slow everything down where there are few cores
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from kvferry.demo.checkpoints import CHECKPOINTS, ensure_checkpoint

    checkpoint = CHECKPOINTS["llama"]
    requests = make_requests(args.requests, args.seed, checkpoint.vocab_size)
    transfer = None
    if args.arena_bytes:
        transfer = KVTransferConfig(
            kv_connector="KVFerryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_both",
            kv_connector_extra_config={
                "arena_bytes": args.arena_bytes, "blocks_per_chunk": args.blocks_per_chunk,
                "offload_prompt_only": False,
                **({"disk_path": args.disk_path, "disk_bytes": "256MiB", "disk_admission": "all"} if args.disk_path else {}),
            },
        )  # fmt: skip
    llm = LLM(
        model=str(ensure_checkpoint(checkpoint)), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=1024, block_size=BLOCK, seed=0, num_gpu_blocks_override=args.gpu_blocks,
        max_num_seqs=16, disable_log_stats=False, kv_transfer_config=transfer,
    )  # fmt: skip
    engine = llm.llm_engine
    tokens: dict[str, list[int]] = {}
    aborts: dict[int, list[str]] = {}
    waiting = sorted(enumerate(requests), key=lambda item: item[1]["arrives"])
    step, said = 0, time.monotonic()
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1]["arrives"] <= step:
            number, request = waiting.pop(0)
            engine.add_request(
                str(number), {"prompt_token_ids": request["prompt"]},
                SamplingParams(temperature=0, max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True),
            )  # fmt: skip
            if request["abort_after"] is not None:
                aborts.setdefault(step + request["abort_after"], []).append(str(number))
        engine.abort_request(aborts.pop(step, []))
        for output in engine.step():
            if output.finished:
                tokens[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
        step += 1
        if time.monotonic() - said > 5:
            said = time.monotonic()
            print(
                f"  step {step}: {len(tokens)} of {len(requests)} done", file=sys.stderr, flush=True
            )
    report: dict[str, Any] = {"tokens": tokens, "steps": step}
    report["metrics"] = {
        m.name: m.value
        for m in llm.get_metrics()
        if hasattr(m, "value") and not m.name.startswith("vllm:request")
    }
    if transfer is not None:
        report["store"] = drain(engine)
    Path(args.out).write_text(json.dumps(report))
    engine.engine_core.shutdown()


def drain(engine: Any) -> dict[str, int]:
    """Step the idle engine until its transfers have ended; return the store's statistics."""
    core = engine.engine_core.engine_core
    connector = core.scheduler.connector
    deadline = time.monotonic() + 30
    while connector.has_pending_push_work() and time.monotonic() < deadline:
        engine.step()
        core.step_fn()
    manager = connector._manager
    # what was brought up for a request that was aborted is held for a moment longer
    while (
        manager._disk is not None
        and manager._store.stats()["leases"]
        and time.monotonic() < deadline
    ):
        manager.on_schedule_end(None)
        time.sleep(0.05)
    stats: dict[str, int] = manager._store.stats()
    if manager._disk is not None:
        stats.update({f"disk_{name}": value for name, value in manager._disk._tier.counts.items()})
    return stats


def child(name: str, args: argparse.Namespace, folder: Path, arena_bytes: int) -> dict[str, Any]:
    """Run the engine in a process of its own; return its report."""
    out = folder / f"{name}.json"
    command = [
        sys.executable, __file__, "--child", "--out", str(out), "--requests", str(args.requests),
        "--seed", str(args.seed), "--gpu-blocks", str(args.gpu_blocks), "--arena-bytes", str(arena_bytes),
        "--blocks-per-chunk", str(args.blocks_per_chunk),
    ]  # fmt: skip
    if args.disk and arena_bytes:
        command += ["--disk-path", str(folder / "disk")]
    print(f"{name} ...", file=sys.stderr, flush=True)
    begin = time.monotonic()
    done = subprocess.run(command, check=False, timeout=args.timeout_s)
    if done.returncode:
        raise SystemExit(f"{name}: the engine ended with status {done.returncode}")
    report: dict[str, Any] = json.loads(out.read_text())
    report["seconds"] = time.monotonic() - begin
    return report


def compare(args: argparse.Namespace) -> int:
    """Run all three and report; return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = child("without", args, folder, 0)
        second = child("without, again", args, folder, 0)
        ours = child("with kvferry", args, folder, args.arena_bytes)
    steady = {n: t for n, t in first["tokens"].items() if second["tokens"].get(n) == t}
    left_out = len(first["tokens"].keys() & second["tokens"].keys()) - len(steady)
    wrong = [n for n, t in steady.items() if n in ours["tokens"] and ours["tokens"][n] != t]
    store = ours["store"]
    leaks = {k: store[k] for k in ("leases", "writing_frames", "orphaned_frames") if store[k]}
    metrics = ours["metrics"]
    report = {
        "requests": args.requests, "compared": len(steady), "left_out": left_out, "different": sorted(wrong),
        "leaks": leaks, "preemptions": metrics.get("vllm:num_preemptions", 0),
        "external_hits_tokens": metrics.get("vllm:external_prefix_cache_hits", 0),
        "committed": store["committed"], "evicted": store["evicted"], "bad": store["bad"],
        **{name: value for name, value in store.items() if name.startswith("disk_")},
        "arena_bytes": args.arena_bytes, "seconds": round(ours["seconds"], 1),
    }  # fmt: skip
    ok = (
        not wrong and not leaks and store["bad"] == 0
        and left_out <= MAX_DIFFERING * args.requests and report["external_hits_tokens"] > 0
    )  # fmt: skip
    if args.disk:
        ok = ok and store["disk_loaded"] > 0 and not store["disk_load_corrupt"]
    report["ok"] = ok
    print(json.dumps(report))
    return 0 if ok else 1


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--gpu-blocks", type=int, default=160, help="KV cache blocks of the engine; few: preemption"
    )
    parser.add_argument(
        "--arena-bytes", type=int, default=32 << 20, help="about a tenth of the working set"
    )
    parser.add_argument("--blocks-per-chunk", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--disk", action="store_true", help="with a disk of 256 MiB below the arena"
    )
    parser.add_argument("--disk-path", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_engine(args)
        return 0
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
