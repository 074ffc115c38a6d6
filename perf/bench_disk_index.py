"""What does the disk tier's index cost, with a million blobs? Opening it, its memory, one lookup.

Blobs of 4 KiB in sparse segments: the journal, the rows and the index are real, the bytes are holes. Opening is set
beside reading the journal's bytes, a lookup beside one in a dict with the same tags. Memory is what a process of its own
grows by when it opens the folder.

    python -m perf.bench_disk_index --assert
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from perf.harness import Case, Figure, Gate, Provider, parser, run
from perf.sparse_blobs import fill, opened, tag

from kvferry.kvops.store.disk.files import BlobFiles

BLOBS = 1_000_000
QUICK_BLOBS = 50_000
LOOKUPS = 50_000

OPEN_LIMIT_S = 10.0
"""For a million blobs; less for fewer."""
BYTES_LIMIT = 120.0
LOOKUP_LIMIT_US = 3.0

_MEMORY = """
import gc, sys
from pathlib import Path
from perf.sparse_blobs import opened

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

# whatever is needed once, whether there are blobs or not
with opened(Path(sys.argv[1]).with_name("empty")):
    pass
before = resident()
with opened(Path(sys.argv[1])) as files:
    print(resident() - before, files.stats()["blobs"])
"""


class Index:
    """The folder, and the same tags in a dict."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder / "blobs", count
        self.bytes_each = 0.0
        self.known: dict[tuple[int, int], int] = {}
        self.wanted: dict[str, list[tuple[int, int]]] = {}
        self._kept = contextlib.ExitStack()
        self.files: BlobFiles | None = None

    def make(self) -> None:
        """Fill the folder, once."""
        if self.folder.exists():
            return
        fill(self.folder, self.count)
        ran = subprocess.run(
            [sys.executable, "-c", _MEMORY, self.folder], capture_output=True, text=True, check=True
        )
        grown, blobs = map(int, ran.stdout.split())
        assert blobs == self.count
        self.bytes_each = grown / self.count

    def keep_open(self) -> None:
        """Open it for lookups, and make a dict of the same tags."""
        self.make()
        if self.files is None:
            chosen = random.Random(5)
            self.files = self._kept.enter_context(opened(self.folder))
            self.known = dict.fromkeys(map(tag, range(self.count)), 1)
            self.wanted["hit"] = [tag(chosen.randrange(self.count)) for _ in range(LOOKUPS)]
            self.wanted["miss"] = [tag(self.count + number) for number in range(LOOKUPS)]

    def look_in_dict(self, kind: str) -> int:
        """Look up everything wanted; return how much is there."""
        known, found = self.known, 0
        for one in self.wanted[kind]:
            found += one in known
        return found

    def look_in_files(self, kind: str) -> int:
        """Look up everything wanted; return how much is there."""
        assert self.files is not None
        contains, found = self.files.contains, 0
        for one in self.wanted[kind]:
            found += contains(one)
        return found

    def close(self) -> None:
        """Close what is kept open."""
        self._kept.close()

    def read_journal(self) -> None:
        """Read the bytes that opening reads."""
        for path in self.folder.glob("index-*.log"):
            path.read_bytes()

    def open(self) -> None:
        """Open and close it."""
        with opened(self.folder):
            pass

    def opens_whole(self) -> bool:
        """Whether every blob is found again, and no other."""
        with opened(self.folder) as files:
            some = range(0, self.count, 97)
            return (
                files.stats()["blobs"] == self.count
                and all(files.contains(tag(number)) for number in some)
                and not any(files.contains(tag(number + self.count)) for number in some)
            )


def cases(index: Index) -> list[Case]:
    """Return opening, and both kinds of lookup."""
    made = [
        Case(f"open, {index.count} blobs", 0, 1, [
            Provider("read_journal", index.read_journal, index.make),
            Provider("kvferry", index.open, index.make, index.opens_whole),
        ])
    ]  # fmt: skip
    for kind, expected in (("hit", LOOKUPS), ("miss", 0)):
        made.append(
            Case(f"lookup, {kind}", 0, LOOKUPS, [
                Provider("dict", lambda kind=kind: index.look_in_dict(kind), index.keep_open),
                Provider(
                    "kvferry", lambda kind=kind: index.look_in_files(kind), index.keep_open,
                    lambda kind=kind, expected=expected: index.look_in_files(kind) == expected,
                ),
            ])
        )  # fmt: skip
    return made


def main() -> int:
    """Run the benchmark."""
    made = parser("bench_disk_index", __doc__)
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    made.add_argument("--blobs", type=int, help=f"default {BLOBS}; with --quick {QUICK_BLOBS}")
    args = made.parse_args()
    return measured(args)


def measured(args: argparse.Namespace) -> int:
    """Run with these arguments."""
    count = args.blobs or (QUICK_BLOBS if args.quick else BLOBS)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-index-", dir=args.folder) as folder:
        index = Index(Path(folder), count)
        made = cases(index)

        def gates(figures: list[Figure]) -> list[Gate]:
            us = {(f.case.name, f.provider): f.p50 for f in figures}
            print(f"memory: {index.bytes_each:.1f} bytes a blob")
            return [
                Gate("open: s", us[made[0].name, "kvferry"] / 1e6, OPEN_LIMIT_S * count / BLOBS),
                Gate("memory: bytes a blob", index.bytes_each, BYTES_LIMIT),
                *(
                    Gate(f"{case.name}: us", us[case.name, "kvferry"], LOOKUP_LIMIT_US)
                    for case in made[1:]
                ),
            ]

        try:
            return run("bench_disk_index", args, made, gates)
        finally:
            index.close()


if __name__ == "__main__":
    sys.exit(main())
