"""The machine a probe looks at: real by default, a folder of made-up files in tests."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_TORCH_PROBE = """
import json, torch
devices = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        devices.append({"name": p.name, "capability": [p.major, p.minor], "total_bytes": total,
                        "free_bytes": free, "sms": p.multi_processor_count})
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}))
"""
TORCH_TIMEOUT_S = 120
"""Importing torch from a cold disk takes tens of seconds."""


def _ask_torch() -> Any:
    """Ask torch in another process: a broken driver may hang or kill whoever imports it.

    Raises:
        RuntimeError: it did not answer; the message has the last line of what it said.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer from torch in {TORCH_TIMEOUT_S} s") from None
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise RuntimeError(last)
    return json.loads(done.stdout.splitlines()[-1])


def _memlock() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _disk(path: Path) -> tuple[int, int]:
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where probes look."""

    root: Path = Path("/")
    """Folder that holds ``proc``, ``sys`` and ``dev``."""
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    python: tuple[int, int, int] = sys.version_info[:3]
    package_version: Callable[[str], str] = importlib.metadata.version
    """Version of an installed distribution; raises PackageNotFoundError."""
    ask_torch: Callable[[], Any] = _ask_torch
    memlock: Callable[[], int] = _memlock
    """Soft limit of locked memory, in bytes; negative: none."""
    disk: Callable[[Path], tuple[int, int]] = _disk
    """Size of a file system and what is free on it for us, in bytes."""
    usable_cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
    uid: int = dataclasses.field(default_factory=os.geteuid)

    @property
    def shm(self) -> Path:
        """Folder of the tmpfs for shared memory."""
        return self.root / "dev/shm"

    def read(self, path: str) -> str | None:
        """Return the text of a file below the root, stripped; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def version(self, *distributions: str) -> tuple[str, str] | None:
        """Return the first of *distributions* that is installed, with its version."""
        for name in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return name, self.package_version(name)
        return None

    def meminfo(self) -> dict[str, int]:
        """Return ``/proc/meminfo`` in bytes; counts of pages stay counts."""
        values = {}
        for line in (self.read("proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            number, _, unit = rest.strip().partition(" ")
            if number.isdigit():
                values[name] = int(number) * (1024 if unit == "kB" else 1)
        return values
