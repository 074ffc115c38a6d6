"""A dry run: print what a device would be asked, and run every section's logic on the CPU with tiny sizes.

The kernels run in Triton's interpreter (where triton is not installed, their sections say so), copies by the copy
engine are made by torch, and nothing is timed: what is rehearsed is which bytes go where and whether the comparison
of them works.
"""

import importlib
import math
import time
from collections.abc import Sequence

from perf.device.child import Context, run_cases
from perf.device.machine import CpuMachine, describe, host
from perf.device.record import Recorder
from perf.device.schedule import Section


def rehearse(sections: Sequence[Section]) -> int:
    """Print and rehearse *sections*; return 1 if a case failed or its bytes were wrong."""
    print(host())
    machine = CpuMachine()
    fields = describe(machine)
    wrong = 0
    for section in sections:
        module = importlib.import_module(section.module)
        cases = module.cases(tiny=False)
        print(
            f"\n== {section.name}: {section.question}\n   {len(cases)} cases, {section.seconds:.0f} s"
        )
        for case in cases:
            print(f"   {case.name:<44} {case.num_bytes:>13} bytes  {case.detail}")
        started = time.monotonic()
        recorder = Recorder(section.name, fields, None)
        tiny = module.cases(tiny=True)
        run_cases(tiny, Context(machine, recorder, tiny=True), math.inf)
        failed = [row for row in recorder.rows if row.match in ("no", "error")]
        wrong += len(failed)
        print(
            f"   rehearsed on the CPU: {len(tiny)} cases, {len(recorder.rows)} rows, {len(failed)} wrong, "
            f"{time.monotonic() - started:.1f} s"
        )
    print(f"\n{wrong} wrong; nothing was timed")
    return 1 if wrong else 0
