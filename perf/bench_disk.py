"""How much of the drive does the disk tier give? Blobs of 2 MiB and 64 KiB, written and read, against a raw loop.

    raw                     the faster of threads and Linux AIO, in each round: blocks of one preallocated file, O_DIRECT,
                            same size and depth, no bookkeeping (raw_disk.py); it is the roof
    kvferry                 the tier as it is used: from and to frames of an arena, headers, journal, checksums made and
                            compared, fsync policy "batch"
    file_per_chunk          what vLLM's file-system tier does, made anew: one buffered file each (file_per_chunk.py); the
                            bytes may still be in the page cache when its clock stops
    file_per_chunk_synced   the same, each file on the drive before it gets its name (writing 2 MiB only)
    file_per_chunk_direct   the same as the first, with O_DIRECT

Buffered files are read after they have left the page cache (syncfs, then POSIX_FADV_DONTNEED); what is printed says
whether the kernel did so. Every provider's bytes are compared: read into poisoned memory, or read back from the drive.
The last case asks what opening a folder costs: kvferry reads its journal; one file per chunk means a walk over names, and
the first page of each file for what a name does not tell.

    python -m perf.bench_disk --assert
    python -m perf.bench_disk --folder /mnt/nvme --quick
"""

import argparse
import collections
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from perf.disk_tier import Tier
from perf.file_per_chunk import FilePerChunk, scan_headers, scan_names
from perf.harness import Case, Figure, Gate, Provider, parser, run
from perf.raw_disk import RawFile, pages, same_bytes
from perf.sparse_blobs import fill, opened

from kvferry.kvops.settings import format_bytes
from kvferry.kvops.store.memory import file_system_of

MIB = 1 << 20
WORKING_SET = 512 * MIB
QUICK_WORKING_SET = 64 * MIB
SIZES = {"2 MiB": 2 * MIB, "64 KiB": 64 << 10}
DEPTH = 32
POISON = 0xA5

LIMITS = {"2 MiB": 0.9, "64 KiB": 0.75}
"""Share of the raw loop's speed, both ways."""

OPEN_BLOBS = 20_000
QUICK_OPEN_BLOBS = 2_000
OPEN_LIMIT_S = 1.0
"""For 100,000 blobs."""

NOT_ON = {"tmpfs", "ramfs", "devtmpfs"}
"""File systems without a drive."""


class Bench:
    """What the cases of one size share: memory, the raw file, the rival's folder.

    Args:
        folder: a folder of this run.
        name: the size in words. size: in bytes.
        working_set: bytes moved by one run.
    """

    def __init__(self, folder: Path, name: str, size: int, working_set: int) -> None:
        self.name, self.size, self.count = name, size, working_set // size
        self.folder = folder
        self.raw = RawFile(folder / f"raw-{size}", size, self.count, DEPTH)
        self.files = FilePerChunk(folder / f"chunks-{size}", size, self.count)
        self.source = pages(working_set)
        bytes_of = np.frombuffer(self.source, np.uint8)
        bytes_of[:] = np.random.default_rng(size).integers(0, 256, working_set, dtype=np.uint8)
        self.out = pages(working_set)
        self._tier: Tier | None = None
        self._is_raw_written = False
        self._won: collections.Counter[tuple[str, bool]] = collections.Counter()

    def poison(self) -> None:
        """Overwrite the destination."""
        np.frombuffer(self.out, np.uint8)[:] = POISON

    def out_matches(self) -> bool:
        """Whether the destination holds the source."""
        return bool(
            np.array_equal(np.frombuffer(self.out, np.uint8), np.frombuffer(self.source, np.uint8))
        )

    def move_raw(self, write: bool) -> float:
        """Move everything both ways; return the seconds of the faster one."""
        seconds = {}
        for way in (self.raw.by_threads, self.raw.by_aio):
            begin = time.perf_counter()
            way(self.source if write else self.out, write)
            seconds[way.__name__] = time.perf_counter() - begin
        best = min(seconds, key=lambda name: seconds[name])
        self._won[best, write] += 1
        return seconds[best]

    def before_raw(self, write: bool) -> None:
        """Have the blocks written once, since the first time costs more, and the destination poisoned."""
        if not self._is_raw_written:
            self.raw.by_threads(self.source, True)
            self._is_raw_written = True
        if not write:
            self.poison()

    def raw_matches(self) -> bool:
        """Whether the raw file holds the source."""
        return same_bytes(self.raw.fd, range(0, self.size * self.count, self.size), self.source, self.size)  # fmt: skip

    def write_files(self, direct: bool = False, sync: bool = False) -> float:
        """Write the rival's files; bringing them to the drive afterwards is not in the time that is returned."""
        begin = time.perf_counter()
        self.files.write(self.source, direct, sync)
        seconds = time.perf_counter() - begin
        # or the drive would still be busy with it when the next provider's clock runs
        self.files.settle()
        return seconds

    def before_read_files(self) -> None:
        """Have the files there, not in the page cache, and the destination poisoned."""
        if not self.files.folder.exists():
            self.files.write(self.source)
        if not self.files.settle():
            _say_once("the page cache could not be dropped: buffered reads may come from memory")
        else:
            _say_once("buffered reads: page cache dropped before each run")
        self.poison()

    @property
    def tier(self) -> Tier:
        """The tier, opened at its first use."""
        if self._tier is None:
            folder = self.folder / f"tier-{self.size}"
            self._tier = Tier(folder, self.size, self.source, DEPTH)
            print(f"{self.name}: kvferry's engine is {self._tier.io.name}")
        return self._tier

    def close(self) -> None:
        """Let go of files and threads; say what is behind the figures."""
        for (way, write), times in sorted(self._won.items()):
            print(f"{self.name} {'write' if write else 'read'}: raw was {way}, {times} times")
        if self._tier is not None:
            stages = self._tier.tier.stages()
            for stage, values in stages.items():
                print(
                    f"{self.name}: {stage} x {values['count']}: avg {values['avg_s'] * 1e6:.0f} us, "
                    f"p50 {values['p50_s'] * 1e6:.0f}, p99 {values['p99_s'] * 1e6:.0f}"
                )
            self._tier.close()
        self.raw.close()

    def cases(self) -> list[Case]:
        """Return writing and reading."""
        writes, reads = (
            [
                Provider(
                    "raw",
                    lambda write=write: self.move_raw(write),
                    lambda write=write: self.before_raw(write),
                    self.raw_matches if write else self.out_matches,
                )
            ]
            for write in (True, False)
        )
        writes.append(
            Provider(
                "kvferry",
                lambda: self.tier.save(),
                lambda: self.tier.fill(),
                lambda: self.tier.saved_matches(),
            )
        )
        reads.append(
            Provider(
                "kvferry",
                lambda: self.tier.load(),
                lambda: self.tier.empty(),
                lambda: self.tier.loaded_matches(),
            )
        )
        for suffix, direct, sync in [("", False, False), ("_synced", False, True), ("_direct", True, False)]:  # fmt: skip
            if sync and self.size < MIB:
                # minutes, to say that nobody would
                continue
            writes.append(
                Provider(
                    f"file_per_chunk{suffix}",
                    lambda direct=direct, sync=sync: self.write_files(direct, sync),
                    self.files.remove,
                    lambda: self.files.matches(self.source),
                )
            )
            if not sync:
                reads.append(
                    Provider(
                        f"file_per_chunk{suffix}",
                        lambda direct=direct: self.files.read(self.out, direct),
                        self.before_read_files,
                        self.out_matches,
                    )
                )
        return [
            Case(f"{self.name} write", self.size, self.count, writes, "store"),
            Case(f"{self.name} read", self.size, self.count, reads, "load"),
        ]


