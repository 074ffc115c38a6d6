"""What does the compiler make of the kernels? Registers, spills, widths, bytes in flight, instructions; no GPU needed.

    python -m perf.static_report                      every kernel that the models of models.py need, as a table
    python -m perf.static_report --assert             exit 1 if a kernel breaks a rule or falls behind static.csv
    python -m perf.static_report --triton FOLDER      with another Triton, for instance an unpacked wheel
    python -m perf.static_report --update             write the rows of this Triton to static.csv

Each kernel is compiled ahead of time for sm_80, sm_90 and sm_100, and some for gfx942, where it only has to compile.
Rules: no spill, no local memory, no more registers than the variant may have, each access to data as wide as the layout
allows, a checksum for at most 7 more instructions for each 16 bytes, and 35 % in the mean. Instructions are those of one turn of the loop
that moves data, bytes in flight what all threads of one program have asked for before the first of it is needed.
"""

import argparse
import csv
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "results" / "static.csv"
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry" / "static"
ARCHITECTURES = (80, 90, 100)
PROGRESS_S = 5.0
"""Time between two lines about how far it is, seconds."""

SLACK = 0.05
"""How many more instructions than in the committed table are no regression: versions of the compiler differ."""


@dataclasses.dataclass
class Row:
    """What one variant compiles to on one architecture.

    Attributes:
        kernel: name of the variant.
        arch: compute capability, 80 for sm_80.
        triton: version.
        registers: of a thread.
        spills: bytes stored to and loaded from local memory because registers ran out.
        local: bytes of local memory and stack of a thread.
        shared: bytes of shared memory of a program.
        loads: how many loads of data there are of which width: ``4x128``.
        stores: as loads.
        in_flight: bytes of a program.
        per_vector: instructions for each 16 bytes.
        instructions: of the whole kernel.
    """

    kernel: str
    arch: int
    triton: str
    registers: int
    spills: int
    local: int
    shared: int
    loads: str
    stores: str
    in_flight: int
    per_vector: float
    instructions: int

    @property
    def key(self) -> tuple[str, int, str]:
        """What identifies the row in the committed table."""
        return self.kernel, self.arch, self.triton


