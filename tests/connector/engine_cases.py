"""What the tests do with a real engine: ``python engine_cases.py CASE JSON``, or many cases with ``serve FD``.

A case ends with one line of JSON, its result. Engines run in this process (no engine core process), so that a case can
reach into the store; several cases may share the process, one after the other, which saves importing vLLM for each.
"""

import ctypes
import gc
import json
import os
import pathlib
import random
import sys
import traceback

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# threads that spin while they wait slow everything down where there are few cores
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

from kvferry.demo.checkpoints import CHECKPOINTS, ensure_checkpoint

MAX_TOKENS = 16


def prompt(seed, length):
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(length)]


def metrics():
    """Return our metrics of this process with their labels; of histograms the count."""
    from prometheus_client import REGISTRY

    found = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("kvferry:") and not sample.name.endswith(
                ("_bucket", "_created", "_sum")
            ):
                labels = [v for n, v in sample.labels.items() if n not in ("engine", "model_name")]
                found["/".join([sample.name.removeprefix("kvferry:"), *labels])] = sample.value
    return found


class Engine:
    """One engine on one of the demo's models."""

    def __init__(
        self, model="llama", *, extra=None, connector=True, transfer=None, model_path=None, **engine
    ):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        checkpoint = CHECKPOINTS[model]
        if connector:
            engine["kv_transfer_config"] = KVTransferConfig(
                **{
                    "kv_connector": "KVFerryConnector",
                    "kv_connector_module_path": "kvferry.vllm",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"arena_bytes": "64MiB", **(extra or {})},
                    **(transfer or {}),
                }
            )
        settings = {
            "model": model_path or str(ensure_checkpoint(checkpoint)),
            "dtype": checkpoint.dtype,
            "block_size": None if model_path else checkpoint.block_size,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "seed": 0,
            "disable_log_stats": False,
            **engine,
        }
        self.llm = LLM(**settings)
        # the engine declares its metrics anew, or goes on counting in those of the engine before it
        self._before = metrics()

    def run(self, *prompts, salt=None, max_tokens=MAX_TOKENS):
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        inputs = [
            {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
            for tokens in prompts
        ]
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens or 0,
                "finish": output.outputs[0].finish_reason,
            }
            for output in self.llm.generate(inputs, sampling, use_tqdm=False)
        ]

    def drop_own_cache(self):
        """Drop the engine's own prefix cache. On CPU it has none for MLA, which is fine."""
        self.llm.reset_prefix_cache()

    @property
    def connector(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    @property
    def store(self):
        return self.connector._manager._store

    def external_hits(self):
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:external_prefix_cache_hits":
                return metric.value
        return 0

    def metrics(self):
        """Return what our metrics moved by since this engine began, by name and labels; zeros are left out."""
        moved = {name: value - self._before.get(name, 0) for name, value in metrics().items()}
        return {name: value for name, value in moved.items() if value}

    def leaks(self):
        stats = self.store.stats()
        return {name: stats[name] for name in ("writing_frames", "leases", "orphaned_frames")}

    def blobs(self, group=0):
        """Return the frames of a group in the order in which they were stored."""
        frames = [
            f for key, f in self.store.frames.items() if int.from_bytes(key[-4:], "big") == group
        ]
        return sorted(frames, key=lambda frame: frame.generation)

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()


def roundtrip(model, blocks_per_chunk=1, length=400, **settings):
    engine = Engine(model, extra={"blocks_per_chunk": blocks_per_chunk}, **settings)
    one, other = prompt(1, length), prompt(2, length)
    (cold,), (different,) = engine.run(one), engine.run(other)
    before = engine.external_hits()
    engine.drop_own_cache()
    (loaded,) = engine.run(one)
    hits = engine.external_hits() - before
    engine.llm.reset_prefix_cache(reset_connector=True)
    (computed,) = engine.run(one)
    engine.drop_own_cache()
    # a longer prompt with the same beginning
    (longer,) = engine.run(one + prompt(3, 100))
    engine.drop_own_cache()
    (again,) = engine.run(one + prompt(3, 100))
    result = {
        "cold": cold, "different": different, "loaded": loaded, "hits": hits, "computed": computed, "longer": longer,
        "again": again, "metrics": engine.metrics(), "leaks": engine.leaks(),
    }  # fmt: skip
    engine.close()
    return result


def corrupt(model, group=0, chunk=0, blocks_per_chunk=1, policy="recompute", length=400):
    engine = Engine(model, extra={"blocks_per_chunk": blocks_per_chunk, "on_load_failure": policy})
    tokens = prompt(1, length)
    (cold,) = engine.run(tokens)
    engine.drop_own_cache()
    blobs = engine.blobs(group)
    frame = blobs[chunk]
    engine.store.arena.buffer[frame.offset + frame.blob_bytes // 2] ^= 0x10
    (loaded,) = engine.run(tokens)
    failures = engine.metrics()
    engine.drop_own_cache()
    (again,) = engine.run(tokens)
    engine.drop_own_cache()
    (third,) = engine.run(tokens)
    result = {
        "cold": cold, "loaded": loaded, "again": again, "third": third, "chunks": len(blobs), "failures": failures,
        "metrics": engine.metrics(), "leaks": engine.leaks(),
    }  # fmt: skip
    engine.close()
    return result


def flips(model="llama", rounds=100, length=300):
    """Flip one random byte of one random blob before each of many runs."""
    engine = Engine(model)
    tokens = prompt(1, length)
    (cold,) = engine.run(tokens, max_tokens=4)
    source, same = random.Random(7), 0
    for _ in range(rounds):
        engine.drop_own_cache()
        frame = source.choice(engine.blobs())
        engine.store.arena.buffer[frame.offset + source.randrange(frame.blob_bytes)] ^= (
            1 << source.randrange(8)
        )
        (loaded,) = engine.run(tokens, max_tokens=4)
        same += loaded["tokens"] == cold["tokens"]
    result = {"same": same, "metrics": engine.metrics(), "leaks": engine.leaks()}
    engine.close()
    return result


def salts():
    engine = Engine()
    tokens = prompt(1, 300)
    (one,) = engine.run(tokens, salt="a")
    engine.drop_own_cache()
    (two,) = engine.run(tokens, salt="b")
    engine.drop_own_cache()
    (back,) = engine.run(tokens, salt="a")
    engine.close()
    return {"one": one, "two": two, "back": back}


def restart(path, dtypes=("bfloat16", "bfloat16", "float32", "bfloat16"), chunkings=(1, 1, 1, 2)):
    """Run one engine after the other on the same arena file."""
    tokens, results = prompt(1, 300), []
    for dtype, blocks_per_chunk in zip(dtypes, chunkings, strict=True):
        engine = Engine(
            extra={"arena_path": path, "blocks_per_chunk": blocks_per_chunk}, dtype=dtype
        )
        (result,) = engine.run(tokens)
        results.append(result)
        engine.close()
    return results


def flip_on_disk(folder, at):
    """Flip a bit in the middle of the blob at place *at* of those that lie in a closed disk folder."""
    from kvferry.kvops.store.disk.files import BlobFiles
    from kvferry.kvops.store.io_threads import ThreadIo

    io = ThreadIo(threads=1)
    with BlobFiles.open(folder, io, quota_bytes=DISK_BYTES, read_only=True) as files:
        entries = sorted(files.entries(), key=lambda entry: entry.place.generation)
        place = entries[at].place
    io.close(1)
    with open(folder / f"seg-{place.segment:08x}.blobs", "r+b") as file:
        file.seek(place.offset + place.header_bytes + place.blob_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return len(entries)


DISK_BYTES = 256 << 20


def disk(
    folder, model="llama", blocks_per_chunk=1, flip=None, extra=None, restart=True, length=400
):
    """Run, restart with a cold arena, and run again: what is loaded then was on the disk."""
    folder = pathlib.Path(folder)
    settings = {
        "disk_path": str(folder), "disk_bytes": DISK_BYTES, "disk_admission": "all", "blocks_per_chunk": blocks_per_chunk,
        **(extra or {}),
    }  # fmt: skip
    engine = Engine(model, extra=settings)
    tokens = prompt(1, length)
    (cold,) = engine.run(tokens)
    (other,) = engine.run(prompt(2, length))
    written = {}
    if restart:
        engine.close()
        blobs = flip_on_disk(folder, flip) if flip is not None else 0
        engine = Engine(model, extra=settings)
    else:
        # everything out of memory, by the way of eviction
        engine.connector._manager._disk._tier.flush(10)
        written = engine.metrics()
        blobs = len(engine.store.frames)
        engine.store.delete(list(engine.store.frames))
        engine.drop_own_cache()
    before = engine.external_hits()
    (loaded,) = engine.run(tokens)
    hits = engine.external_hits() - before
    engine.drop_own_cache()
    (again,) = engine.run(tokens)
    result = {
        "cold": cold, "other": other, "loaded": loaded, "again": again, "hits": hits, "blobs": blobs,
        "written": written, "metrics": engine.metrics(), "leaks": engine.leaks(),
    }  # fmt: skip
    engine.close()
    return result


def preempted(model="llama"):
    """Run more requests than fit, so that some are preempted and come back."""
    prompts = [prompt(seed, 100) for seed in range(6)]
    small = {
        "max_model_len": 256,
        "num_gpu_blocks_override": 24,
        "max_num_seqs": 8,
        "dtype": "float32",
    }
    plain = Engine(model, connector=False, **{**small, "num_gpu_blocks_override": 2000})
    expected = plain.run(*prompts, max_tokens=120)
    plain.close()
    engine = Engine(model, extra={"offload_prompt_only": False}, **small)
    first = engine.run(*prompts, max_tokens=120)
    engine.drop_own_cache()
    second = engine.run(*prompts, max_tokens=120)
    preemptions = sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")
    result = {
        "expected": [r["tokens"] for r in expected], "first": [r["tokens"] for r in first],
        "second": [r["tokens"] for r in second], "preemptions": preemptions, "hits": engine.external_hits(),
        "metrics": engine.metrics(), "leaks": engine.leaks(),
    }  # fmt: skip
    engine.close()
    return result


def step_through(engine, prompts, between=lambda running: None, max_tokens=8):
    """Run all prompts at once, step by step; return the tokens of those that were not aborted."""
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
    )
    for number, tokens in enumerate(prompts):
        core.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
    running, done = set(range(len(prompts))), {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                number = int(output.request_id.split("-")[0])
                running.discard(number)
                done[number] = list(output.outputs[0].token_ids)
        aborted = between(running)
        if aborted is not None:
            running.discard(aborted)
            core.abort_request([str(aborted)])
    return done


def resets(model="hybrid", rounds=5):
    """Reset the engine's cache and ours again and again while requests with common beginnings run, and abort some."""
    source = random.Random(3)
    bases = [prompt(1000 + number, 700) for number in range(5)]
    prompts = [
        source.choice(bases)[: source.randrange(100, 680)]
        + prompt(source.randrange(10**6), source.randrange(1, 60))
        for _ in range(30)
    ]
    small = {"max_num_seqs": 16, "dtype": "float32", "num_gpu_blocks_override": 110}
    plain = Engine(model, connector=False, **{**small, "num_gpu_blocks_override": 2000})
    expected = step_through(plain, prompts)
    plain.close()
    extra = {"arena_bytes": "16MiB", "blocks_per_chunk": 4, "offload_prompt_only": False}
    engine = Engine(model, extra=extra, **small)
    counts = {"resets": 0, "compared": 0, "wrong": 0}

    def between(running):
        if source.random() < 0.03:
            engine.llm.reset_prefix_cache()
        if source.random() < 0.03:
            counts["resets"] += 1
            engine.llm.reset_prefix_cache(reset_connector=True)
        return source.choice(sorted(running)) if running and source.random() < 0.15 else None

    for _ in range(rounds):
        done = step_through(engine, prompts, between)
        counts["compared"] += len(done)
        counts["wrong"] += sum(expected[number] != tokens for number, tokens in done.items())
        engine.drop_own_cache()
    result = {**counts, "hits": engine.external_hits(), "leaks": engine.leaks()}
    engine.close()
    return result


def multi():
    """Run as a child of vLLM's MultiConnector, whose statistics are rebuilt by the class's name."""
    child = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"arena_bytes": "64MiB"},
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [child]},
    }
    engine = Engine(transfer=transfer)
    tokens = prompt(1, 300)
    (cold,) = engine.run(tokens)
    engine.drop_own_cache()
    (loaded,) = engine.run(tokens)
    result = {"cold": cold, "loaded": loaded, "hits": engine.external_hits()}
    engine.close()
    return result


