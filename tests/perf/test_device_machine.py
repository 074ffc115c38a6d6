"""The CUDA half of the device check's machine, on a torch.cuda that only keeps time.

Streams here have clocks: an event takes the time of its stream, and work moves it on when a test says so.
"""

import contextlib
import types

import pytest
import torch

pytest.importorskip("triton", reason="the sections import the kernels")

from perf.device import copy_engine, interference, machine, submission
from perf.device.child import Context
from perf.device.paged import Pool
from perf.device.record import Recorder


class FakeCuda:
    """As much of torch.cuda as the machine uses."""

    def __init__(self):
        self.main = self.Stream()
        self.current = self.main
        self.registered = {}
        self.error = 0
        self.synchronized = 0
        # device events of one run: none of them is over before the device was waited for
        self.is_idle = True
        fake = self

        class Event:
            def __init__(self, enable_timing=False):
                self.time = None

            def record(self, stream=None):
                self.time = (stream or fake.current).work()

            def synchronize(self):
                assert self.time is not None, "waited for an event that was never recorded"

            def query(self):
                return fake.is_idle

            def elapsed_time(self, later):
                return later.time - self.time

        self.Event = Event

    class Stream:
        def __init__(self, device=None, priority=0):
            self.time, self.cuda_stream, self.waits = 0.0, id(self), []

        def work(self, milliseconds=1.0):
            self.time += milliseconds
            return self.time

        def record_event(self):
            return types.SimpleNamespace(time=self.time)

        def wait_event(self, event):
            self.waits.append(event)
            self.time = max(self.time, event.time)

    def init(self):
        pass

    def set_device(self, device):
        assert device == torch.device("cuda", 0)

    def get_device_properties(self, device):
        return types.SimpleNamespace(multi_processor_count=132)

    def set_stream(self, stream):
        self.current = stream

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def _sleep(self, cycles):
        self.current.work(0.25)

    def synchronize(self, device=None):
        self.synchronized += 1

    def cudart(self):
        def register(address, nbytes, flags):
            self.registered[address] = (nbytes, flags)
            return self.error

        def unregister(address):
            del self.registered[address]
            return 0

        return types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


@pytest.fixture
def context(cuda):
    made = machine.CudaMachine()
    # everything but streams, events and registration happens on the CPU
    made.device = torch.device("cpu")
    return Context(
        made, Recorder("x", machine.describe(machine.CpuMachine(), "abc"), None), tiny=True
    )


def test_work_goes_to_a_stream_of_its_own(cuda, context):
    assert cuda.current is not cuda.main
    assert context.machine.stream_handle() == cuda.current.cuda_stream
    assert context.machine.num_sms == 132


def test_rounds_are_timed_by_events_without_the_warm_up(cuda, context):
    lengths = iter([9.0, 9.0, 1.0, 2.0, 3.0])
    prepared = []
    us = context.machine.timed(
        lambda: cuda.current.work(next(lengths)), rounds=3, before=lambda: prepared.append(1)
    )
    # the end event itself is a millisecond of this clock
    assert us == [2000.0, 3000.0, 4000.0]
    assert len(prepared) == 5


def test_a_stream_waits_for_what_is_on_another_one_now(cuda, context):
    first, second = context.machine.new_stream(), context.machine.new_stream()
    first.work(5.0)
    context.machine.order(first, second)
    first.work(5.0)
    assert second.time == 5.0


def test_host_memory_is_registered_portable_and_mapped_and_let_go(cuda, context):
    memory = context.machine.host_memory(8192)
    assert cuda.registered == {memory.address: (8192, 3)}
    assert memory.bytes.data_ptr() == memory.address
    memory.close()
    assert not cuda.registered


def test_a_refused_registration_is_an_error(cuda, context):
    cuda.error = 2
    with pytest.raises(RuntimeError, match="cudaHostRegister of 8192 bytes failed: 2"):
        context.machine.host_memory(8192)


@pytest.fixture
def host_driver(monkeypatch):
    def engine(context, method):
        return copy_engine.CopyEngine(copy_engine.HostDriver(), method=method)

    monkeypatch.setattr(copy_engine, "engine_of", engine)


def test_a_victim_is_timed_beside_transfers(cuda, context, host_driver):
    cuda.is_idle = False
    interference.disturb("gemm", "d2h", "B 2048 KiB", context)
    rows = {(row.case, row.provider): row for row in context.recorder.rows}
    beside = rows["gemm beside d2h", "B 2048 KiB"]
    assert beside.match == "yes"
    assert beside.p50_us == 500.0


def test_transfers_that_end_too_early_are_no_measurement(cuda, context, host_driver):
    with pytest.raises(RuntimeError, match="transfers must outlast the victim"):
        interference.disturb("gemm", "d2h", "B 2048 KiB", context)


def test_the_host_is_timed_with_an_idle_device(cuda, context, host_driver):
    context.once("pool", lambda: Pool(context))
    before = cuda.synchronized
    submission.submit("B", submission.TINY_SHAPE, context)
    assert cuda.synchronized - before >= 3
    (row,) = context.recorder.rows
    assert row.match == "yes"
    assert row.p50_us > 0
