"""The parts of vLLM's offloading interface that this folder stands on, read from source text without importing it.

Each entry is ``file::Class.method`` with its parameters: a trailing ``=`` says "has a default", a class alone is a
dataclass with its fields. ``engine_signatures.json`` holds what each supported version has (written by
``scripts/record_signatures.py``); ``compat.py`` compares a newer engine with the newest of them.
"""

import ast
import json
from collections.abc import Mapping
from pathlib import Path

Signatures = dict[str, list[str]]

_OFFLOAD = "v1/kv_offload/"
_CONNECTOR = "distributed/kv_transfer/kv_connector/"

SERVED: dict[str, dict[str, tuple[str, ...]]] = {
    _OFFLOAD + "base.py": {
        "OffloadingManager": (
            "lookup", "prepare_load", "touch", "complete_load", "prepare_store", "complete_store", "on_new_request",
            "on_request_finished", "on_schedule_end", "has_pending_work", "reset_cache", "get_stats", "shutdown",
        ),
        "OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait", "shutdown"),
        "OffloadingSpec": ("build_metric_definitions", "get_manager", "get_worker"),
    },
    _CONNECTOR + "v1/base.py": {
        "KVConnectorBase_V1": (
            "__init__", "get_transfer_results", "get_block_ids_with_load_errors", "get_handshake_metadata",
            "set_xfer_handshake_metadata_pp_aware", "get_kv_connector_stats",
        ),
    },
    _CONNECTOR + "v1/offloading_connector.py": {
        "OffloadingConnector": ("start_load_kv", "build_prom_metrics", "shutdown"),
    },
}  # fmt: skip
"""Methods that vLLM calls on our classes: they must take exactly what is passed."""

CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    _OFFLOAD + "base.py": {
        "OffloadingSpec": ("__init__",),
        "GPULoadStoreSpec": ("__init__",),
        "ReqContext": ("", "set_state", "get_state"),
        "PrepareStoreOutput": ("",),
        "TransferResult": ("",),
        "CanonicalKVCaches": ("",),
        "CanonicalKVCacheTensor": ("",),
        "CanonicalKVCacheRef": ("",),
        "OffloadingCounterMetadata": ("",),
        "OffloadingGaugeMetadata": ("",),
        "OffloadingHistogramMetadata": ("",),
    },
    _OFFLOAD + "config.py": {
        "OffloadingConfig": ("",),
        "OffloadingGroupConfig": ("",),
        "OffloadingCacheConfig": ("",),
        "OffloadingParallelConfig": ("",),
    },
    _CONNECTOR + "v1/base.py": {"KVConnectorTransferResults": ("",)},
    _CONNECTOR + "v1/offloading_connector.py": {"OffloadingConnector": ("__init__",)},
    _CONNECTOR + "v1/offloading/common.py": {"TransferJob": ("",), "OffloadingConnectorMetadata": ("",)},
    _CONNECTOR + "v1/offloading/metrics.py": {
        "OffloadingConnectorStats": ("increase_counter", "set_gauge", "observe_histogram", "is_empty"),
    },
    _CONNECTOR + "factory.py": {"KVConnectorFactory": ("register_connector",)},
}  # fmt: skip
"""What we call and read: a newer vLLM may add fields and parameters that have defaults."""

_RECORDED = Path(__file__).with_name("engine_signatures.json")


def read_signatures(package: Path) -> Signatures:
    """Return the signatures found under *package*, the folder of an unpacked or installed ``vllm`` package.

    What is missing there is missing in the result.
    """
    found: Signatures = {}
    for table in (SERVED, CALLED):
        for file, classes in table.items():
            source = package / file
            if not source.is_file():
                continue
            nodes = {
                node.name: node
                for node in ast.parse(source.read_text(encoding="utf-8")).body
                if isinstance(node, ast.ClassDef)
            }
            for name, methods in classes.items():
                for method in methods if name in nodes else ():
                    parameters = (
                        _fields(nodes[name]) if not method else _parameters(nodes[name], method)
                    )
                    if parameters is not None:
                        found[_label(file, name, method)] = parameters
    return found


def recorded() -> dict[str, Signatures]:
    """Return the recorded signatures by minor version, such as ``"0.32"``, oldest first."""
    table: dict[str, Signatures] = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return table


def differences(expected: Mapping[str, list[str]], found: Mapping[str, list[str]]) -> list[str]:
    """Say what in *found* we could not work with, given that *expected* works; an empty list is a match."""
    served = {
        _label(file, name, method)
        for file, classes in SERVED.items()
        for name, methods in classes.items()
        for method in methods
    }
    said = []
    for label, parameters in expected.items():
        if label not in found:
            said.append(f"{label} is gone")
            continue
        new = found[label]
        added = new[len(parameters) :]
        # a dataclass or a method of vLLM may grow by things with defaults; a call to us may not
        may_grow = label not in served and all(name.endswith("=") for name in added)
        if new != parameters and not (may_grow and new[: len(parameters)] == parameters):
            said.append(f"{label} takes ({', '.join(new)}), not ({', '.join(parameters)})")
    return said


def _label(file: str, name: str, method: str) -> str:
    return f"{file}::{name}" + (f".{method}" if method else "")


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        f"{item.target.id}=" if item.value is not None else item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    ]


def _parameters(node: ast.ClassDef, method: str) -> list[str] | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == method:
            args = item.args
            plain = [argument.arg for argument in [*args.posonlyargs, *args.args]]
            first_default = len(plain) - len(args.defaults)
            names = [f"{name}=" if at >= first_default else name for at, name in enumerate(plain)]
            if args.vararg or args.kwonlyargs:
                names.append(f"*{args.vararg.arg}" if args.vararg else "*")
            for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
                names.append(argument.arg if default is None else f"{argument.arg}=")
            if args.kwarg:
                names.append(f"**{args.kwarg.arg}")
            return names
    return None
