"""The copy engine's bench without a device: its descriptors, and its sweep by a driver in host memory."""

import numpy as np
import pytest
import torch
from perf import bench_copy_engine
from perf.bench_copy_engine import CACHES, Sweep, Transfer, device_cases
from perf.device.copy_engine import HostDriver
from perf.harness import measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CACHES)
def test_every_way_of_making_descriptors_gives_the_same_copies(name):
    figures = measure(Transfer(*CACHES[name], tiny=True).case(name), rounds=1)
    assert {figure.provider: figure.match for figure in figures} == {
        "python_loop": True, "per_layer": True, "kvferry": True,
    }  # fmt: skip


def test_wrong_descriptors_are_noticed():
    transfer = Transfer(*CACHES["8b, layers apart"], tiny=True)
    transfer.kvferry()
    copies = transfer.copies
    arrays = [copies.destinations, copies.sources.copy(), copies.sizes]
    assert transfer.is_right(tuple(arrays))
    arrays[1][17] += 64
    assert not transfer.is_right(tuple(arrays))


def test_the_sweep_copies_every_segment_to_its_place(monkeypatch):
    monkeypatch.setattr(bench_copy_engine, "MOST_BYTES", 1 << 20)
    cases = device_cases(CPU, HostDriver(), tiny=True)
    assert [case.name for case in cases] == [
        "h2d 4 KiB x 16", "d2h 4 KiB x 16", "h2d 16 KiB x 16", "d2h 16 KiB x 16",
    ]  # fmt: skip
    for case in cases:
        assert [p.name for p in case.providers] == [
            "memcpy", "batch", "batch submit", "loop", "loop submit",
        ]  # fmt: skip
        assert all(figure.match for figure in measure(case, rounds=1))


def test_a_segment_in_the_wrong_place_is_noticed():
    sweep = Sweep(64, 8, "d2h", CPU)
    sweep.poison()
    sweep.contiguous()
    assert not np.array_equal(sweep.order, np.arange(8))
    assert not sweep.is_right()
