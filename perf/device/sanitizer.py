"""Does a memory checker find anything? `compute-sanitizer` over the correctness cases, with tiny sizes.

Comparing bytes sees what was written wrong; only a checker sees what was read beyond its end. It comes last and takes
the time that is left: the checker slows kernels down many times.
"""

import functools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perf.device.child import DONE, Context
from perf.device.record import Case

FOUND = 9
"""Exit status of the checker when it found something."""
RUNS = (
    ("memcheck", "correct_blocks"),
    ("memcheck", "bulk"),
    ("memcheck", "correct_rows"),
    ("racecheck", "bulk"),
)


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    return [
        Case(f"{tool} {module}", 0, "tiny sizes", functools.partial(run, tool, module))
        for tool, module in RUNS
    ]


def run(tool: str, module: str, context: Context) -> None:
    """Run the cases of one module under the checker."""
    program = shutil.which("compute-sanitizer")
    if program is None or not context.machine.is_cuda:
        context.recorder.note(f"sanitizer: {tool} {module}: no compute-sanitizer, or no device")
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no",
            sys.executable, "-m", "perf.device.child", module, f"perf.device.{module}", "--tiny",
            "--csv", str(Path(scratch) / "rows.csv"), "--attempted", str(Path(scratch) / "attempted"),
            "--until", str(time.monotonic() + 600),
        ]  # fmt: skip
        made = subprocess.run(command, check=False)
    context.recorder.row(f"{tool} {module}", "compute-sanitizer", match=made.returncode == DONE)
