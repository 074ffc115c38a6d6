"""What did the compiler make of bulk.cu? Registers, local memory, bulk copies; no device is needed.

    python -m perf.bulk_cubin --assert

NVRTC (cuda-bindings and nvidia-cuda-nvrtc) compiles; nvdisasm and cuobjdump, which Triton brings, read the result.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvferry.kernels import bulk

ARCHITECTURES = ("sm_90", "sm_100")
KERNELS = ("kvferry_gather_blocks", "kvferry_scatter_blocks")
MOST_REGISTERS = 64
LOADS, STORES = "UBLKCP.S.G", "UBLKCP.G.S"
LOOK_UP_LINES = 16
"""The loads of one look-up lie within so many instructions."""


@dataclass
class Report:
    """What one kernel became.

    Attributes:
        registers: of a thread.
        local_bytes: stack and local memory of a thread: spills lie there.
        local_accesses: instructions that reach it.
        bulk_loads, bulk_stores: instructions that move a tile.
        waits_early: registers filled by the next batch's look-up that are touched before the ring has run.
    """

    architecture: str
    kernel: str
    registers: int
    local_bytes: int
    local_accesses: int
    bulk_loads: int
    bulk_stores: int
    waits_early: tuple[str, ...]

    def problems(self) -> list[str]:
        """Return what is not as it must be."""
        checks = {
            f"{self.registers} registers": self.registers <= MOST_REGISTERS,
            f"{self.local_bytes} bytes of local memory": self.local_bytes == 0,
            f"{self.local_accesses} local accesses": self.local_accesses == 0,
            f"{self.bulk_loads} bulk loads": self.bulk_loads > 0,
            f"{self.bulk_stores} bulk stores": self.bulk_stores > 0,
            f"{', '.join(self.waits_early)} touched too early": not self.waits_early,
        }
        return [text for text, holds in checks.items() if not holds]

    def __str__(self) -> str:
        return (
            f"{self.architecture:<7} {self.kernel:<23} {self.registers:>9} {self.local_bytes:>6} "
            f"{self.bulk_loads:>6} {self.bulk_stores:>7}  {', '.join(self.problems()) or 'ok'}"
        )


def reports(architecture: str) -> list[Report]:
    """Compile for *architecture* and read what came out.

    Raises:
        ImportError, RuntimeError, OSError: NVRTC or Triton's tools are missing.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bulk.cubin"
        path.write_bytes(bulk.cubin(architecture))
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", path)
        code = _output(tools / "nvdisasm", "-c", path)
    return [_report(architecture, kernel, usage, code) for kernel in KERNELS]


def _output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


def _report(architecture: str, kernel: str, usage: str, code: str) -> Report:
    found = re.search(rf"{kernel}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if not found:
        raise RuntimeError(f"cuobjdump must name {kernel}; got {usage}")
    body = code[code.index(f".text.{kernel}:") :].split("\n\t.section", 1)[0]
    lines = body.splitlines()
    return Report(
        architecture, kernel,
        registers=int(found[1]), local_bytes=int(found[2]) + int(found[3]),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", body)),
        bulk_loads=body.count(LOADS), bulk_stores=body.count(STORES),
        waits_early=tuple(_touched_early(lines)),
    )  # fmt: skip


def _touched_early(lines: list[str]) -> list[str]:
    """Return the registers that the last look-up fills and that are touched before the loop's end.

    The loop ends with the branch back to before that look-up: one that lies after the first bulk load.
    """
    loads = [n for n, line in enumerate(lines) if "LDG." in line]
    first_bulk = next(n for n, line in enumerate(lines) if LOADS in line and n > loads[-1])
    # the look-up of the next batch: loads in a row, apart from those of the first batch above
    batch = [n for n in loads if loads[-1] - n < LOOK_UP_LINES]
    labels = {line[:-1]: n for n, line in enumerate(lines) if re.match(r"\.L_\w+:$", line)}
    end = next(
        n
        for n, line in enumerate(lines)
        if n > first_bulk
        and (target := re.search(r"BRA.*`\((\.L_\w+)\)", line))
        and labels[target[1]] < batch[0]
    )
    filled = set()
    for n in batch:
        width, first = re.search(r"LDG\.E(?:\.(\d+))?\S* R(\d+)", lines[n]).groups()
        filled |= {f"R{int(first) + k}" for k in range(int(width or 32) // 32)}
    rest = "\n".join(lines[loads[-1] + 1 : end])
    return sorted(name for name in filled if re.search(rf"\b{name}\b", rest))


def main() -> int:
    """Print a line for each kernel and architecture."""
    flags = argparse.ArgumentParser(prog="python -m perf.bulk_cubin", description=__doc__)
    flags.add_argument(
        "--assert", dest="gates", action="store_true", help="exit 1 when something is not as stated"
    )
    args = flags.parse_args()
    found = [report for architecture in ARCHITECTURES for report in reports(architecture)]
    print("arch    kernel                  registers  local  loads  stores  problems")
    for report in found:
        print(report)
    return int(args.gates and any(report.problems() for report in found))


if __name__ == "__main__":
    sys.exit(main())
