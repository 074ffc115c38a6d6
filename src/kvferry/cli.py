"""The command line: ``kvferry doctor | config | demo | disk``.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done; 1 the answer is no, or the
command failed; 2 the command line or a setting is wrong; 130 interrupted; 141 the reader of a pipe
went away. Commands are imported when they are run, so that help comes at once.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from kvferry import __version__
from kvferry.kvops.config import OTHER_VARIABLES, Config, markdown_table
from kvferry.kvops.errors import ConfigError, KVFerryError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TERMINATED = 143
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_DOCTOR_EXAMPLES = """\
examples:
  kvferry doctor
  kvferry doctor --strict --extra-config '{"arena_bytes": "64GiB"}'
  kvferry doctor --arena /dev/shm/kvferry.arena --json
"""
_CONFIG_EXAMPLES = """\
examples:
  kvferry config
  kvferry config --explain
  KVFERRY_VERIFY=sampled kvferry config --explain --extra-config '{"arena_bytes": "8GiB"}'
  kvferry config --json
"""
_DEMO_EXAMPLES = """\
examples:
  kvferry demo
  kvferry demo --model all --json
"""
_DISK_EXAMPLES = """\
examples:
  kvferry disk stats /mnt/nvme/kvferry
  kvferry disk verify --json /mnt/nvme/kvferry
  kvferry disk gc /mnt/nvme/kvferry
  kvferry disk wipe --yes /mnt/nvme/kvferry
"""
_EPILOG = """\
examples:
  kvferry doctor             is this machine ready, and if not, what to do
  kvferry config --explain   every setting, its value, where it came from
  kvferry demo               store and load KV blocks with a real engine and small models, no download
  kvferry disk stats FOLDER  what the disk tier holds; verify, gc and wipe are the other verbs
"""
_LAZY = {
    "doctor": "kvferry.doctor.command",
    "demo": "kvferry.demo.command",
    "disk": "kvferry.disk.command",
}
"""Commands with a module of their own, which has add_arguments(parser) and run(args) -> int."""


class _Terminated(BaseException):
    """SIGTERM came."""


def _on_terminate(number: int, frame: object) -> None:
    raise _Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    try:
        # whoever ends us politely gets what we started cleaned up, as with Ctrl-C
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _on_terminate)
        try:
            code = _run(sys.argv[1:] if argv is None else list(argv))
        except SystemExit as end:
            # argparse ends so after help and usage errors
            code = end.code if isinstance(end.code, int) else 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("kvferry: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _Terminated:
        print("kvferry: terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except BrokenPipeError:
        # what is still buffered has no reader; without this the interpreter complains at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def _run(argv: list[str]) -> int:
    args = _parser(argv).parse_args(argv)
    try:
        if args.command == "config":
            return _config(args)
        return int(importlib.import_module(_LAZY[args.command]).run(args))
    except KVFerryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Carry the KV cache blocks of an LLM server to shared memory and back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    doctor = _add(commands, "doctor", "report on this machine: versions, memory, arenas", argv)
    doctor.epilog = _DOCTOR_EXAMPLES
    _add_settings(doctor)

    config = _add(commands, "config", "show the settings in effect", argv)
    config.epilog = _CONFIG_EXAMPLES
    form = config.add_mutually_exclusive_group()
    form.add_argument("--explain", action="store_true", help="say where each value came from")
    form.add_argument("--markdown", action="store_true", help="print the table of all settings")
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    _add_settings(config)

    demo = _add(commands, "demo", "store and load with a real engine and small models", argv)
    demo.epilog = _DEMO_EXAMPLES

    disk = _add(commands, "disk", "look at, check, clean or empty the disk tier's folder", argv)
    disk.epilog = _DISK_EXAMPLES
    return parser


def _add(commands: Any, name: str, text: str, argv: Sequence[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if name in _LAZY and name == next((word for word in argv if not word.startswith("-")), None):
        importlib.import_module(_LAZY[name]).add_arguments(parser)
    if name != "config" and not any(action.dest == "json" for action in parser._actions):
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--extra-config",
        metavar="JSON",
        type=_extra_config,
        default={},
        help="settings as given to vLLM: kv_connector_extra_config, or all of --kv-transfer-config",
    )


def _extra_config(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON; got {text!r}: {error}") from None
    if isinstance(value, dict) and "kv_connector" in value:
        value = value.get("kv_connector_extra_config") or {}
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object; got {text!r}")
    return value


def _config(args: argparse.Namespace) -> int:
    if args.markdown:
        print(markdown_table(), end="")
        return 0
    config = Config.read(args.extra_config)
    rows = config.explain()
    if args.json:
        items = [row._asdict() | {"value": getattr(config, row.name)} for row in rows]
        print(json.dumps(items, indent=2))
        return 0
    name_width = max(len(row.name) for row in rows)
    value_width = max(len(row.value) for row in rows)
    for row in rows:
        line = f"{row.name:<{name_width}}  {row.value:<{value_width}}"
        print(f"{line}  {row.source}" if args.explain else line.rstrip())
        if args.explain:
            print(f"    {row.help}")
            print(f"    accepts {row.accepts}; default {row.default}; {row.variable}")
    if args.explain:
        for variable, text in OTHER_VARIABLES.items():
            value = os.environ.get(variable)
            print(f"{variable}  {value or 'unset'}  environment only\n    {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
