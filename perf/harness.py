"""What every perf script shares: flags, rounds, the table, the CSV row, and the assertions.

Providers of a case run in turn, round by round (A B C, A B C, ...), so that a machine that slows down slows all of them.
A figure is the median over the rounds; a ratio is the median of the ratios within a round. A provider whose bytes did
not match is printed as such, and its figures are not.
"""

import argparse
import csv
import dataclasses
import datetime
import gc
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import kvferry

ROUNDS = 7
QUICK_ROUNDS = 3


@dataclasses.dataclass
class Row:
    """One line of a CSV file; the schema is the same for all scripts."""

    timestamp: str
    commit: str
    version: str
    gpu: str
    driver: str
    cuda: str
    torch: str
    triton: str
    host_cpu: str
    pcie: str
    bench: str
    case: str
    model: str = ""
    layout: str = ""
    dtype: str = ""
    block_size: int = 0
    num_blocks: int = 0
    layers: int = 0
    direction: str = ""
    provider: str = ""
    bytes: int = 0
    p50_us: float = 0.0
    p20_us: float = 0.0
    p80_us: float = 0.0
    gbps: float = 0.0
    roof_gbps: float = 0.0
    roof_pct: float = 0.0
    match: str = ""
    command: str = ""


@dataclasses.dataclass
class Provider:
    """One way of doing the same thing.

    Attributes:
        name: what it is called in the table.
        run: does *operations* of them; only this is timed. If it returns a float, that many seconds are taken instead.
        before: puts everything back, untimed.
        verify: returns whether the bytes are right, called once after a run.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    verify: Callable[[], bool] = lambda: True


@dataclasses.dataclass
class Case:
    """Something that all providers do; the first provider is the baseline.

    Attributes:
        name: what the table calls it.
        num_bytes: bytes moved by one operation (0: none).
        operations: operations in one run.
    """

    name: str
    num_bytes: int
    operations: int
    providers: list[Provider]
    direction: str = ""


@dataclasses.dataclass
class Figure:
    """What was measured of one provider: microseconds of one operation in each round."""

    case: Case
    provider: str
    us: list[float]
    match: bool
    ratios: list[float]

    @property
    def p50(self) -> float:
        """Median, in microseconds."""
        return statistics.median(self.us)

    @property
    def ratio(self) -> float:
        """Median over the rounds of this provider's time divided by the baseline's."""
        return statistics.median(self.ratios)


@dataclasses.dataclass
class Gate:
    """A figure that must hold with ``--assert``."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'ok   ' if self.holds else 'SHORT'} {self.name}: {self.value:.3f} {sign} {self.limit:g}"


def parser(bench: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that every script has."""
    made = argparse.ArgumentParser(
        prog=f"python -m perf.{bench}", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--providers", help="only these, comma-separated; the baseline always runs")
    made.add_argument("--rounds", type=int, help=f"default {ROUNDS}; with --quick {QUICK_ROUNDS}")
    made.add_argument(
        "--quick", action="store_true", help="small working set, few rounds: a smoke test"
    )
    made.add_argument("--dry-run", action="store_true", help="print cases and bytes, time nothing")
    made.add_argument("--list", action="store_true", help="list cases and providers")
    made.add_argument("--csv", type=Path, help="append rows to this file")
    made.add_argument(
        "--plot", type=Path, help="draw the medians into this file (needs the extra `perf`)"
    )
    made.add_argument(
        "--assert",
        dest="gates",
        action="store_true",
        help="exit 1 when a stated figure is not reached",
    )
    return made


def timed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return *work* as a provider's run: on a device, timed there, which the wall clock cannot."""
    if device.type != "cuda":
        return work

    def run() -> float:
        from triton.testing import do_bench

        return float(do_bench(work, return_mode="median")) / 1e3

    return run


def rounds_of(args: argparse.Namespace) -> int:
    """Return how many rounds were asked for."""
    return args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)


def measure(case: Case, rounds: int, only: str | None = None) -> list[Figure]:
    """Run the providers of *case* in turn and check their bytes."""
    wanted = None if only is None else set(only.split(","))
    providers = [
        p for n, p in enumerate(case.providers) if n == 0 or wanted is None or p.name in wanted
    ]
    times: dict[str, list[float]] = {p.name: [] for p in providers}
    match = dict.fromkeys(times, True)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for provider in providers:
                provider.before()
                begin = time.perf_counter()
                own = provider.run()
                seconds = own if isinstance(own, float) else time.perf_counter() - begin
                spent = seconds / case.operations * 1e6
                if number == 0:
                    # the warm-up round checks the bytes
                    match[provider.name] = provider.verify()
                else:
                    times[provider.name].append(spent)
            _progress(f"{case.name}: round {number} of {rounds}")
    finally:
        gc.enable()
        _progress("")
    base = times[providers[0].name]
    return [
        Figure(case, p.name, times[p.name], match[p.name],
               [mine / theirs for mine, theirs in zip(times[p.name], base, strict=True)])
        for p in providers
    ]  # fmt: skip


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def print_table(figures: Sequence[Figure]) -> None:
    """Print one line for each figure."""
    wide = max([14, *(len(figure.provider) for figure in figures)])
    print(f"{'case':<26} {'provider':<{wide}} {'bytes':>10} {'p50 us':>10} {'p20':>9} {'p80':>9} {'GB/s':>7} "
          f"{'of roof':>8} {'vs baseline':>12}  match")  # fmt: skip
    for figure in figures:
        case = figure.case
        if not figure.match:
            print(
                f"{case.name:<26} {figure.provider:<{wide}} {case.num_bytes:>10} {'wrong bytes: no figures':>60}  NO"
            )
            continue
        low, high = _quantiles(figure.us)
        moved = case.num_bytes > 0
        speed = f"{case.num_bytes / figure.p50 / 1e3:7.2f}" if moved else f"{'':>7}"
        share = f"{100 / figure.ratio:6.0f} %" if moved else f"{'':>8}"
        print(f"{case.name:<26} {figure.provider:<{wide}} {case.num_bytes:>10} {figure.p50:>10.3f} {low:>9.3f} "
              f"{high:>9.3f} {speed} {share} {figure.ratio:>11.3f}x  yes")  # fmt: skip


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    return float(np.quantile(values, 0.2)), float(np.quantile(values, 0.8))


