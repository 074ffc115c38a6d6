"""Settings: one frozen dataclass, read once, from vLLM's ``kv_connector_extra_config`` or the environment.

Precedence, highest first: extra config, ``KVFERRY_<NAME>``, the default below. An environment
variable that is set but empty counts as not set. Names carry their unit.

This file is the only place that knows the settings: `markdown_table` is the table in the
documentation, `Config.explain` is what ``kvferry config --explain`` prints.
"""

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import ConfigError
from .settings import (
    GIB,
    KIB,
    MIB,
    TIB,
    AbsolutePath,
    Choice,
    Kind,
    Size,
    Whole,
    format_bytes,
    parse_bytes,
    shown,
)

__all__ = [
    "ENV_PREFIX",
    "GIB",
    "KIB",
    "MIB",
    "OTHER_VARIABLES",
    "TIB",
    "VLLM_KEYS",
    "Config",
    "Row",
    "format_bytes",
    "markdown_table",
    "parse_bytes",
    "unknown_variables",
]

logger = logging.getLogger(__name__)

ENV_PREFIX = "KVFERRY_"
"""Start of every environment variable that is a setting."""

VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "canonical_layout",
        "self_describing_kv_events",
        "sync_load_budget_bytes",
    }
)
"""Keys of the same dictionary that belong to vLLM's offloading connector: passed through untouched."""

_OTHER_NAMES = {
    "cpu_bytes_to_use": "arena_bytes",
    "cpu_bytes_to_use_per_rank": "arena_bytes",
    "num_cpu_blocks": "arena_bytes",
    "eviction_policy": "eviction",
    "path": "arena_path",
    "root_dir": "disk_path",
    "disk_capacity_bytes": "disk_bytes",
    "kv_load_failure_policy": "on_load_failure",
}
"""What neighbours call our settings; only used to answer an unknown key."""

OTHER_VARIABLES = {
    "KVFERRY_TRACE": "File for a trace of what each process does, such as /tmp/run.json; "
    "every process adds its id to the name. Unset: none is made.",
}
"""Variables of ours that are no settings, with their help; only the environment has them."""

_CAPPED = ", capped at half of arena_bytes"


class Row(NamedTuple):
    """One setting as it stands."""

    name: str
    value: str
    """Shown in its unit."""
    source: str
    """``default``, ``extra config``, or the environment variable's name."""
    unit: str
    help: str
    default: str
    accepts: str
    variable: str
    """The environment variable."""