class Opening:
    """Folders with many blobs: a walk over files, and a journal. Blobs in sparse segments; files of one page."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        self.files = FilePerChunk(folder / "opening-chunks", 4096, count)
        self.folder = folder / "opening-tier"

    def before(self) -> None:
        """Have both there, and no bytes of them in the page cache; names stay cached."""
        if not self.folder.exists():
            fill(self.folder, self.count)
            self.files.write_first_pages()
        self.files.settle()
        for path in self.folder.glob("index-*.log"):
            with path.open("rb") as stream:
                os.fdatasync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def open(self) -> int:
        """Open the tier's folder; return how many blobs it has."""
        with opened(self.folder) as files:
            return files.stats()["blobs"]

    def case(self) -> Case:
        """Return the case."""
        chunks = self.files.folder
        return Case(f"open {self.count} blobs", 0, 1, [
            Provider(
                "scan_headers", lambda: scan_headers(chunks), self.before,
                lambda: len(scan_headers(chunks)) == self.count,
            ),
            Provider(
                "scan_names", lambda: scan_names(chunks), self.before,
                lambda: len(scan_names(chunks)) == self.count,
            ),
            Provider("kvferry", self.open, self.before, lambda: self.open() == self.count),
        ])  # fmt: skip


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(text)


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits."""
    by_name = {(f.case.name, f.provider): f for f in figures}
    (opening,) = [f for f in figures if f.case.name.startswith("open") and f.provider == "kvferry"]
    blobs = int(opening.case.name.split()[1])
    return [
        Gate(f"{size} {verb}: kvferry / raw", 1 / by_name[case, "kvferry"].ratio, limit, True)
        for size, limit in LIMITS.items()
        for verb in ("write", "read")
        if ((case := f"{size} {verb}"), "kvferry") in by_name
    ] + [Gate("open: s for 100,000 blobs", opening.p50 / 1e6 / blobs * 1e5, OPEN_LIMIT_S)]


@contextmanager
def working_folder(asked: Path | None, needed: int) -> Iterator[Path]:
    """Make a folder on a drive with room for *needed* bytes; remove it at the end."""
    places = [asked] if asked else [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    parent = next(
        (place for place in places if place.is_dir() and file_system_of(place / "x") not in NOT_ON),
        None,
    )
    if parent is None:
        names = ", ".join(map(str, places))
        raise SystemExit(f"--folder must be a folder on a drive, not on a tmpfs; got {names}")
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise SystemExit(
            f"--folder must have {format_bytes(needed)} free; got {parent} with {format_bytes(free)}"
        )
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-disk-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    made = parser("bench_disk", __doc__)
    made.add_argument(
        "--folder", type=Path, help="on the drive to be measured; default: for temporary files"
    )
    return made.parse_args()


def main() -> int:
    """Run the benchmark."""
    args = arguments()
    # whoever ends us politely gets his drive back, as with Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    is_small = args.quick or args.dry_run or args.list
    working_set = QUICK_WORKING_SET if is_small else WORKING_SET
    # the raw file, the rival's files and the tier's segments, of both sizes, and as much again to be polite
    with working_folder(args.folder, 2 * 3 * 2 * working_set) as folder:
        print(
            f"{folder}: {file_system_of(folder)}; {format_bytes(working_set)} a run, depth {DEPTH}"
        )
        benches = [Bench(folder, name, size, working_set) for name, size in SIZES.items()]
        cases = [case for bench in benches for case in bench.cases()]
        cases.append(Opening(folder, QUICK_OPEN_BLOBS if is_small else OPEN_BLOBS).case())
        try:
            return run("bench_disk", args, cases, gates)
        finally:
            for bench in benches:
                bench.close()


if __name__ == "__main__":
    sys.exit(main())
