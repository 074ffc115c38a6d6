"""How much of the drive does the disk tier give? Blobs of 2 MiB and 64 KiB, written and read, against a raw loop.

    raw                     the faster of threads and Linux AIO: blocks of one preallocated file, O_DIRECT, same size and
                            depth, no bookkeeping (raw_disk.py); it is the roof
    kvferry                 the tier as it is used: from and to frames of an arena, headers, journal, checksums made and
                            compared, fsync policy "batch"
    file_per_chunk          what vLLM's file-system tier does, made anew: one buffered file each (file_per_chunk.py); the
                            bytes may still be in the page cache when its clock stops
    file_per_chunk_synced   the same, each file on the drive before it gets its name (writing only)
    file_per_chunk_direct   the same as the first, with O_DIRECT

Buffered files are read after they have left the page cache (fdatasync, then POSIX_FADV_DONTNEED); what is printed says
whether the kernel did so. Every provider's bytes are compared: read into poisoned memory, or read back from the drive.
The last cases ask what opening a folder costs: a journal, or a walk over files, reading the first page of each.

    python -m perf.bench_disk --assert
    python -m perf.bench_disk --folder /mnt/nvme --quick
"""

import argparse
import mmap
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from perf.disk_tier import Tier
from perf.file_per_chunk import FilePerChunk
from perf.harness import Case, Figure, Gate, Provider, parser, run
from perf.raw_disk import RawFile, pages, same_bytes

from kvferry.kvops.settings import format_bytes
from kvferry.kvops.store.memory import file_system_of

MIB = 1 << 20
WORKING_SET = 512 * MIB
QUICK_WORKING_SET = 32 * MIB
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
        self._ways: dict[bool, Callable[[mmap.mmap, bool], None]] = {}

    def poison(self) -> None:
        """Overwrite the destination."""
        np.frombuffer(self.out, np.uint8)[:] = POISON

    def out_matches(self) -> bool:
        """Whether the destination holds the source."""
        return bool(
            np.array_equal(np.frombuffer(self.out, np.uint8), np.frombuffer(self.source, np.uint8))
        )

    def move_raw(self, write: bool) -> None:
        """Move everything the way that is faster here."""
        self._way(write)(self.source if write else self.out, write)

    def _way(self, write: bool) -> Callable[[mmap.mmap, bool], None]:
        if write not in self._ways:
            memory = self.source if write else self.out
            # the first writes of a preallocated file cost more, and must not decide; nor may reading such a file
            self.raw.by_threads(self.source, True)
            seconds = {}
            for way in (self.raw.by_threads, self.raw.by_aio) * 2:
                begin = time.perf_counter()
                way(memory, write)
                spent = time.perf_counter() - begin
                seconds[way] = min(spent, seconds.get(way, spent))
            best = self._ways[write] = min(seconds, key=lambda way: seconds[way])
            speeds = ", ".join(
                f"{way.__name__} {self.size * self.count / spent / 1e9:.2f} GB/s"
                for way, spent in seconds.items()
            )
            verb = "write" if write else "read"
            print(f"{self.name} {verb}: raw is {best.__name__} ({speeds})")
        return self._ways[write]

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

    def before_read_raw(self) -> None:
        """Have the way chosen and the destination poisoned."""
        self._way(False)
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
        """Let go of files and threads."""
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
        writes = [
            Provider("raw", lambda: self.move_raw(True), lambda: self._way(True) and None, self.raw_matches),
        ]  # fmt: skip
        reads = [
            Provider("raw", lambda: self.move_raw(False), self.before_read_raw, self.out_matches),
        ]
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


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(text)


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits."""
    by_name = {(f.case.name, f.provider): f for f in figures}
    return [
        Gate(f"{size} {verb}: kvferry / raw", 1 / by_name[case, "kvferry"].ratio, limit, True)
        for size, limit in LIMITS.items()
        for verb in ("write", "read")
        if ((case := f"{size} {verb}"), "kvferry") in by_name
    ]


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
    is_small = args.quick or args.dry_run or args.list
    working_set = QUICK_WORKING_SET if is_small else WORKING_SET
    # the raw file, the rival's files and the tier's segments, of both sizes, and as much again to be polite
    with working_folder(args.folder, 2 * 3 * 2 * working_set) as folder:
        print(
            f"{folder}: {file_system_of(folder)}; {format_bytes(working_set)} a run, depth {DEPTH}"
        )
        benches = [Bench(folder, name, size, working_set) for name, size in SIZES.items()]
        cases = [case for bench in benches for case in bench.cases()]
        try:
            return run("bench_disk", args, cases, gates)
        finally:
            for bench in benches:
                bench.close()


if __name__ == "__main__":
    sys.exit(main())