def _setting(default: Any, kind: Kind, unit: str, text: str) -> Any:
    metadata = {"kind": kind, "unit": unit, "help": text}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Every setting, with its default, its range and its help.

    Make one with `Config.read`. The constructor checks its arguments too.

    Raises:
        ConfigError: a value is not usable.
    """

    arena_bytes: int = _setting(
        4 * GIB,
        Size(16 * MIB, 64 * TIB),
        "bytes",
        "Memory for stored KV blocks, frame headers and index, for one engine; reserved when it starts.",
    )
    arena_path: str | None = _setting(
        None,
        AbsolutePath(),
        "path",
        "File on a tmpfs (such as /dev/shm/kvferry.arena) that holds the arena and survives restarts. "
        "None: private to this engine, gone with it.",
    )
    verify: str = _setting(
        "always",
        Choice(("always", "sampled", "off")),
        "",
        "Which loads compare the checksum of every byte first: all, 1 of 16, or none. "
        "Under off none are made: with always, an engine drops what another one stored so.",
    )
    eviction: str = _setting(
        "lru",
        Choice(("lru",)),
        "",
        "Which chunk makes room when the arena is full: the least recently used.",
    )
    max_inflight_bytes: int = _setting(
        1 * GIB,
        Size(4 * KIB, 64 * TIB),
        "bytes",
        "Bound on bytes being stored at one time; beyond it stores are skipped and counted. "
        "Never more than half of arena_bytes.",
    )
    transfer_threads: int = _setting(
        1,
        Whole(1, 64),
        "threads",
        "Threads that copy blocks, in each worker process.",
    )
    on_load_failure: str = _setting(
        "recompute",
        Choice(("recompute", "fail")),
        "",
        "What the engine does with a request whose blocks could not be loaded: "
        "compute them again, or fail the request.",
    )
    pending_timeout_ms: int = _setting(
        2000,
        Whole(0, 600_000),
        "milliseconds",
        "How long one request waits for blocks that are being stored, or read from the disk; then it computes what "
        "has not come. 0: not at all.",
    )
    disk_path: str | None = _setting(
        None,
        AbsolutePath(is_folder=True),
        "path",
        "Folder on a local disk for copies of chunks, which outlive memory and restarts; made if need be, for one "
        "engine at a time. None: no disk.",
    )
    disk_bytes: int = _setting(
        64 * GIB,
        Size(64 * MIB, 1024 * TIB),
        "bytes",
        "Quota for what kvferry has in disk_path, taken in files of up to 256 MiB; what was used least recently makes "
        "room.",
    )
    disk_free_floor_bytes: int = _setting(
        4 * GIB,
        Size(1 * MIB, 1024 * TIB),
        "bytes",
        "Free space of its file system that is left alone: below it the folder does not grow, whatever the quota.",
    )
    disk_write: str = _setting(
        "commit",
        Choice(("commit", "pressure")),
        "",
        "When a chunk that is worth it is written: at once, or when memory is nearly full and it would go next.",
    )
    disk_admission: str = _setting(
        "reused",
        Choice(("reused", "all")),
        "",
        "What is worth writing: chunks that are used, or stored, a second time, or everything.",
    )
    disk_sync: str = _setting(
        "batch",
        Choice(("never", "batch", "always")),
        "",
        "What a power failure may take: all that the file system has not settled yet, the last second, or nothing. A "
        "killed process loses nothing.",
    )
    disk_io: str = _setting(
        "auto",
        Choice(("auto", "aio", "threads")),
        "",
        "How files are read and written: Linux AIO, threads, or what is faster on that disk in a short trial.",
    )
    disk_timeout_ms: int = _setting(
        5000,
        Whole(10, 600_000),
        "milliseconds",
        "After which a read or write counts as failed; three failures in a row switch the disk off for a while.",
    )
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Where each value that is not a default came from."""

    def __post_init__(self) -> None:
        """Check every value and apply the bound of in-flight bytes."""
        sources = dict(self.sources)
        for field in _fields():
            value = getattr(self, field.name)
            if field.name not in sources and value != field.default:
                sources[field.name] = "argument"
            kind: Kind = field.metadata["kind"]
            try:
                object.__setattr__(self, field.name, kind.check(value))
            except ValueError as error:
                raise ConfigError(
                    _sentence(field.name, error, sources.get(field.name, "argument"))
                ) from None
        if self.max_inflight_bytes > self.arena_bytes // 2:
            object.__setattr__(self, "max_inflight_bytes", self.arena_bytes // 2)
            source = sources.get("max_inflight_bytes", "default")
            if not source.endswith(_CAPPED):
                sources["max_inflight_bytes"] = source + _CAPPED
        object.__setattr__(self, "sources", sources)

    @classmethod
    def read(
        cls,
        extra_config: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> "Config":
        """Merge the sources and check every value.

        Args:
            extra_config: vLLM's ``kv_connector_extra_config``; keys of `VLLM_KEYS` are not looked at.
            environ: environment variables; None means this process's.

        Raises:
            ConfigError: a key is unknown (the nearest known key is suggested) or a value is not
                usable. The message names the key, what was expected, what came and where it came from.
        """
        environ = os.environ if environ is None else environ
        extra_config = {} if extra_config is None else extra_config
        if not isinstance(extra_config, Mapping):
            raise ConfigError(
                "kv_connector_extra_config must be a JSON object such as "
                f'{{"arena_bytes": "8GiB"}}; got {shown(extra_config)}'
            )
        for key in extra_config:
            _refuse_unknown(key)
        for variable, near in unknown_variables(environ).items():
            if near:
                logger.warning("%s is not a setting; did you mean %s?", variable, near)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for field in _fields():
            name, variable = field.name, ENV_PREFIX + field.name.upper()
            if name in extra_config:
                values[name], sources[name] = extra_config[name], "extra config"
            elif environ.get(variable):
                kind: Kind = field.metadata["kind"]
                sources[name] = variable
                try:
                    values[name] = kind.parse(environ[variable])
                except ValueError as error:
                    raise ConfigError(_sentence(name, error, variable)) from None
        return cls(**values, sources=sources)

    def explain(self) -> list[Row]:
        """Return every setting with its value and where that came from, in the order above."""
        rows = []
        for field in _fields():
            kind: Kind = field.metadata["kind"]
            rows.append(
                Row(
                    name=field.name,
                    value=kind.show(getattr(self, field.name)),
                    source=self.sources.get(field.name, "default"),
                    unit=field.metadata["unit"],
                    help=field.metadata["help"],
                    default=kind.show(field.default),
                    accepts=kind.accepts,
                    variable=ENV_PREFIX + field.name.upper(),
                )
            )
        return rows


def markdown_table() -> str:
    """Return the table of settings that the documentation shows, ending in a line feed."""
    lines = ["| key | default | accepts | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{row.name}` | {row.default} | {row.accepts.replace(chr(34), '`')} | {row.help} |"
        for row in Config().explain()
    ]
    return "\n".join(lines) + "\n"


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the ``KVFERRY_*`` variables that we do not know, each with the near one it may mean."""
    known = [ENV_PREFIX + field.name.upper() for field in _fields()] + list(OTHER_VARIABLES)
    found: dict[str, str | None] = {}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
            found[variable] = near[0] if near else None
    return found


def _fields() -> list["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(Config) if "kind" in field.metadata]


def _sentence(name: str, error: ValueError, source: str) -> str:
    origin = f"the environment variable {source}" if source.startswith(ENV_PREFIX) else source
    return f"{name} must be {error} (from {origin})"


def _refuse_unknown(key: object) -> None:
    names = [field.name for field in _fields()]
    if key in names or key in VLLM_KEYS:
        return
    if not isinstance(key, str):
        raise ConfigError(f"a key of kv_connector_extra_config must be text; got {shown(key)}")
    known = names + sorted(VLLM_KEYS)
    near = _OTHER_NAMES.get(key) or next(
        iter(difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)), None
    )
    hint = f"; did you mean {near!r}?" if near else f"; known keys: {', '.join(known)}"
    raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config{hint}")