def write_csv(path: Path, bench: str, figures: Sequence[Figure]) -> None:
    """Append *figures* to *path*."""
    # the first figure of a case is its baseline
    baseline = {figure.case.name: figure.p50 for figure in reversed(figures)}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in dataclasses.fields(Row)])
        if new:
            writer.writeheader()
        for figure in figures:
            low, high = _quantiles(figure.us)
            size = figure.case.num_bytes
            row = Row(
                **_machine(), bench=bench, case=figure.case.name, direction=figure.case.direction,
                provider=figure.provider, bytes=size, match="yes" if figure.match else "no",
                command="python -m perf." + shlex.join([bench, *sys.argv[1:]]),
            )  # fmt: skip
            if figure.match:
                row.p50_us, row.p20_us, row.p80_us = figure.p50, low, high
                row.gbps = size / figure.p50 / 1e3
                row.roof_gbps = size / baseline[figure.case.name] / 1e3
                row.roof_pct = 100 / figure.ratio if size else 0.0
            writer.writerow(dataclasses.asdict(row))


def _machine() -> dict[str, str]:
    return {
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(), "version": kvferry.__version__, "gpu": gpu_name(), "driver": "",
        "cuda": torch.version.cuda or "", "torch": torch.__version__, "triton": triton_version(),
        "host_cpu": cpu_name(), "pcie": "",
    }  # fmt: skip


def commit() -> str:
    """Return the short hash of the checkout, with a plus if it has changes; "" outside one."""
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return name.stdout.strip()


def cpu_name() -> str:
    """Return the processor's name and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def gpu_name() -> str:
    """Return the name of the device that scripts run on; "none" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def triton_version() -> str:
    """Return the version of Triton where there is a device to use it; "" elsewhere."""
    if not torch.cuda.is_available():
        return ""
    import triton

    return str(triton.__version__)


def plot(path: Path, bench: str, figures: Sequence[Figure]) -> None:
    """Draw one bar per case and provider: the baseline's time divided by the provider's."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise SystemExit(f"--plot needs matplotlib, the extra `perf`: {error}") from error
    cases = list(dict.fromkeys(figure.case.name for figure in figures))
    providers = list(dict.fromkeys(figure.provider for figure in figures))
    canvas = Canvas(figsize=(2 + 1.6 * len(cases), 4), layout="constrained")
    axes = canvas.add_subplot()
    width = 0.8 / len(providers)
    for number, provider in enumerate(providers):
        mine = [figure for figure in figures if figure.provider == provider and figure.match]
        places = [cases.index(figure.case.name) + number * width for figure in mine]
        axes.bar(places, [1 / figure.ratio for figure in mine], width, label=provider)
    axes.set_xticks([number + 0.4 for number in range(len(cases))], cases, rotation=20, ha="right")
    axes.set_ylabel("of the baseline's speed")
    axes.set_title(f"{bench} | {cpu_name()} | {gpu_name()}", fontsize="small")
    axes.legend(fontsize="small")
    canvas.savefig(path)


def headline() -> str:
    """Return the line above a table: what machine and what versions."""
    return (
        f"{cpu_name()} | python {platform.python_version()} | torch {torch.__version__} | "
        f"kvferry {kvferry.__version__} ({commit()})"
    )


def _problem(args: argparse.Namespace, cases: Sequence[Case]) -> str | None:
    """Return what is wrong with the flags, which would come out after minutes, or not at all."""
    known = list(dict.fromkeys(p.name for case in cases for p in case.providers))
    if unknown := sorted({*(args.providers or "").split(",")} - {*known, ""}):
        return f"--providers must be among {', '.join(known)}; got {', '.join(unknown)}"
    if args.rounds is not None and args.rounds < 1:
        return f"--rounds must be at least 1; got {args.rounds}"
    if args.csv and not (args.list or args.dry_run):
        try:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            args.csv.open("a").close()
        except OSError as error:
            return f"--csv must be a file that can be written; got {error}"
    return None


def run(
    bench: str,
    args: argparse.Namespace,
    cases: Sequence[Case],
    gates: Callable[[list[Figure]], list[Gate]],
) -> int:
    """Do what the flags say with *cases*; return the exit status."""
    if problem := _problem(args, cases):
        print(problem, file=sys.stderr)
        return 2
    if args.list or args.dry_run:
        for case in cases:
            names = ", ".join(p.name for p in case.providers)
            print(
                f"{case.name:<26} {case.num_bytes:>10} bytes x {case.operations} operations: {names}"
            )
        return 0
    print(headline())
    figures = [
        figure for case in cases for figure in measure(case, rounds_of(args), args.providers)
    ]
    print_table(figures)
    if args.csv:
        write_csv(args.csv, bench, figures)
    if args.plot:
        plot(args.plot, bench, figures)
    checked = gates(figures) if args.providers is None else []
    for gate in checked:
        print(gate)
    is_short = args.gates and not all(gate.holds for gate in checked)
    return 1 if is_short or not all(figure.match for figure in figures) else 0
