"""What does the copy engine's path cost? Descriptors on the host; on a CUDA device also the copies.

On the host: the time of one descriptor (block x layer) from block ids to merged arrays, in three ways:

    python_loop      one Python step for each (block, layer), then one for each merge; the baseline
    per_layer        numpy over [layer, block], nothing merged: the public algorithm of an engine's own offloading
    kvferry          BlockRuns.describe

On a device: random segments of 4 KiB to 2 MiB x counts, both ways, as one batch, as a loop of calls, and as
one contiguous copy (the baseline, and the roof); `submit` is the host's time for the same batch.

    python -m perf.bench_copy_engine --assert
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from perf.harness import Case, Figure, Gate, Provider, parser, run, timed

from kvferry.kernels.copy_engine import CopyEngine
from kvferry.kernels.descriptors import BlockRuns, Descriptors, Direction
from kvferry.kernels.driver import Driver
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.table import LayoutTable

SIZES = (4 << 10, 16 << 10, 28 << 10, 64 << 10, 256 << 10, 2 << 20)
COUNTS = (16, 256, 4096)
MOST_BYTES = 512 << 20
LOOP_COUNT = 256
POISON = 0xA5
REPEATS = 5
"""Descriptor lists of one round, so that a round of small ones is not a blink."""

CACHES = {
    # name: (layers, bytes of a page, blocks of a transfer, how layers lie, whether ids are neighbours)
    "70b, layers apart": (80, 32 << 10, 2000, "apart", False),
    "8b, layers apart": (32, 64 << 10, 256, "apart", False),
    "8b, side by side": (32, 64 << 10, 2000, "together", False),
    "8b, side by side, run": (32, 64 << 10, 2000, "together", True),
}
LIMIT = 0.1
"""Time of kvferry over that of the Python loop, at most."""


class Transfer:
    """The ids and frames of one transfer of a cache that takes addresses, not memory."""

    def __init__(
        self, layers: int, page: int, count: int, lie: str, is_run: bool, tiny: bool
    ) -> None:
        if tiny:
            page, count = 64, 256
        # nothing is read: untouched pages of these tensors cost no memory
        if lie == "together":
            whole = torch.empty(count + 8, layers * page, dtype=torch.uint8)
            tensors = [whole[:, page * n : page * (n + 1)] for n in range(layers)]
        else:
            tensors = [torch.empty(count + 8, page, dtype=torch.uint8) for _ in range(layers)]
        self.layout = BlockLayout.from_tensors(tensors, [page] * layers, 1)
        self.runs = BlockRuns(LayoutTable.from_layouts([self.layout]))
        order = np.arange(count + 8) if is_run else np.random.default_rng(5).permutation(count + 8)
        self.ids = order[:count].astype(np.int64)
        self.frames = (1 << 40) + self.layout.block_bytes * np.arange(count, dtype=np.int64)
        self.num_descriptors = count * layers
        self.made: dict[str, tuple[list[int], list[int], list[int]]] = {}

    def python_loop(self) -> None:
        """Make the descriptors one by one."""
        sources: list[int] = []
        destinations: list[int] = []
        sizes: list[int] = []
        for block, frame in zip(self.ids.tolist(), self.frames.tolist(), strict=True):
            for segment in self.layout.segments:
                source = segment.base_address + block * segment.block_stride
                destination = frame + segment.blob_offset
                touches = sizes and source == sources[-1] + sizes[-1]
                if touches and destination == destinations[-1] + sizes[-1]:
                    sizes[-1] += segment.nbytes
                else:
                    sources.append(source)
                    destinations.append(destination)
                    sizes.append(segment.nbytes)
        self.made["python_loop"] = destinations, sources, sizes

    def per_layer(self) -> None:
        """Make the descriptors of each layer by numpy, merging nothing."""
        rows = [
            (s.base_address, s.block_stride, s.nbytes, s.blob_offset) for s in self.layout.segments
        ]
        bases, strides, sizes, offsets = np.array(rows, np.uint64).T
        sources = (bases[:, None] + self.ids.astype(np.uint64)[None] * strides[:, None]).ravel()
        destinations = (offsets[:, None] + self.frames.astype(np.uint64)[None]).ravel()
        self.raw = destinations, sources, np.repeat(sizes, self.ids.size)

    def kvferry(self) -> None:
        """Make the descriptors as the copy engine does."""
        self.copies = self.runs.describe(self.ids, self.frames, [self.ids.size], "d2h")

    def is_right(self, copies: tuple[np.ndarray, ...]) -> bool:
        """Whether *copies* are those of the loop, merged as it merges."""
        self.python_loop()
        order = np.argsort(copies[0])
        sorted_copies = Descriptors(
            *(np.ascontiguousarray(c[order].astype(np.int64)) for c in copies)
        )
        merged = sorted_copies.merged(np.empty(0, np.int64))
        mine = merged.destinations, merged.sources, merged.sizes
        return all(
            np.array_equal(a, b) for a, b in zip(mine, self.made["python_loop"], strict=True)
        )

    def case(self, name: str) -> Case:
        """Return the case."""

        def repeated(work: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(REPEATS):
                    work()

            return run

        def ours() -> tuple[np.ndarray, ...]:
            return self.copies.destinations, self.copies.sources, self.copies.sizes

        return Case(
            name, 0, self.num_descriptors * REPEATS,
            [
                Provider("python_loop", repeated(self.python_loop)),
                Provider("per_layer", repeated(self.per_layer), verify=lambda: self.is_right(self.raw)),
                Provider("kvferry", repeated(self.kvferry), verify=lambda: self.is_right(ours())),
            ],
        )  # fmt: skip


class Sweep:
    """Segments of one size on a device, and frames for them in pinned memory; made when first used."""

    def __init__(self, size: int, count: int, direction: Direction, device: torch.device) -> None:
        self.size, self.count, self.direction, self.device = size, count, direction, device
        self.stream: torch.cuda.Stream | None = None
        self.is_made = False

    def poison(self) -> None:
        """Spoil the destination; the first time, allocate and make descriptors of which none merge."""
        if not self.is_made:
            self.is_made = True
            shape, is_cuda = (self.count, self.size), self.device.type == "cuda"
            self.pages = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self.frames = torch.empty(shape, dtype=torch.uint8, pin_memory=is_cuda)
            self.stream = torch.cuda.Stream() if is_cuda else None
            self.order = np.random.default_rng(1).permutation(self.count)
            pages = self.pages.data_ptr() + self.order * self.size
            frames = self.frames.data_ptr() + np.arange(self.count) * self.size
            sizes = np.full(self.count, self.size)
            arrays = (frames, pages, sizes) if self.direction == "d2h" else (pages, frames, sizes)
            self.copies = Descriptors(*(np.ascontiguousarray(a, np.int64) for a in arrays))
        self.synchronize()
        source, target = self.ends()
        source.random_(0, 256)
        target.fill_(POISON)
        self.synchronize()

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return source and destination."""
        return (self.pages, self.frames) if self.direction == "d2h" else (self.frames, self.pages)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def contiguous(self) -> None:
        """Copy as many bytes at once."""
        source, target = self.ends()
        target.copy_(source, non_blocking=True)

    def copy_by(self, engine: CopyEngine) -> None:
        """Copy the segments."""
        engine.copy(self.copies, self.direction, self.stream.cuda_stream if self.stream else 2)

    def on_device(self, work: Callable[[], None]) -> Callable[[], object]:
        """Return *work* timed on this case's stream."""

        def run() -> object:
            with torch.cuda.stream(self.stream):
                return timed(work, self.device)()

        return run

    def submit(self, engine: CopyEngine) -> Callable[[], float]:
        """Return the host's time to hand the copies over; what they take is not waited for."""

        def run() -> float:
            begin = time.perf_counter()
            self.copy_by(engine)
            return time.perf_counter() - begin

        return run

    def is_right(self) -> bool:
        """Whether every segment is in its place."""
        self.synchronize()
        order = torch.from_numpy(self.order).to(self.device)
        return torch.equal(self.pages[order].cpu(), self.frames)

    def is_copied(self) -> bool:
        """Whether the contiguous copy is."""
        self.synchronize()
        return torch.equal(self.pages.cpu(), self.frames)

    def case(self, engines: dict[str, CopyEngine]) -> Case:
        """Return the case."""
        providers = [
            Provider("memcpy", self.on_device(self.contiguous), self.poison, self.is_copied)
        ]
        for method, engine in engines.items():

            def work(engine: CopyEngine = engine) -> None:
                self.copy_by(engine)

            check = self.poison, self.is_right
            providers.append(Provider(method, self.on_device(work), *check))
            providers.append(Provider(f"{method} submit", self.submit(engine), *check))
        size = f"{self.size >> 10} KiB" if self.size < 1 << 20 else f"{self.size >> 20} MiB"
        name = f"{self.direction} {size} x {self.count}"
        return Case(name, self.size * self.count, 1, providers, self.direction)


