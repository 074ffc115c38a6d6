"""What does a call cost on the host, before and around the bytes?

Two questions. *call*: what torch's dispatcher adds to each operator's plain function, on one token or block
(of no blocks, where that is cheapest). *submit*: what 2,000 blocks of 80 layers cost the host until a launch
could go out, and the metadata that goes with it: checks and packed entries (S and T), the same and one
descriptor per blob (G), against the descriptor per block and tensor that an engine's own offloading makes,
and the copy engine's merged ones (B). The launch itself is left out of all of them.

    python -m perf.bench_ops_overhead --assert
"""

import statistics
import sys
import time

import numpy as np
import torch
from perf.harness import Case, Figure, Gate, Provider, parser, run

from kvferry.kernels.descriptors import BlockRuns
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kvops import block_ops, ops, ops_checks, row_ops

CALL_US = 5.0
"""Microseconds that the dispatcher may add."""

BATCH = 200
"""Calls that are timed together: a millisecond or two, often short enough to go through uninterrupted."""

BLOCKS, LAYERS, PAGE = 2000, 80, 64
"""Pages are tiny: what is measured does not look at their bytes."""

SUBMIT_US, METADATA_BYTES = 1000.0, 32 << 10


def calls() -> dict[str, tuple]:
    """Return name -> arguments of a call that moves next to nothing."""
    cache = torch.zeros(2, 4, 2, 4, 16, dtype=torch.bfloat16)
    pages = torch.zeros(4, 64, dtype=torch.uint8)
    rows = RowLayout.from_views(list(cache), "bhnc")
    blocks = ops.register_layout(BlockLayout.from_tensors([pages], [64], 1))
    slots = ops.register_rows(rows)
    heads = ops.register_heads(HeadRuns.from_rows(rows))
    codes = ops.register_quantized(QuantizedRows.from_rows(rows))
    none, blob = torch.empty(0, dtype=torch.int64), torch.zeros(64, dtype=torch.uint8)
    row = torch.zeros(0, rows.row_bytes, dtype=torch.uint8)
    calls.keep = blocks, slots, heads, codes
    of_blocks = (blocks.handle, (), none, blob, none)
    return {
        "gather_blocks": of_blocks, "scatter_blocks": of_blocks,
        "gather_slots": (slots.handle, (), none, row), "scatter_slots": (slots.handle, (), none, row),
        "gather_heads": (heads.handle, (), none, blob, none),
        "scatter_heads": (heads.handle, (), none, blob, none),
        "gather_quantized": (codes.handle, (), none, blob, none),
        "scatter_dequantized": (codes.handle, (), none, blob, none),
        "checksum_blocks": (blob, none, none, torch.zeros(1, dtype=torch.int64)),
    }  # fmt: skip


def repeated(function, arguments: tuple, batches: int):
    """Return a run of so many batches; its time is that of the fastest, which nothing else interrupted."""

    def work() -> float:
        best, clock = float("inf"), time.perf_counter
        for _ in range(batches):
            begin = clock()
            for _ in range(BATCH):
                function(*arguments)
            best = min(best, clock() - begin)
        return best * batches

    return work


def call_cases(tiny: bool) -> list[Case]:
    """Return each operator and its plain function."""
    batches = 2 if tiny else 20
    made = []
    for name, arguments in calls().items():
        plain = getattr(row_ops if hasattr(row_ops, name) else block_ops, name)
        op = getattr(torch.ops.kvferry, name).default
        providers = [
            Provider("plain", repeated(plain, arguments, batches)),
            Provider("op", repeated(op, arguments, batches)),
        ]
        made.append(Case(f"call {name}", 0, batches * BATCH, providers))
    return made


