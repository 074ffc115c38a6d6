"""Every launch is made with the cache's device current: Triton asks for nothing else."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from kvferry.kernels import block_copy, heads, quantized, slots
from kvferry.kernels.current_device import made_current
from kvferry.kernels.gather import gather_blocks
from kvferry.kernels.head_runs import HeadRuns
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.quantized_rows import QuantizedRows
from kvferry.kernels.rows import RowLayout
from kvferry.kernels.table import LayoutTable


def test_a_host_has_no_current_device():
    with made_current(torch.device("cpu")):
        pass
    # not entered: there may be no such device
    assert made_current(torch.device("cuda", 3)).idx == 3


def blocks():
    table = LayoutTable(
        [BlockLayout.from_tensors([torch.zeros(4, 64, dtype=torch.uint8)], [64], 1)]
    )
    gather_blocks(table, torch.zeros(1, 2, dtype=torch.int64), [1])


def rows():
    return RowLayout.from_views([torch.zeros(2, 4, 4, 1, 8, dtype=torch.float16)], "kv_first")


def tokens():
    of = rows()
    out = torch.zeros(1, of.row_bytes, dtype=torch.uint8)
    slots.gather_slots(of, torch.zeros(1, dtype=torch.int64), out)


def quantised(move):
    move(QuantizedRows.from_rows(rows()), torch.zeros(1, 2, dtype=torch.int64))


LAUNCHES = [
    pytest.param(block_copy, "_copy_blocks_kernel", blocks, id="blocks"),
    pytest.param(slots, "_move_slots_kernel", tokens, id="slots"),
    pytest.param(
        heads, "_move_heads_kernel",
        lambda: heads.gather_heads(HeadRuns.from_rows(rows()), torch.zeros(1, 2, dtype=torch.int64)),
        id="heads",
    ),
    pytest.param(
        quantized, "_gather_quantized_kernel", lambda: quantised(quantized.gather_quantized),
        id="quantise",
    ),
    pytest.param(
        quantized, "_scatter_dequantized_kernel", lambda: quantised(quantized.scatter_dequantized),
        id="dequantise",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("module", "kernel", "launch"), LAUNCHES)
def test_a_launch_is_made_on_the_device_of_the_cache(module, kernel, launch, monkeypatch):
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **__: seen.append("launch")

    @contextlib.contextmanager
    def recorded(device):
        seen.append(device)
        yield
        seen.append("back")

    monkeypatch.setattr(module, kernel, Kernel())
    monkeypatch.setattr(module, "made_current", recorded)
    launch()
    assert seen == [torch.device("cpu"), "launch", "back"]
