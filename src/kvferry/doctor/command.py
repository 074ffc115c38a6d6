"""`kvferry doctor`: run every probe, print the report."""

import argparse
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvferry import __version__

from . import arenas, memory, software
from .machine import Machine
from .report import Finding, as_json, as_text, collect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options."""
    parser.add_argument(
        "--arena", metavar="PATH", action="append", default=[], help="look at this arena file too"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if anything is bad; 0 otherwise"
    )


def examine(
    machine: Machine,
    extra_config: Mapping[str, Any] | None = None,
    named_arenas: Iterable[str] = (),
) -> list[Finding]:
    """Return everything there is to say about *machine*; raises nothing."""
    config, settings = arenas.settings(machine, extra_config)

    def bound(probe: Callable[..., Iterable[Finding]], *args: object) -> Callable[[], Any]:
        call = functools.partial(probe, machine, *args)
        return functools.update_wrapper(call, probe)

    return list(
        collect(
            [
                ("versions", bound(software.versions)),
                ("versions", bound(software.vllm)),
                ("devices", bound(software.devices)),
                ("devices", bound(software.cpu)),
                ("memory", bound(memory.locked_memory)),
                ("memory", bound(memory.shared_memory)),
                ("memory", bound(memory.available_memory)),
                ("memory", bound(memory.room, config)),
                ("memory", bound(memory.huge_pages)),
                ("memory", bound(memory.numa)),
                ("settings", lambda: settings),
                ("arenas", bound(arenas.arenas, config, named_arenas)),
            ]
        )
    )


def run(args: argparse.Namespace, machine: Machine | None = None) -> int:
    """Print the report; return the exit code."""
    if sys.stderr.isatty():
        print("looking at this machine …", file=sys.stderr)
    findings = examine(machine or Machine(), args.extra_config, args.arena)
    if args.json:
        print(json.dumps(as_json(findings, __version__), indent=2))
    else:
        columns = min(120, shutil.get_terminal_size((100, 24)).columns)
        print(as_text(findings, __version__, max(60, columns)), end="")
    return int(args.strict and any(finding.level == "bad" for finding in findings))
