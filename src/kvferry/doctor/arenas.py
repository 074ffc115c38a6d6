"""Probes for settings and for the arenas found on this machine."""

import importlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvferry.kvops.config import Config, format_bytes, unknown_variables
from kvferry.kvops.errors import ConfigError

from .machine import Machine
from .report import Finding

_PRIVATE = re.compile(r"kvferry-\d+-[0-9a-f]{16}\.arena")
"""Names of arenas that should be gone with their engine."""


_PAGE = 4096
"""An arena is whole pages; ``arena_bytes`` is rounded up."""


def settings(
    machine: Machine, extra_config: Mapping[str, Any] | None
) -> tuple[Config, list[Finding]]:
    """Return the settings, or the defaults where they are unusable, and what there is to say."""
    findings = []
    try:
        config = Config.read(extra_config, machine.environ)
    except ConfigError as error:
        advice = "Correct it; the settings below and the checks of memory use defaults instead."
        findings.append(Finding("settings", "usable", f"no: {error}", "bad", advice))
        config = Config()
    for row in config.explain():
        value = f"{row.value} ({row.source})"
        data = {"value": getattr(config, row.name), "source": row.source}
        findings.append(Finding("settings", row.name, value, data=data))
    for variable, near in unknown_variables(machine.environ).items():
        if near:
            advice = f"It has no effect; did you mean {near}?"
            findings.append(Finding("settings", variable, "no such setting", "warn", advice))
    return config, findings


def arenas(machine: Machine, config: Config, named: Iterable[str]) -> Iterator[Finding]:
    """Report on every arena in shared memory, at ``arena_path`` and in *named*."""
    places = sorted(
        path
        for path in (*machine.shm.glob("kvferry*"), *machine.shm.glob("kvferry*/arena"))
        if path.is_file()
    )
    asked = [Path(path) for path in named]
    ours = machine.root / config.arena_path.lstrip("/") if config.arena_path else None
    if ours and ours.exists():
        asked.insert(0, ours)
    elif ours:
        yield Finding("arenas", str(ours), "not there yet; the engine makes it")
    for path in dict.fromkeys([*places, *asked]):
        yield _arena(machine, path, path in asked, config.arena_bytes if path == ours else None)
    if not places and not asked and not ours:
        yield Finding("arenas", "found", f"none in {machine.shm}", data=[])


def _arena(machine: Machine, path: Path, is_asked: bool, arena_bytes: int | None) -> Finding:
    """Report on one; *arena_bytes* is the size it has to have, if known."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_uid != machine.uid and not is_asked:
            value = f"belongs to user id {status.st_uid}; not looked at"
            return Finding("arenas", str(path), value, data={"uid": status.st_uid})
        report = _inspect(path)
        if report.get("error"):
            raise OSError(report["error"])
    except FileNotFoundError:
        advice = "Check the path; a private arena is gone with its engine."
        return Finding("arenas", str(path), "no such file", "bad", advice)
    except Exception as error:
        advice = "If no engine uses it, remove it; the next one makes it anew."
        value = f"not readable: {error}"
        return Finding("arenas", str(path), value, "bad", advice, {"error": str(error)})
    frames, size = report["frames"], report["arena_bytes"]
    attached = report.get("attached") or 0
    held = report["owner"] or (f"no owner, {attached} attached" if attached else "resting")
    used = f"{format_bytes(report['used_bytes'])} of {format_bytes(size)} used"
    counts = ", ".join(f"{count} {state}" for state, count in frames.items())
    value = f"{held}; format {report['format_version']}; {used}; frames: {counts or 'none'}"
    level, advice = "ok", ""
    if arena_bytes is not None and -(-arena_bytes // _PAGE) * _PAGE != size:
        level = "bad"
        advice = f"Set arena_bytes to {size}, which it has, or remove the file to start anew."
    elif held == "resting" and _PRIVATE.fullmatch(path.name):
        level = "warn"
        advice = f"Left by an engine that was killed: rm {path}"
    elif frames.get("bad"):
        level = "warn"
        advice = "Some blobs failed their checksum: check this machine's memory if there are more."
    return Finding("arenas", str(path), value, level, advice, report)


def _inspect(path: Path) -> dict[str, Any]:
    # imported here: a doctor has to print even where the store cannot be imported
    module = importlib.import_module("kvferry.kvops.store.health")
    report: dict[str, Any] = module.inspect_arena(os.fspath(path))
    return report
