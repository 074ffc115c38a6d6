"""What do timers and traces cost? One time of a stage, with the trace off and on, against a call that does nothing.

Timers are always on: one add has to stay well below a microsecond. A trace that is off is one look at None; its share of
copying 64 KiB, the smallest thing that a stage is, is what "no cost when off" means here.

    python -m perf.bench_trace --assert
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from perf.harness import Case, Figure, Gate, Provider, parser, run

from kvferry.kvops.trace import Stages, Trace

TIMES = 50_000
COPIES = 20_000
COPY_BYTES = 64 << 10
ADD_LIMIT_US = 1.0
OFF_SHARE = 0.01


def nothing(name: str, begin_s: float, end_s: float) -> None:
    """Do what `Stages.record` is called with, and nothing else."""


def cases(folder: Path) -> list[Case]:
    """Return the cases; *folder* is where a trace would be written."""
    off, on = Stages(), Stages(Trace(folder / "trace.json"))

    def call() -> None:
        for _ in range(TIMES):
            nothing("io", 1.0, 1.000123)

    def add() -> None:
        stage = off.add
        for _ in range(TIMES):
            stage("io", 0.000123)

    def record_of(stages: Stages) -> None:
        record = stages.record
        for _ in range(TIMES):
            record("io", 1.0, 1.000123)

    def timed() -> None:
        for _ in range(TIMES):
            with off.timed("io"):
                pass

    source = np.zeros(COPY_BYTES, np.uint8)
    out = np.zeros(COPY_BYTES, np.uint8)

    def copy() -> None:
        for _ in range(COPIES):
            out[:] = source

    def empty_loop() -> None:
        for _ in range(TIMES):
            pass

    def looks() -> None:
        for _ in range(TIMES):
            if off.trace is not None:
                off.trace.add("io", 1.0, 1.000123)

    return [
        Case("one time", 0, TIMES, [
            Provider("empty_call", call),
            Provider("add", add),
            Provider("record_off", lambda: record_of(off)),
            Provider("record_on", lambda: record_of(on)),
            Provider("timed", timed),
        ]),
        Case("a trace that is off", 0, TIMES, [
            Provider("empty_loop", empty_loop),
            Provider("look", looks),
        ]),
        Case("copy 64 KiB", COPY_BYTES, COPIES, [Provider("memcpy", copy)]),
    ]  # fmt: skip


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits."""
    us = {figure.provider: figure.p50 for figure in figures}
    share = (us["look"] - us["empty_loop"]) / us["memcpy"]
    return [
        Gate("add: us", us["add"], ADD_LIMIT_US),
        Gate("a trace that is off, share of copying 64 KiB", share, OFF_SHARE),
    ]


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_trace", __doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return run("bench_trace", args, cases(Path(folder)), gates)


if __name__ == "__main__":
    sys.exit(main())
