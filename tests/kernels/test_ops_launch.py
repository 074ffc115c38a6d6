"""What the operators launch on a device: the shipped kernels, interpreted, against the host's own moves.

The branch for a device is taken on host memory by taking the host's movers away.
"""

import pytest
import torch

from kvferry.kernels import reference_quantized
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kvops import ops

from .layouts import LAYOUTS, ROW_LAYOUTS

CPU = torch.device("cpu")
POISON = 0xA5
WANTED = {
    "LBNHC", "BHLNC", "2-NB-BS-H-D", "mla-576-bf16", "groups-of-several-sizes", "aliasing-groups",
    "odd-everything",
}  # fmt: skip
FEW = [param for param in LAYOUTS if param.id in WANTED]
FEW_ROWS = [param for param in ROW_LAYOUTS if param.id in WANTED]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a compiled kernel does not read host memory"
)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Job:
    """Two blocks and a hole of every group, each a blob of its own, with checksums and flags."""

    def __init__(self, cache):
        self.layout = ops.register_layout(cache.layouts)
        ids, offsets, at = [], [], 16
        for group, layout in enumerate(cache.layouts):
            # other blocks in every group: some share their bytes
            mine = [2 * group % layout.num_blocks, -1, (2 * group + 1) % layout.num_blocks]
            for block in dict.fromkeys(mine):
                ids.append(block)
                offsets.append(at)
                at += -(-layout.block_bytes // 16) * 16 + 16
        per_group = [len(dict.fromkeys([0, -1, 1 % x.num_blocks])) for x in cache.layouts]
        self.counts, self.ids, self.offsets = per_group, torch.tensor(ids), torch.tensor(offsets)
        self.blobs = torch.full((at,), POISON, dtype=torch.uint8)
        count = len(ids)
        self.sums, self.flags, self.done = (
            torch.full((count,), 5, dtype=dtype)
            for dtype in (torch.int64, torch.int32, torch.int32)
        )
        self.where = {
            "blob_ids": torch.arange(count),
            "places": torch.zeros(count, dtype=torch.int64),
        }
        self.has_sums = self.layout.table.alignment == 16

    def run(self, op, **keywords):
        op(
            self.layout, self.ids, self.blobs, self.offsets, counts=self.counts, max_sms=3,
            done=self.done, **self.where, **keywords,
        )  # fmt: skip

    def gather(self):
        self.run(ops.gather_blocks, **({"checksums": self.sums} if self.has_sums else {}))

    def scatter(self):
        known = {"checksums": self.sums, "mismatch": self.flags} if self.has_sums else {}
        self.run(ops.scatter_blocks, **known)

    def results(self):
        return [self.blobs, self.sums, self.flags, self.done]


@pytest.mark.parametrize("case", FEW)
def test_a_device_moves_blocks_as_a_host_does(case, interpreted):
    from kvferry.kernels import block_copy

    launches = interpreted(block_copy, "_copy_blocks_kernel")
    caches = case(CPU), case(CPU)
    host, device = (Job(cache) for cache in caches)
    device.layout.movers = ()
    for job in (host, device):
        job.gather()
    same(device.results(), host.results())
    assert len(launches) == 1

    for job in (host, device):
        job.done.fill_(5)
        job.blobs[16] ^= 1
        job.scatter()
    same(device.results(), host.results())
    same(caches[1].storages, caches[0].storages)
    assert len(launches) == 2
    assert host.flags[0] == (1 if host.has_sums else 5)


@pytest.mark.parametrize("case", FEW_ROWS)
def test_a_device_moves_tokens_and_heads_as_a_host_does(case, interpreted):
    from kvferry.kernels import heads, slots

    interpreted(slots, "_move_slots_kernel")
    interpreted(heads, "_move_heads_kernel")
    results = []
    for on_device in (False, True):
        cache = case(CPU)
        rows, runs = cache.rows, HeadRuns.from_rows(cache.rows)
        tokens, of_heads = ops.register_rows(rows), ops.register_heads(runs)
        if on_device:
            tokens.mover = of_heads.mover = None
        out = torch.full((3, rows.row_bytes), POISON, dtype=torch.uint8)
        ops.gather_slots(tokens, torch.tensor([3, -1, 0]), out)
        ops.scatter_slots(tokens, torch.tensor([2, -1]), out[:2])
        blob = torch.full((runs.block_bytes,), POISON, dtype=torch.uint8)
        ops.gather_heads(of_heads, torch.tensor([1]), blob, torch.tensor([0]), head_first=0)
        ops.scatter_heads(of_heads, torch.tensor([2]), blob, torch.tensor([0]))
        results.append([out, blob, *cache.storages])
    same(results[1], results[0])


@pytest.mark.parametrize("case", [p for p in FEW_ROWS if p.id in ("LBNHC", "mla-576-bf16")])
def test_a_device_quantises_as_a_host_does(case, interpreted):
    from kvferry.kernels import quantized

    interpreted(quantized, "_gather_quantized_kernel")
    interpreted(quantized, "_scatter_dequantized_kernel")
    results = []
    for on_device in (False, True):
        cache = case(CPU)
        rows = QuantizedRows.from_rows(cache.rows, width=8)
        layout = ops.register_quantized(rows)
        if on_device:
            layout.mover = None
        blob = torch.full((rows.block_bytes,), POISON, dtype=torch.uint8)
        ops.gather_quantized(layout, torch.tensor([1]), blob, torch.tensor([0]))
        ops.scatter_dequantized(layout, torch.tensor([2, -1]), blob, torch.tensor([0, 0]))
        results.append([blob, *cache.storages])
    same(results[1], results[0])
    twin = torch.full_like(results[0][0], POISON)
    cache = case(CPU)
    rows = QuantizedRows.from_rows(cache.rows, width=8)
    reference_quantized.gather_quantized(rows, [1], [twin])
    same(results[1][0], twin)
