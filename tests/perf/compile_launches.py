"""Run sections of the device check with a driver that has a device of sm_90 and no way to reach it.

Every launch goes through Triton's own path (arguments bound, specialised, compiled) and stops before the device, so
nothing is moved. Prints the kernels that were compiled, and fails if a case did.

    python tests/perf/compile_launches.py price direct
"""

import contextlib
import importlib
import io
import math
import sys

import torch
from perf.device.child import Context, run_cases
from perf.device.machine import CpuMachine, describe
from perf.device.record import Recorder
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver:
    """As much of a driver as compiling takes."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def main(sections):
    driver.set_active(Driver())
    launch, compiled = JITFunction.run, {}

    def compile_only(self, *args, grid, warmup, **options):
        made = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.setdefault(self.__name__, set()).add(made.hash)
        return made

    JITFunction.run = compile_only
    machine = CpuMachine()
    failed = 0
    for name in sections:
        context = Context(machine, Recorder(name, describe(machine, "-"), None), tiny=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run_cases(
                importlib.import_module(f"perf.device.{name}").cases(tiny=True), context, math.inf
            )
        # bytes are wrong, since none moved; an exception is what is looked for
        errors = [row.case for row in context.recorder.rows if row.match == "error"]
        if errors:
            print(out.getvalue())
        failed += len(errors)
    for name, variants in sorted(compiled.items()):
        print(name, len(variants))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
