"""`kvferry disk stats | verify | gc | wipe`: the folder that the disk tier keeps its blobs in.

Results go to stdout, progress and errors to stderr. Exit codes: 0 fine; 1 verify found damage; 2 the command line is
wrong, the folder cannot be used, somebody else uses it, or the answer to wipe's question was no.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kvferry.kvops.errors import ConfigError, KVFerryError

from . import report, stats, sweep, verify

VARIABLE = "KVFERRY_DISK_PATH"

EXIT_FINE = 0
EXIT_DAMAGE = 1
EXIT_OTHER = 2

_EXIT_CODES = """\
exit codes:
  0  fine
  1  verify found damage
  2  wrong command line, a folder that can't be used or is in use, or the answer to wipe's question was no
"""

_EXAMPLES = {
    "stats": """\
examples:
  kvferry disk stats /mnt/nvme/kvferry
  KVFERRY_DISK_PATH=/mnt/nvme/kvferry kvferry disk stats --json
""",
    "verify": """\
examples:
  kvferry disk verify /mnt/nvme/kvferry
  kvferry disk verify --quarantine /mnt/nvme/kvferry
  kvferry disk verify --json /mnt/nvme/kvferry | jq .damaged

A blob is damaged if its header page or one of its checksums is wrong. A folder in use can be verified too; blobs that
its owner replaced meanwhile are counted as changed. --quarantine needs a folder that nobody uses.
""",
    "gc": """\
examples:
  kvferry disk gc /mnt/nvme/kvferry
""",
    "wipe": """\
examples:
  kvferry disk wipe /mnt/nvme/kvferry
  kvferry disk wipe --yes --json /mnt/nvme/kvferry
""",
}

_HELP = {
    "stats": "what the folder holds, and what its last owner counted and timed; works while it is in use",
    "verify": "recompute every checksum; changes nothing without --quarantine",
    "gc": "delete what is in quarantine and compact the journal",
    "wipe": "delete every blob, after asking",
}


class _Verb(Protocol):
    def __call__(self, folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
        """Do it; return the result as JSON values, and the exit code."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their options."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in _HELP.items():
        made = verbs.add_parser(
            verb,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"{_EXAMPLES[verb]}\n{_EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.add_argument(
            "folder", metavar="FOLDER", nargs="?", type=Path, help=f"default: ${VARIABLE}"
        )
        made.add_argument("--path", metavar="FOLDER", type=Path, help="another way to say FOLDER")
        # it may also stand before the verb; a default here would undo that
        made.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print JSON instead of text",
        )
        if verb == "verify":
            made.add_argument(
                "--quarantine", action="store_true", help="put damaged blobs out of use"
            )
        if verb == "wipe":
            made.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Carry out one verb; return the exit code."""
    verbs: dict[str, _Verb] = {
        "stats": stats.run, "verify": verify.run, "gc": sweep.collect, "wipe": sweep.wipe,
    }  # fmt: skip
    try:
        folder = folder_of(args, os.environ)
        found, code = verbs[args.verb](folder, args)
    except (KVFerryError, OSError) as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return EXIT_OTHER
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(report.TEXTS[args.verb](found), end="")
    return code


def folder_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    """Return the folder that is meant.

    Raises:
        ConfigError: none was named, or two.
    """
    if args.folder and args.path and args.folder != args.path:
        raise ConfigError(f"one folder must be named; got {args.folder} and {args.path}")
    named = args.folder or args.path or environ.get(VARIABLE)
    if not named:
        raise ConfigError(f"a folder must be named: kvferry disk {args.verb} FOLDER, or {VARIABLE}")
    return Path(named)
