"""Everything that only a CUDA device can answer, in one run of at most seven minutes.

Each section runs in processes of its own within a share of the budget: one that hangs, dies or breaks its CUDA context
loses its own rest and no more. Rows go to ``device.csv`` in the output folder as they are made; ``summary.md`` beside
it compares them with the predictions; ``log.txt`` has all output.

    PYTHONPATH=src python -m perf.device_check --out results
    PYTHONPATH=src python -m perf.device_check --dry-run        # no device: cases, bytes, and a rehearsal on the CPU
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from perf.device import summary
from perf.device.rehearsal import rehearse
from perf.device.schedule import Runner, Section
from perf.device.sections import SECTIONS

BUDGET_S = 400.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m perf.device_check", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument(
        "--out",
        type=Path,
        help="folder for device.csv, summary.md and log.txt; a dry run writes none",
    )
    made.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="seconds, all in all (%(default)s)"
    )
    made.add_argument("--only", default="", help="these sections, comma-separated")
    made.add_argument(
        "--dry-run", action="store_true", help="print the cases and rehearse them on the CPU"
    )
    made.add_argument("--list", action="store_true", help="list the sections")
    made.add_argument(
        "--commit", default="", help="what to write as the commit, outside a checkout"
    )
    return made


def chosen(only: str) -> list[Section]:
    """Return the sections that *only* names, in the order of value; all if it names none.

    Raises:
        ValueError: it names one that is not there.
    """
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        known = ", ".join(section.name for section in SECTIONS)
        raise ValueError(
            f"--only must name sections among {known}; got {', '.join(sorted(unknown))}"
        )
    return [section for section in SECTIONS if not names or section.name in names]


def main(arguments: list[str] | None = None) -> int:
    """Do what the flags say; return the exit status: 1 if bytes were wrong or a case failed."""
    args = parser().parse_args(arguments)
    try:
        sections = chosen(args.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # each section's share is a part of it
    if not 0 < args.budget_s < math.inf:
        print(f"--budget-s must be a positive number; got {args.budget_s}", file=sys.stderr)
        return 2
    if args.list:
        for section in sections:
            print(f"{section.name:<14} {section.seconds:>4.0f} s  {section.question}")
        return 0
    if args.dry_run:
        # read by triton when a kernel is defined, so before any section is imported
        os.environ["TRITON_INTERPRET"] = "1"
        return rehearse(sections)
    if args.out is None:
        print("--out must name a folder; got none", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("there is no CUDA device here; --dry-run does without", file=sys.stderr)
        return 2
    return check(args, sections)


def check(args: argparse.Namespace, sections: list[Section]) -> int:
    """Run *sections* on the device and write the summary; return the exit status."""
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    csv_path = args.out / "device.csv"
    csv_path.unlink(missing_ok=True)
    log_path = args.out / "log.txt"
    log_path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(csv_path, log_path, Path(scratch), args.budget_s, commit=args.commit)
        outcomes = runner.run(sections)
    rows = summary.read(csv_path)
    text = summary.render(rows, outcomes, time.monotonic() - began)
    (args.out / "summary.md").write_text(text)
    print(text)
    bad = [row for row in rows if row["match"] in ("no", "error")]
    return 1 if bad or not rows or any(o.ended not in ("all cases", "cut") for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
