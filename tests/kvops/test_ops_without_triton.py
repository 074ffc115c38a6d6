"""The operators work, bit for bit, where Triton cannot be imported; and importing them does not import it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys

if {is_blocked}:
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "triton":
                raise ImportError("no triton here")

    sys.meta_path.insert(0, Blocked())
    for name in [n for n in sys.modules if n.split(".")[0] == "triton"]:
        del sys.modules[name]

import torch

before = "triton" in sys.modules
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kvops import ops

pages = torch.randint(0, 256, (3, 8, 64), dtype=torch.uint8)
layout = ops.register_layout(BlockLayout.from_tensors(list(pages), [64] * 3, 1))
ids, offsets = torch.tensor([6, 1]), torch.tensor([0, 192])
numbers = {{"blob_ids": torch.tensor([0, 0]), "places": torch.tensor([0, 1])}}
sums, again = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
blobs, flags = torch.zeros(384, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
ops.gather_blocks(layout, ids, blobs, offsets, checksums=sums, **numbers)
assert torch.equal(blobs.view(2, 3, 64), pages[:, ids].transpose(0, 1))
ops.checksum_blocks(blobs, torch.tensor([0]), torch.tensor([384]), again)
assert sums.item() == again.item() != 0
expected = pages.clone()
pages[:, ids] = 0
ops.scatter_blocks(layout, ids, blobs, offsets, checksums=sums, mismatch=flags, **numbers)
assert torch.equal(pages, expected) and not flags.any()

cache = torch.randn(2, 5, 2, 4, 16).to(torch.bfloat16)
kept = cache.clone()
rows = RowLayout.from_views(list(cache), "bhnc")
registered, slots = ops.register_rows(rows), torch.tensor([7, 2])
out = torch.zeros(2, rows.row_bytes, dtype=torch.uint8)
ops.gather_slots(registered, slots, out)
cache[:, 1, :, 3] = 0
ops.scatter_slots(registered, slots, out)
assert torch.equal(cache, kept)

for make, register, gather, scatter, close in (
    (HeadRuns, ops.register_heads, ops.gather_heads, ops.scatter_heads, 0.0),
    (QuantizedRows, ops.register_quantized, ops.gather_quantized, ops.scatter_dequantized, 1 / 16),
):
    made = make.from_rows(rows)
    registered, one = register(made), torch.tensor([3])
    blob = torch.zeros(made.block_bytes, dtype=torch.uint8)
    gather(registered, one, blob, torch.tensor([0]))
    cache[:, 3] = 0
    scatter(registered, one, blob, torch.tensor([0]))
    assert cache[:, 3].any()
    # fp8 keeps three bits behind the first one: half a step is a sixteenth
    error = (cache.float() - kept.float()).abs()
    assert (error <= close * kept.float().abs() + close * 2.0 ** -9).all()
    cache.copy_(kept)

print("imported" if "triton" in sys.modules and not before else "fine")
"""


@pytest.mark.parametrize("is_blocked", [True, False])
def test_host_operators_need_no_triton(is_blocked):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(is_blocked=is_blocked)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["fine"]