def device_cases(device: torch.device, driver: Driver | None, tiny: bool) -> list[Case]:
    """Return the sweep; a call for each copy only up to 256 of them."""
    batch, loop = (CopyEngine(driver, method=method) for method in ("batch", "loop"))
    directions: tuple[Direction, ...] = ("h2d", "d2h")
    return [
        Sweep(size, count, direction, device).case(
            {"batch": batch, "loop": loop} if count <= LOOP_COUNT else {"batch": batch}
        )
        for count in (COUNTS[:1] if tiny else COUNTS)
        for size in (SIZES[:2] if tiny else SIZES)
        if size * count <= MOST_BYTES
        for direction in directions
    ]


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits; they are of the host's work."""
    return [
        Gate(f"{figure.case.name}: time / Python loop", figure.ratio, LIMIT)
        for figure in figures
        if figure.provider == "kvferry"
    ]


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_copy_engine", __doc__).parse_args()
    tiny = args.quick or args.dry_run or args.list
    transfers = {name: Transfer(*how, tiny) for name, how in CACHES.items()}
    made = [transfer.case(name) for name, transfer in transfers.items()]
    if torch.cuda.is_available():
        made += device_cases(torch.device("cuda"), None, tiny)
    else:
        print(f"no CUDA device: the sweep of {SIZES} bytes x {COUNTS} copies is left out")
    status = run("bench_copy_engine", args, made, gates)
    if not (args.dry_run or args.list):
        for name, transfer in transfers.items():
            count = transfer.copies.count
            print(
                f"{name}: {transfer.num_descriptors} (block, layer) pairs are {count} descriptors"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
