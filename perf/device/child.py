"""Run the cases of one section in this process; `perf/device_check.py` starts one for each section.

A CUDA error that stays (an illegal access, say) ends the process that met it and no other. Each case is written to a
file before it starts, so that a new process can go on behind the one that took its process along.

A section is a module with ``cases(tiny: bool) -> list[Case]``: the cases in order of value, with sizes for a device, or
for a rehearsal on a CPU.
"""

import argparse
import faulthandler
import importlib
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

from perf.device import machine as machines
from perf.device.record import Case, DeviceLostError, Recorder, guarded

DONE, CUT, LOST = 0, 10, 11
"""Exit status: all cases were attempted; no time for the rest; the device is gone for this process."""

T = TypeVar("T")


class Context:
    """What a case works with.

    Attributes:
        machine: what it runs on.
        recorder: where figures go.
        tiny: whether this is a rehearsal.
    """

    def __init__(self, machine: machines.CpuMachine, recorder: Recorder, tiny: bool) -> None:
        self.machine = machine
        self.recorder = recorder
        self.tiny = tiny
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what *make* makes, made once in this section."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def run_cases(
    cases: list[Case], context: Context, until: float, attempted: Path | None = None
) -> int:
    """Run those of *cases* that were not attempted yet until the monotonic clock shows *until*; return DONE or CUT.

    Raises:
        DeviceLostError: the device can do nothing more in this process.
    """
    before = set(attempted.read_text().splitlines()) if attempted and attempted.exists() else set()
    left = [case for case in cases if case.name not in before]
    for number, case in enumerate(left):
        if time.monotonic() > until:
            context.recorder.note(
                f"{context.recorder.section}: out of time, {len(left) - number} of {len(cases)} cases left"
            )
            return CUT
        if attempted is not None:
            with attempted.open("a") as stream:
                stream.write(case.name + "\n")
        guarded(case, context, context.recorder, context.machine.synchronize)
    return DONE


def main(arguments: list[str] | None = None) -> int:
    """Run one section; return the exit status."""
    args = parser().parse_args(arguments)
    faulthandler.enable()
    started = time.monotonic()
    cases = importlib.import_module(args.module).cases(tiny=args.tiny)
    machine = getattr(machines, args.machine)()
    recorder = Recorder(args.section, machines.describe(machine, args.commit), args.csv)
    print(
        f"{args.section}: {len(cases)} cases, ready after {time.monotonic() - started:.1f} s",
        flush=True,
    )
    try:
        return run_cases(cases, Context(machine, recorder, args.tiny), args.until, args.attempted)
    except DeviceLostError as lost:
        recorder.note(f"{args.section}: the device was lost {lost}")
        return LOST


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m perf.device.child", description=__doc__)
    made.add_argument("section")
    made.add_argument("module")
    made.add_argument("--machine", default="CudaMachine", help="a class of perf/device/machine.py")
    made.add_argument("--csv", type=Path, required=True)
    made.add_argument("--until", type=float, required=True, help="on the monotonic clock")
    made.add_argument("--attempted", type=Path, required=True)
    made.add_argument("--commit", default="")
    made.add_argument("--tiny", action="store_true", help="the sizes of a rehearsal")
    return made


if __name__ == "__main__":
    sys.exit(main())