def _compile(name: str, arch: int, no_cache: bool) -> Row | str:
    """Compile one variant and read it, in a process of its own; a failure comes back as its message."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .static_variants import variants

    variant = next(variant for variant in variants() if variant.name == name)
    kernel = variant.kernel
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    kept = KEPT / f"{_digest(variant, arch, triton.__version__)}.json"
    if not no_cache and kept.exists():
        return Row(**json.loads(kept.read_text()))
    source = ASTSource(
        fn=kernel,
        signature={each: variant.types.get(each, "constexpr") for each in kernel.arg_names},
        constexprs={(places[each],): value for each, value in variant.constants.items()},
        attrs={(places[each],): [["tt.divisibility", 16]] for each in variant.aligned},
    )
    target = GPUTarget("hip", "gfx942", 64) if arch == AMD else GPUTarget("cuda", arch, 32)
    try:
        compiled = triton.compile(
            source, target=target, options={"num_warps": variant.num_warps} | variant.options
        )
    except Exception as error:  # whatever the compiler raises is this kernel's result
        return f"{name}, {_arch_name(arch)}: does not compile: {type(error).__name__}: {error}"
    if arch == AMD:
        made = len(compiled.asm["hsaco"])
        assert made
        row = Row(
            name, arch, triton.__version__, 0, 0, 0, compiled.metadata.shared, "", "", 0, 0.0, 0
        )
    else:
        row = _read(variant, arch, compiled)
    kept.parent.mkdir(parents=True, exist_ok=True)
    # written beside and moved, so that another process never reads half a row
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as stream:
        json.dump(dataclasses.asdict(row), stream)
    Path(stream.name).replace(kept)
    return row


AMD = 942
"""gfx942, among the compute capabilities."""


def _arch_name(arch: int) -> str:
    return "gfx942" if arch == AMD else f"sm_{arch}"


def _digest(variant: Any, arch: int, version: str) -> str:
    """Return a name for everything that the result depends on."""
    parts = [
        version, arch, variant.kernel.src, variant.types, variant.constants, variant.num_warps, variant.aligned,
        variant.options, variant.name, Path(__file__).read_text(), (Path(__file__).parent / "sass.py").read_text(),
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(variant: Any, arch: int, compiled: Any) -> Row:
    """Read registers, memory and machine code of a compiled kernel."""
    import triton

    from .sass import Listing

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", cubin)
        listing = Listing.parse(_run(tools / "nvdisasm", "-c", cubin))
        machine = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.M)
        assembler = tools / ("ptxas-blackwell" if arch >= 100 else "ptxas")
        assert machine is not None
        said = _run(
            assembler, "-v", f"--gpu-name={machine.group(1)}", ptx, "-o", Path(folder, "again")
        )
    sizes = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert sizes is not None
    assert spilled is not None
    spent, stored = listing.data_loop()
    return Row(
        kernel=variant.name,
        arch=arch,
        triton=triton.__version__,
        registers=int(sizes.group(1)),
        spills=int(spilled.group(1)) + int(spilled.group(2)),
        local=int(sizes.group(2)) + int(sizes.group(3)) + listing.count("LDL", "STL"),
        shared=compiled.metadata.shared,
        loads=_widths(listing.widths("LDG")),
        stores=_widths(listing.widths("STG")),
        in_flight=listing.bytes_in_flight() * variant.num_warps * 32,
        per_vector=round(16 * spent / stored, 2) if stored else 0.0,
        instructions=len(listing.instructions),
    )


def _run(*command: object) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout + done.stderr


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{counts[bits]}x{bits}" for bits in sorted(counts))


def broken_rules(variant: Any, row: Row, rows: dict[tuple[str, int], Row]) -> list[str]:
    """Return what is wrong with a row by itself."""
    from .static_variants import MAX_CHECKSUM

    wrong = []
    if row.spills or row.local:
        wrong.append(f"{row.spills} bytes spilled, {row.local} of local memory; must be none")
    if variant.max_registers and row.registers > variant.max_registers:
        wrong.append(f"{row.registers} registers; must be at most {variant.max_registers}")
    if variant.data_bits:
        for verb, widths in (("loads", row.loads), ("stores", row.stores)):
            narrow = [
                each for each in widths.split() if int(each.partition("x")[2]) < variant.data_bits
            ]
            if narrow or not widths:
                wrong.append(
                    f"data {verb} {widths or 'not found'}; must be {variant.data_bits} bits wide"
                )
    plain = rows.get((variant.plain, row.arch))
    if plain is not None and row.per_vector > plain.per_vector + MAX_CHECKSUM:
        more = row.per_vector - plain.per_vector
        wrong.append(
            f"the checksum adds {more:.2f} instructions for 16 bytes; must be at most {MAX_CHECKSUM}"
        )
    return wrong


def price_of_checksums(chosen: Sequence[Any], added: dict[tuple[str, int], float]) -> list[str]:
    """Return what is wrong with the mean price of a checksum."""
    from .static_variants import MAX_CHECKSUM_SHARE

    usual = {variant.name for variant in chosen if variant.usual}
    shares = [share for (name, _), share in added.items() if name in usual]
    mean = sum(shares) / len(shares) if shares else 0.0
    if mean <= MAX_CHECKSUM_SHARE:
        return []
    return [
        f"checksums add {100 * mean:.1f} % instructions in the mean; must be at most {100 * MAX_CHECKSUM_SHARE:.0f} %"
    ]


def regressions(row: Row, committed: Row | None) -> list[str]:
    """Return where a row is behind the committed one."""
    if committed is None:
        return ["not in static.csv; add it with --update"]
    worse = []
    for field in ("registers", "spills", "local", "shared"):
        now, before = getattr(row, field), getattr(committed, field)
        if now > before:
            worse.append(f"{now} {field}; {before} in static.csv")
    if row.per_vector > committed.per_vector * (1 + SLACK):
        worse.append(
            f"{row.per_vector} instructions for each 16 bytes; {committed.per_vector} in static.csv"
        )
    if row.in_flight < committed.in_flight:
        worse.append(f"{row.in_flight} bytes in flight; {committed.in_flight} in static.csv")
    return worse


def read_table(path: Path) -> dict[tuple[str, int, str], Row]:
    """Read a committed table; none is an empty one."""
    if not path.exists():
        return {}
    types = {field.name: field.type for field in dataclasses.fields(Row)}
    made = {"int": int, "float": float, "str": str, int: int, float: float, str: str}
    with path.open(newline="") as stream:
        rows = [
            Row(**{k: made[types[k]](v) for k, v in line.items()})
            for line in csv.DictReader(stream)
        ]
    return {row.key: row for row in rows}


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write the committed table."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(
            stream, [field.name for field in dataclasses.fields(Row)], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def print_table(rows: Sequence[Row], added: dict[tuple[str, int], float]) -> None:
    """Print one line for each row."""
    wide = max([6, *(len(row.kernel) for row in rows)])
    print(f"{'kernel':<{wide}} {'arch':<6} {'regs':>4} {'spills':>6} {'local':>5} {'shared':>6} {'loads':>12} "
          f"{'stores':>12} {'in flight':>9} {'per 16 B':>8} {'checksum':>8} {'in all':>6}")  # fmt: skip
    for row in rows:
        share = added.get((row.kernel, row.arch))
        price = "" if share is None else f"+{100 * share:.1f} %"
        print(f"{row.kernel:<{wide}} {_arch_name(row.arch):<6} {row.registers:>4} {row.spills:>6} {row.local:>5} "
              f"{row.shared:>6} {row.loads:>12} {row.stores:>12} {row.in_flight:>9} {row.per_vector:>8.2f} "
              f"{price:>8} {row.instructions:>6}")  # fmt: skip


def main() -> int:
    """Do what the flags say."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.static_report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--assert", dest="gates", action="store_true", help="exit 1 when a rule is broken"
    )
    parser.add_argument("--quick", action="store_true", help="the variants that CI looks at")
    parser.add_argument("--only", help="the variants of one builder of static_variants.py")
    parser.add_argument("--arch", help="of 80, 90, 100 and 942, comma-separated; default: all")
    parser.add_argument(
        "--triton", type=Path, help="folder that holds another triton, to be imported instead"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="compile again what is kept from before"
    )
    parser.add_argument("--json", action="store_true", help="print rows and findings as JSON")
    parser.add_argument(
        "--update", action="store_true", help="write this Triton's rows to results/static.csv"
    )
    parser.add_argument("--dry-run", action="store_true", help="print names, compile nothing")
    parser.add_argument("--list", action="store_true", help="as --dry-run")
    args = parser.parse_args()
    if args.triton is not None and str(args.triton) not in sys.path[:1]:
        # the processes that compile import Triton anew: they must find the same one
        sys.path.insert(0, str(args.triton.resolve()))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(args.triton.resolve()), os.environ.get("PYTHONPATH")])
        )
    try:
        import triton
    except ImportError:
        print(
            "perf.static_report: triton is not installed (requirements/test.lock has it)",
            file=sys.stderr,
        )
        return 2
    from .static_variants import variants

    chosen = [each for each in variants(args.only) if each.quick or not args.quick]
    wanted = set(map(int, args.arch.split(","))) if args.arch else {*ARCHITECTURES, AMD}
    tasks = [
        (each.name, arch)
        for each in chosen
        for arch in (*each.architectures, *([AMD] if each.amd else []))
        if arch in wanted
    ]
    if not tasks:
        # or nothing would pass --assert
        print(
            "--only, --arch and --quick must leave something to compile; got nothing",
            file=sys.stderr,
        )
        return 2
    if args.dry_run or args.list:
        for name, arch in tasks:
            print(f"{name}, {_arch_name(arch)}")
        return 0
    return report(args, chosen, tasks, triton.__version__)


