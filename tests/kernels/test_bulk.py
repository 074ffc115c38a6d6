"""The launcher of the bulk copy: what it refuses, what it launches, and that NVRTC compiles it."""

import contextlib
import ctypes
import shutil
import sys
import types

import numpy as np
import pytest
import torch

from kvferry.kernels import bulk
from kvferry.kernels.bulk import CONTROL_BYTES, TILE_BYTES, Ring, choose_ring
from kvferry.kernels.layout import BlockLayout
from kvferry.kernels.table import LayoutTable, pack_entries

from .bulk_model import Job, build

HOPPER_SHARED = 227 << 10


class CompileError(Exception):
    pass


class FakeKernel:
    """A kernel that remembers its launches, and runs them if it is given a model."""

    def __init__(self, name, model=None):
        self.name, self.model = name, model
        self.launches = []
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(self, grid, block, args, shared_mem):
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        self.launches.append((grid, block, args, shared_mem))
        entries, tiles, groups, num_groups, num_units, stages, stage_bytes = args
        if self.model:
            reached = (ctypes.c_uint64 * 2)()
            problems = self.model.run(
                "gather" in self.name, int(entries), int(tiles), groups.ctypes.data,
                num_groups, num_units, stages, stage_bytes, grid[0], 1, reached,
            )  # fmt: skip
            assert problems == 0


class FakeCupy(types.ModuleType):
    """As much of cupy as the launcher uses."""

    def __init__(self, capability="90", shared=HOPPER_SHARED, error=None):
        super().__init__("cupy")
        self.kernels, self.current, self.modules = {}, [], 0
        self.streams, self.devices = [], []
        fake = self

        class Device(contextlib.nullcontext):
            def __init__(self, index):
                super().__init__(self)
                fake.devices.append(index)
                self.compute_capability = capability
                self.attributes = {"MaxSharedMemoryPerBlockOptin": shared}

        class Stream(contextlib.nullcontext):
            @classmethod
            def from_external(cls, stream):
                fake.streams.append(stream.__cuda_stream__())
                return cls()

        class RawModule:
            def __init__(self, *, code, options):
                fake.modules += 1
                assert "kvferry_gather_blocks" in code
                assert options == bulk.COMPILE_OPTIONS

            def get_function(self, name):
                if error:
                    raise error
                return fake.kernels.setdefault(name, FakeKernel(name))

        self.RawModule = RawModule
        self.cuda = types.SimpleNamespace(
            Device=Device,
            Stream=Stream,
            compiler=types.SimpleNamespace(CompileException=CompileError),
        )


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(bulk, "_kernels", {})


