"""Kill a real engine with SIGKILL while blobs are being written, again and again, on one arena.

    python scripts/kill_engine.py --runs 20

Each run starts the engine with its worker in a process of its own (the "mp" executor) on the same arena file, checks
that known prompts still give the tokens they gave without a cache, then stores in a burst until a counter in the arena
shows a part that is being written; at that moment the worker, or the engine core, or both in turn are killed. Then the
arena is opened as a new engine would: every ready frame must match its checksum, nothing half-written may be ready,
and free, ready and reclaimed frames must add up.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARENA_BYTES = 256 << 20
BLOCKS_PER_CHUNK = 8
PROBES = 3
TARGETS = ("worker", "core", "both")


def prompts(seed: int, count: int, length: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Return random prompts as token ids."""
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(length)]}
        for _ in range(count)
    ]


def run_engine(args: argparse.Namespace) -> None:
    """Run the known prompts, say what came out, then store until killed."""
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
    transfer = KVTransferConfig(
        kv_connector="KVFerryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_both",
        kv_connector_extra_config={
            "arena_bytes": ARENA_BYTES, "arena_path": args.arena, "blocks_per_chunk": BLOCKS_PER_CHUNK,
        },
    )  # fmt: skip
    llm = LLM(
        model=str(ensure_checkpoint(checkpoint)), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=2048, block_size=32, seed=0, disable_log_stats=False,
        distributed_executor_backend="mp", kv_transfer_config=None if args.reference else transfer,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    tokens, cached = [], 0
    for prompt in prompts(0, PROBES, 1000, checkpoint.vocab_size):
        output = llm.generate([prompt], sampling, use_tqdm=False)[0]
        tokens.append(list(output.outputs[0].token_ids))
        cached += output.num_cached_tokens or 0
    report = {"tokens": tokens, "cached": cached, "pids": descendants(os.getpid())}
    draft = Path(args.out + ".tmp")
    draft.write_text(json.dumps(report))
    draft.rename(args.out)
    seed = args.seed
    while not args.reference:
        seed += 1
        llm.generate(prompts(seed, 8, 1500, checkpoint.vocab_size), sampling, use_tqdm=False)


def descendants(pid: int) -> dict[str, int]:
    """Return the pids of the engine core and the worker below *pid*, told apart by who is whose child."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_bytes()
            except OSError:
                continue
            parents[int(entry.name)] = int(text[text.rindex(b")") + 2 :].split()[1])
    names = {}
    for child in parents:
        try:
            command = (Path("/proc") / str(child) / "cmdline").read_bytes()
        except OSError:
            continue
        if b"resource_tracker" in command:
            continue
        if parents[child] == pid:
            names["core"] = child
        elif parents.get(parents[child]) == pid:
            names["worker"] = child
    return names


def start(
    args: argparse.Namespace, folder: Path, seed: int, *, reference: bool = False
) -> tuple[Any, Path]:
    """Start an engine in a process group of its own; return the process and where it reports."""
    out = folder / f"report-{seed}.json"
    command = [
        sys.executable,
        __file__,
        "--child",
        "--arena",
        str(args.arena),
        "--out",
        str(out),
        "--seed",
        str(seed),
    ]
    if reference:
        command.append("--reference")
    with (folder / f"engine-{seed}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return process, out


def wait_for(process: Any, out: Path, timeout_s: float, folder: Path) -> dict[str, Any]:
    """Return the engine's report."""
    deadline = time.monotonic() + timeout_s
    while not out.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            logs = max(folder.glob("engine-*.log"), key=lambda p: p.stat().st_mtime)
            print("\n".join(logs.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
            raise SystemExit("the engine did not come up")
        time.sleep(0.05)
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def end_group(process: Any) -> None:
    """Kill what is left of the engine and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_while_writing(arena: Any, pids: dict[str, int], target: str, timeout_s: float) -> bool:
    """Kill *target* as soon as a part is being written; return whether the dead left one unfinished."""
    from kvferry.kvops.store import format as fmt

    words, table = arena.words, fmt.ATTACH_OFFSET // 8
    slots = [
        table + n * 8 for n in range(fmt.ATTACH_SLOTS) if words[table + n * 8] == pids["worker"]
    ]
    victims = list(pids.values()) if target == "both" else [pids[target]]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for slot in slots:
            if words[slot + 3] != words[slot + 4]:
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                deadline = 0.0
                break
    # a killed core takes its worker along a moment later: it may finish the part first
    return any(words[slot + 3] != words[slot + 4] for slot in slots)


def inspect(path: str) -> dict[str, Any]:
    """Open the arena as a new owner and check everything that rests there."""
    from kvferry.kvops.store import format as fmt
    from kvferry.kvops.store.arena import Arena
    from kvferry.kvops.store.checksum import checksum
    from kvferry.kvops.store.recovery import scan
    from kvferry.kvops.store.store import Store

    with Arena.open(path, ARENA_BYTES, session="inspector") as arena:
        store = Store.open(arena, namespace=b"kill_engine.py..")
        wrong = ready = writing = 0
        for span in store._space.spans.all():
            for found in scan(arena, span):
                writing += found.state == fmt.State.WRITING
                if found.state == fmt.State.READY:
                    ready += 1
                    part = fmt.PART.unpack_from(arena.buffer, found.header + fmt.HEADER_FIXED_BYTES)
                    data = arena.buffer[found.offset : found.offset + found.blob_bytes]
                    wrong += part[2] != 1 or part[6] != checksum(data)
                    data.release()
        stats = store.stats()
        places = sum(span.frame_count for span in store._space.spans.all())
        store.close()
    return {
        "ready": ready, "wrong": wrong, "writing": writing,
        "adds_up": places == stats["ready_frames"] + stats["free_frames"] + stats["quarantined_frames"],
    }  # fmt: skip


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--least-writing", type=float, default=0.75, help="share of runs that must hit a write"
    )
    parser.add_argument("--timeout-s", type=float, default=180.0, help="for an engine to come up")
    parser.add_argument("--arena", default=f"/dev/shm/kvferry-kill-{os.getpid()}.arena")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_engine(args)
        return 0
    from kvferry.kvops.store.arena import Arena

    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process, out = start(args, folder, 0, reference=True)
        expected = wait_for(process, out, args.timeout_s, folder)["tokens"]
        end_group(process)
        try:
            for run in range(1, args.runs + 1):
                begin = time.monotonic()
                process, out = start(args, folder, run * 1000)
                report = wait_for(process, out, args.timeout_s, folder)
                target = TARGETS[run % len(TARGETS)]
                with Arena.open(
                    args.arena, ARENA_BYTES, session="watcher", populate=False
                ) as arena:
                    hit = kill_while_writing(arena, report["pids"], target, 60)
                end_group(process)
                result = {
                    "run": run, "killed": target, "while_writing": hit, "cached_tokens": report["cached"],
                    "identical": report["tokens"] == expected, **inspect(args.arena),
                    "seconds": round(time.monotonic() - begin, 1),
                }  # fmt: skip
                results.append(result)
                print(json.dumps(result), flush=True)
        finally:
            Path(args.arena).unlink(missing_ok=True)
    bad = [
        r for r in results if not (r["identical"] and r["adds_up"]) or r["wrong"] or r["writing"]
    ]
    writing = sum(r["while_writing"] for r in results)
    cold = [r for r in results[1:] if not r["cached_tokens"]]
    ok = not bad and writing >= args.least_writing * args.runs and not cold
    print(
        json.dumps(
            {
                "runs": len(results),
                "while_writing": writing,
                "bad": len(bad),
                "without_hits": len(cold),
                "ok": ok,
            }
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