def by_name():
    from kvferry.vllm import register

    register()
    register()
    engine = Engine(transfer={"kv_connector_module_path": None})
    tokens = prompt(1, 300)
    (cold,) = engine.run(tokens)
    engine.drop_own_cache()
    (loaded,) = engine.run(tokens)
    engine.close()
    return {"cold": cold, "loaded": loaded}


def ranks(model="llama"):
    """Run two tensor-parallel ranks, each in a process."""
    engine = Engine(
        model, tensor_parallel_size=2, distributed_executor_backend="mp", dtype="float32"
    )
    tokens = prompt(1, 400)
    (cold,), (other,) = engine.run(tokens), engine.run(prompt(2, 400))
    engine.drop_own_cache()
    (loaded,) = engine.run(tokens)
    engine.drop_own_cache()
    frame = engine.blobs()[2]
    # in the second rank's part
    engine.store.arena.buffer[frame.offset + frame.blob_bytes // 4 * 3] ^= 1
    (corrupted,) = engine.run(tokens)
    result = {
        "cold": cold, "other": other, "loaded": loaded, "corrupted": corrupted, "metrics": engine.metrics(),
        "leaks": engine.leaks(),
    }  # fmt: skip
    engine.close()
    return result


LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1024, "norm_eps": 1e-5,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "conv_L_cache": 3, "conv_dim": 128, "conv_bias": False,
    "block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "torch_dtype": "bfloat16",
    "layer_types": ["conv", "full_attention", "conv", "full_attention"], "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
"""A model with state-space groups next to attention."""


def recurrent():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(LFM2, file)
        engine = Engine(model_path=folder, load_format="dummy")
        (first,), (second,) = engine.run(prompt(1, 300)), engine.run(prompt(1, 300))
        name = type(engine.connector).__name__
        engine.close()
    return {"connector": name, "first": first["tokens"], "second": second["tokens"]}


def refused(extra, transfer=None, model="llama"):
    """Start an engine that must not start; return what it says."""
    try:
        Engine(model, extra=extra, transfer=transfer).close()
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "cause": repr(error.__cause__)}
    finally:
        # vLLM keeps the connector of an engine that did not start, and would give it to the next one
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()
    return {"type": None}


def refused_on_a_full_tmpfs(folder):
    """As *refused*, with the arena on a tmpfs of 20 MiB that only this thread can see."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive_private = 0x20000, 0x4000 | 0x40000
    if (
        libc.unshare(new_namespace)
        or libc.mount(None, b"/", None, recursive_private, None)
        or libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=20m")
    ):
        return {"skip": os.strerror(ctypes.get_errno())}
    try:
        result = refused({"arena_path": os.path.join(folder, "full.arena")})
        return {**result, "left": os.listdir(folder)}
    finally:
        libc.umount(folder.encode())


def answer(case, arguments):
    """Run one case; return its result, or what went wrong."""
    try:
        return {"result": globals()[case](**arguments)}
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()


def serve(fd):
    """Answer cases that come as JSON lines on stdin, on the pipe *fd*."""
    with os.fdopen(fd, "w") as pipe:
        for line in sys.stdin:
            case, arguments = json.loads(line)
            pipe.write(json.dumps(answer(case, arguments)) + "\n")
            pipe.flush()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        done = answer(sys.argv[1], json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
        print(json.dumps(done), flush=True)
        sys.exit("error" in done)