def use(monkeypatch, cupy):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def launch_on_the_host(monkeypatch, cupy):
    """Let tables in host memory pass for a device's."""
    monkeypatch.setattr(bulk, "_index", lambda device: 0)
    monkeypatch.setattr(bulk, "_kernels_of", lambda device, find=bulk._kernels_of: find(0))
    stream = types.SimpleNamespace(cuda_stream=0x77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return use(monkeypatch, cupy)


def test_a_device_of_hopper_or_later_can(monkeypatch):
    for index, capability in enumerate(["90", "100", "103", "120"]):
        cupy = use(monkeypatch, FakeCupy(capability))
        assert bulk.available(index) is None
        assert {kernel.max_dynamic_shared_size_bytes for kernel in cupy.kernels.values()} == {
            HOPPER_SHARED
        }


@pytest.mark.parametrize(
    ("cupy", "reason"),
    [
        (FakeCupy("80"), "bulk copies need sm_90 or later; device 0 is sm_80"),
        (FakeCupy("89"), "bulk copies need sm_90 or later; device 0 is sm_89"),
        (
            FakeCupy(error=CompileError("line 3: no")),
            "bulk copies cannot be compiled for device 0: line 3: no",
        ),
        (
            FakeCupy(error=RuntimeError("no libnvrtc")),
            "bulk copies cannot be compiled for device 0: no libnvrtc",
        ),
        (None, "bulk copies need cupy (the extra 'cuda'); got"),
    ],
)
def test_a_device_that_cannot_says_why_and_keeps_saying_so(monkeypatch, cupy, reason):
    use(monkeypatch, cupy)
    assert bulk.available(0).startswith(reason)
    # asked once: the answer does not depend on what comes later
    use(monkeypatch, FakeCupy())
    assert bulk.available(0).startswith(reason)
    assert bulk.available(1) is None


def test_the_host_is_no_device():
    assert bulk.available(torch.device("cpu")) == "bulk copies need a CUDA device; got cpu"


def test_kernels_are_compiled_once_for_each_device(monkeypatch):
    cupy = use(monkeypatch, FakeCupy())
    for _ in range(3):
        assert bulk.available(0) is None
        assert bulk.available(1) is None
    assert cupy.modules == 2
    assert cupy.devices == [0, 1]


def test_runs_that_are_no_multiples_of_16_are_left_to_the_other_kernels():
    pages = torch.zeros(4, 40, dtype=torch.uint8)
    table = LayoutTable.from_layouts([BlockLayout.from_tensors([pages], [40], 1)])
    assert bulk.reason_against(table) == (
        "bulk copies move multiples of 16 bytes; the layout's runs are aligned to 8"
    )
    pages = torch.zeros(4, 64, dtype=torch.uint8)
    table = LayoutTable.from_layouts([BlockLayout.from_tensors([pages], [64], 1)])
    assert bulk.reason_against(table) == "bulk copies need a CUDA device; got cpu"


KIB = 1 << 10


@pytest.mark.parametrize(
    ("sms", "flight", "shared", "ring"),
    [
        (2, None, HOPPER_SHARED, Ring(2, 14, TILE_BYTES)),
        (4, 512 * KIB, HOPPER_SHARED, Ring(4, 8, TILE_BYTES)),
        (1, 1 << 30, HOPPER_SHARED, Ring(1, 14, TILE_BYTES)),
        (0, None, HOPPER_SHARED, Ring(1, 14, TILE_BYTES)),
        (2, None, 99 * KIB, Ring(2, 6, TILE_BYTES)),
        (2, None, 4096 * KIB, Ring(2, bulk.MAX_STAGES, TILE_BYTES)),
        # a small budget makes small tiles, not a larger budget
        (1, 64 * KIB, HOPPER_SHARED, Ring(1, 8, 8 * KIB)),
        (1, 32 * KIB, HOPPER_SHARED, Ring(1, 8, 4 * KIB)),
        (4, 32 * KIB, HOPPER_SHARED, Ring(4, 8, KIB)),
        (2, 0, HOPPER_SHARED, Ring(2, 5, KIB)),
    ],
)
def test_the_ring_keeps_to_the_budget_and_to_shared_memory(sms, flight, shared, ring):
    assert choose_ring(sms, flight, shared, pending=4) == ring
    assert ring.shared_bytes == ring.num_stages * ring.tile_bytes + CONTROL_BYTES
    assert ring.shared_bytes <= shared
    assert flight in (None, 0) or ring.grid * ring.num_stages * ring.tile_bytes <= flight


@pytest.fixture
def job():
    return Job([[3 * TILE_BYTES + 48, 16 * 656], [2 * TILE_BYTES]], [4, 3])


def entries_of(job):
    addresses = (job.frames.data_ptr() + job.starts).astype(np.int64)
    return torch.from_numpy(pack_entries(job.table, job.ids, addresses, job.counts))


def test_a_transfer_is_one_launch_on_the_current_stream(monkeypatch, job):
    cupy = launch_on_the_host(monkeypatch, FakeCupy())
    entries = entries_of(job)

    bulk.gather_blocks(job.table, entries, job.counts, max_sms=3, bytes_in_flight=480 << 10)

    ((grid, block, args, shared),) = cupy.kernels["kvferry_gather_blocks"].launches
    assert (grid, block) == ((3,), (32,))
    assert cupy.streams == [(0, 0x77)]
    assert args[0] == entries.data_ptr()
    assert args[1] == job.table.tiles(TILE_BYTES).table.data_ptr()
    # 4 + 1 tiles a block in group 0, 2 in group 1
    assert args[2]["row"][0].tolist()[:3] == [(0, 0, 0, 5), (20, 4, 5, 2), (0, 0, 0, 0)]
    assert args[2].nbytes == bulk.MAX_GROUPS * 16
    assert [int(a) for a in args[3:]] == [2, 26, 10, TILE_BYTES]
    assert [a.itemsize for a in args[3:]] == [4, 4, 4, 4]
    assert shared == 10 * TILE_BYTES + CONTROL_BYTES
    assert not cupy.kernels["kvferry_scatter_blocks"].launches


@pytest.mark.skipif(shutil.which("g++") is None, reason="the model of the ring is compiled by g++")
def test_a_launch_moves_the_bytes(monkeypatch, job, tmp_path):
    cupy = launch_on_the_host(monkeypatch, FakeCupy())
    assert bulk.available(0) is None
    model = build(tmp_path, bulk.source())
    for kernel in cupy.kernels.values():
        kernel.model = model
    for is_gather, move in ((True, bulk.gather_blocks), (False, bulk.scatter_blocks)):
        expected = job.expected(is_gather)
        move(job.table, entries_of(job), job.counts)
        for mine, theirs in zip(job.everything(), expected, strict=True):
            assert torch.equal(mine, theirs)
        job.frames.copy_(torch.from_numpy(job.rng.integers(0, 256, job.frames.numel(), np.uint8)))


def test_nothing_to_move_is_no_launch(monkeypatch, job):
    cupy = launch_on_the_host(monkeypatch, FakeCupy())
    assert bulk.available(0) is None
    bulk.scatter_blocks(job.table, torch.empty(0, 2, dtype=torch.int64), [0, 0])
    assert not any(kernel.launches for kernel in cupy.kernels.values())


def test_a_launch_where_there_are_no_kernels_is_refused(monkeypatch, job):
    launch_on_the_host(monkeypatch, FakeCupy("80"))
    with pytest.raises(bulk.BulkUnavailableError, match="need sm_90 or later; device 0 is sm_80"):
        bulk.gather_blocks(job.table, entries_of(job), job.counts)


def nvrtc_missing():
    try:
        bulk.cubin("sm_90")
    except ImportError:
        return "cuda-bindings is not installed"
    except RuntimeError as error:
        return None if "refused" in str(error) else f"NVRTC cannot be loaded: {error}"
    return None


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_nvrtc_compiles_both_kernels_without_a_device(architecture):
    if reason := nvrtc_missing():
        pytest.skip(reason)
    image = bulk.cubin(architecture)
    assert image.startswith(b"\x7fELF")
    for name in (b"kvferry_gather_blocks", b"kvferry_scatter_blocks"):
        assert b".text." + name in image


def test_an_older_architecture_is_refused_with_nvrtcs_log():
    if reason := nvrtc_missing():
        pytest.skip(reason)
    with pytest.raises(RuntimeError, match=r"NVRTC refused bulk.cu for sm_80: .*requires .*sm_90"):
        bulk.cubin("sm_80")
