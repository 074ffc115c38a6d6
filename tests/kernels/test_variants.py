"""What Triton compiles, seen without a device: one variant whatever the numbers of a transfer are, and the places.

A variant more would be compiled in the middle of serving. Launchers run for real up to the launch, which
is replaced by a compile, so that this also shows that their arguments are those of their kernels.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from kvferry.kernels import block_copy, heads, quantized, slots
from kvferry.kernels.gather import gather_blocks
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kernels.table import LayoutTable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here a kernel can be launched")


class Device:
    """As much of Triton's driver as a compile asks for."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture(params=[80, 90, 100])
def compiled(request, monkeypatch):
    """Return ``run(module, "_x_kernel") -> variants``, a list of what each launch compiled."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Device(request.param))

    class Compiled:
        def __init__(self, kernel, variants):
            self.kernel, self.variants = kernel, variants

        def __getitem__(self, grid):
            def compile_only(*arguments, **options):
                self.variants.append(self.kernel.warmup(*arguments, grid=grid, **options))

            return compile_only

    def run(module, name):
        variants = []
        monkeypatch.setattr(module, name, Compiled(getattr(module, name), variants))
        return variants

    return run


def entries(count):
    return torch.zeros(count, 2, dtype=torch.int64)


def check_one(variants, launches):
    assert len(variants) == launches
    assert len({variant.hash for variant in variants}) == 1


@pytest.fixture(scope="module")
def rows():
    return RowLayout.from_views([torch.zeros(2, 5, 16, 8, 128, dtype=torch.bfloat16)], "kv_first")


def test_blocks(compiled):
    variants = compiled(block_copy, "_copy_blocks_kernel")
    cache = torch.zeros(8, 4096, dtype=torch.uint8)
    table = LayoutTable([BlockLayout.from_tensors([cache], [4096], 1)])
    # headers of frames: a word further in each, and so never twice at the same distance from 16 bytes
    words, flags = torch.zeros(80, dtype=torch.int64), torch.zeros(80, dtype=torch.int32)
    for count, first, step in ((1, 0, 16), (2, 1, 8), (5, 2, 3)):
        results = {"checksums": words[first::step], "done": flags[first::step]}
        gather_blocks(table, entries(count), [count], **results)
    check_one(variants, 3)


def test_heads(compiled, rows):
    variants = compiled(heads, "_move_heads_kernel")
    runs = HeadRuns.from_rows(rows, total_heads=32, head_first=8)
    for count in (1, 16, 37):
        heads.gather_heads(runs, entries(count))
    heads.gather_heads(runs, entries(1), head_first=8, head_count=1)
    check_one(variants, 4)


def test_quantized(compiled, rows):
    for name, move in (
        ("_gather_quantized_kernel", quantized.gather_quantized),
        ("_scatter_dequantized_kernel", quantized.scatter_dequantized),
    ):
        variants = compiled(quantized, name)
        for count in (1, 16, 37):
            move(QuantizedRows.from_rows(rows), entries(count))
        check_one(variants, 3)


@pytest.mark.parametrize("widths", [(1152,), (656, 132)], ids=str)
def test_slots(compiled, widths):
    views = [torch.zeros(5, 16, width, dtype=torch.uint8) for width in widths]
    layout = RowLayout.from_views(views, "latent")
    stride = -(-layout.row_bytes // 16) * 16
    variants = compiled(slots, "_move_slots_kernel")
    for count in (1, 16, 37):
        # in the middle of a step's mapping
        mapping = torch.zeros(count + 1, dtype=torch.int64)[count % 2 :][:count]
        outside = torch.zeros(count, stride, dtype=torch.uint8)[:, : layout.row_bytes]
        slots.gather_slots(layout, mapping, outside)
    check_one(variants, 3)