class Submission:
    """A transfer of 2,000 blocks of 80 layers, up to the launch."""

    def __init__(self) -> None:
        self.pages = torch.zeros(LAYERS, BLOCKS, PAGE, dtype=torch.uint8)
        layout = BlockLayout.from_tensors(list(self.pages), [PAGE] * LAYERS, 1)
        self.layout = ops.register_layout(layout)
        self.blobs = torch.zeros(BLOCKS * LAYERS * PAGE, dtype=torch.uint8)
        self.ids = torch.from_numpy(np.random.default_rng(3).permutation(BLOCKS))
        self.offsets = torch.arange(BLOCKS) * (LAYERS * PAGE)
        self.bases = np.array([page.data_ptr() for page in self.pages])
        self.runs = BlockRuns(self.layout.table)
        self.metadata: dict[str, int] = {}
        self.descriptors_made: dict[str, int] = {}

    def checked(self):
        """Return the checked entries, and count their bytes."""
        blocks = ops_checks.check_blocks(
            self.layout, self.ids, self.blobs, self.offsets, (), None, None, (), is_load=False
        )
        return blocks, block_ops.pack(self.layout, blocks)

    def entries(self) -> None:
        """S and T: 16 bytes per block."""
        _, packed = self.checked()
        self.metadata["entries"], self.descriptors_made["entries"] = packed.nbytes, 0

    def staged(self) -> None:
        """G: gathered into a ring of 32 blobs, then the copy engine's one descriptor per blob, which is counted apart."""
        blocks, packed = self.checked()
        size = LAYERS * PAGE
        ring = self.blobs.data_ptr() + np.arange(BLOCKS) % 32 * size
        packed[:, 1] = ring
        descriptors = ring, blocks.addresses, np.full(BLOCKS, size)
        self.metadata["staged"] = packed.nbytes
        self.descriptors_made["staged"] = descriptors[0].size

    def per_tensor(self) -> None:
        """Make a source, a destination and a size for every block and tensor."""
        ids, offsets = self.ids.numpy(), self.offsets.numpy()
        sources = (self.bases[None] + ids[:, None] * PAGE).ravel()
        steps = np.arange(LAYERS) * PAGE
        places = (self.blobs.data_ptr() + offsets[:, None] + steps[None]).ravel()
        sizes = np.full(sources.size, PAGE)
        self.metadata["per_tensor"] = sources.nbytes + places.nbytes + sizes.nbytes
        self.descriptors_made["per_tensor"] = sources.size

    def merged(self) -> None:
        """B: the copy engine's descriptors, merged where pages touch."""
        addresses = self.blobs.data_ptr() + self.offsets.numpy()
        made = self.runs.describe(self.ids.numpy(), addresses, [BLOCKS], "d2h")
        self.metadata["merged"] = 24 * made.count
        self.descriptors_made["merged"] = made.count

    def case(self) -> Case:
        """Return the four ways; the descriptors per tensor are the baseline."""
        ways = (self.per_tensor, self.entries, self.staged, self.merged)
        return Case("submit 2000 x 80", 0, 1, [Provider(way.__name__, way) for way in ways])


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits."""
    by_name = {(figure.case.name, figure.provider): figure for figure in figures}
    made = []
    for name, provider in by_name:
        if provider == "op":
            # within a round, so that both met the same minute of a machine whose speed changes
            pairs = zip(by_name[name, "op"].us, by_name[name, "plain"].us, strict=True)
            extra = statistics.median(op - plain for op, plain in pairs)
            made.append(Gate(f"{name}: us above the plain function", extra, CALL_US))
    case = "submit 2000 x 80"
    for way in ("entries", "staged"):
        made.append(Gate(f"{case} {way}: us", by_name[case, way].p50, SUBMIT_US))
        made.append(Gate(f"{case} {way}: bytes", SUBMISSION.metadata[way], METADATA_BYTES))
    return made


SUBMISSION = Submission()


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_ops_overhead", __doc__).parse_args()
    torch.set_num_threads(1)
    tiny = args.quick or args.dry_run or args.list
    status = run("bench_ops_overhead", args, [*call_cases(tiny), SUBMISSION.case()], gates)
    for way, count in SUBMISSION.descriptors_made.items():
        beside = f", {24 * count} bytes of descriptors beside" if way == "staged" else ""
        print(
            f"submit {way}: {SUBMISSION.metadata[way]} bytes of metadata, {count} descriptors{beside}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