def report(
    args: argparse.Namespace, chosen: Sequence[Any], tasks: list[tuple[str, int]], version: str
) -> int:
    """Compile, print, compare; return the exit status."""
    begin = time.perf_counter()
    names, archs = [name for name, _ in tasks], [arch for _, arch in tasks]
    # spawned: a fork of a process with torch's threads may hang
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        results, said = [], begin
        for result in pool.map(_compile, names, archs, [args.no_cache] * len(tasks)):
            results.append(result)
            if (now := time.perf_counter()) > said + PROGRESS_S:
                said = now
                print(f"compiled {len(results)} of {len(tasks)}", file=sys.stderr, flush=True)
    rows = [result for result in results if isinstance(result, Row)]
    by_name = {(row.kernel, row.arch): row for row in rows}
    committed = read_table(TABLE)
    findings = [result for result in results if isinstance(result, str)]
    added = {}
    for variant in chosen:
        for row in (row for row in rows if row.kernel == variant.name and row.arch != AMD):
            plain = by_name.get((variant.plain, row.arch))
            if plain is not None and plain.per_vector:
                added[row.kernel, row.arch] = row.per_vector / plain.per_vector - 1
            wrong = broken_rules(variant, row, by_name)
            if not args.update:
                wrong += regressions(row, committed.get(row.key))
            findings += [f"{row.kernel}, {_arch_name(row.arch)}: {each}" for each in wrong]
    findings += price_of_checksums(chosen, added)
    seconds = time.perf_counter() - begin
    if args.json:
        made = {
            "triton": version,
            "seconds": seconds,
            "rows": list(map(dataclasses.asdict, rows)),
            "findings": findings,
        }
        print(json.dumps(made, indent=1))
    else:
        print(f"triton {version} | {len(rows)} of {len(tasks)} compiled in {seconds:.0f} s")
        print_table(rows, added)
        for finding in findings:
            print(f"WRONG {finding}")
        print(f"{len(findings)} findings")
    if args.update:
        others = [row for row in committed.values() if row.key not in {each.key for each in rows}]
        write_table(
            TABLE, sorted([*others, *rows], key=lambda row: (row.triton, row.kernel, row.arch))
        )
    return 1 if findings and args.gates else 0


if __name__ == "__main__":
    sys.exit(main())
