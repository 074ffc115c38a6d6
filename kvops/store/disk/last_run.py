"""`stats.json`: what the last owner of a folder counted and timed, for whoever looks at the folder later.

It is written whole or not at all, and is no part of what the tier relies on: without it, or with another version of it,
only this is not known.

    {"version": 1, "written": Unix time, "pid": of the owner, "stats": {name: number or text}, "stages": see kvops/trace.py}
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "stats.json"
VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class LastRun:
    """What an owner wrote last.

    Attributes:
        written: when, Unix time in seconds.
        pid: the owner's process.
        stats: as `DiskTier.stats` gives them, with ``quota_bytes``.
        stages: as `Stages.snapshot` gives them.
    """

    written: float
    pid: int
    stats: dict[str, Any]
    stages: dict[str, dict[str, Any]]


def write(folder: Path, stats: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the file in one step.

    Raises:
        OSError: what was there before is still there.
    """
    content = {
        "version": VERSION, "written": time.time(), "pid": os.getpid(),
        "stats": dict(stats), "stages": {name: dict(stage) for name, stage in stages.items()},
    }  # fmt: skip
    part = folder / f"{NAME}.tmp"
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as stream:
            json.dump(content, stream, separators=(",", ":"))
        part.replace(folder / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def read(folder: Path) -> LastRun | None:
    """Return what *folder* has, or None if there is nothing that this version understands."""
    try:
        content = json.loads((folder / NAME).read_text())
        if content["version"] != VERSION:
            return None
        stages = {str(name): dict(stage) for name, stage in content["stages"].items()}
        return LastRun(
            float(content["written"]), int(content["pid"]), dict(content["stats"]), stages
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
