"""The machine that a section runs on: a CUDA device, or for rehearsals this host pretending to be one.

Both have the same methods, so that a section's own logic (which bytes, which addresses, what is compared) runs on a
CPU too. A rehearsal's figures mean nothing and are not recorded.
"""

import contextlib
import mmap
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any

import numpy as np
import torch
from perf.harness import commit, cpu_name

import kvferry

MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; Python's mmap module has no name for it."""
LEAD_CYCLES = 400_000
"""Cycles that a device waits before a round is timed, some 0.2 ms: by then its work has been handed over, and the host's
time for that is not counted as the device's."""
REGISTER_FLAGS = 1 | 2
"""cudaHostRegisterPortable, cudaHostRegisterMapped."""


class HostMemory:
    """Bytes of a memfd, as an arena is made of, usable by the device.

    Attributes:
        address: of the first byte, the same for host and device.
        nbytes: how many.
        bytes: ``[nbytes]`` uint8 CPU tensor over them.
        populate_s: what it took to have pages behind every byte.
        register_s: what it took to register them with the device.
    """

    def __init__(self, nbytes: int, register: Callable[[int, int], Callable[[], None]]) -> None:
        descriptor = os.memfd_create("kvferry-device-check")
        try:
            os.ftruncate(descriptor, nbytes)
            self._mapping = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        started = time.perf_counter()
        try:
            self._mapping.madvise(MADV_POPULATE_WRITE)
        except OSError:
            # an older kernel: a write to each page does the same
            np.frombuffer(self._mapping, np.uint8)[:: mmap.PAGESIZE] = 0
        self.populate_s = time.perf_counter() - started
        array = np.frombuffer(self._mapping, np.uint8)
        self.nbytes = nbytes
        self.address = int(array.ctypes.data)
        self.bytes = torch.from_numpy(array)
        started = time.perf_counter()
        self._unregister = register(self.address, nbytes)
        self.register_s = time.perf_counter() - started

    def close(self) -> None:
        """Unregister the bytes. The mapping goes with the process: tensors may still point into it."""
        self._unregister()


class CpuMachine:
    """This host in the place of a device: everything happens at once, in order."""

    is_cuda = False
    device = torch.device("cpu")
    num_sms = 4

    def host_memory(self, nbytes: int) -> HostMemory:
        """Return *nbytes* that host and device reach at one address."""
        return HostMemory(nbytes, lambda address, size: lambda: None)

    def synchronize(self) -> None:
        """Wait for all work; raise what went wrong in it."""

    def new_stream(self, priority: int = 0) -> Any:
        """Return a stream."""
        return None

    def current_stream(self) -> Any:
        """Return the stream that work goes to now."""
        return None

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make *stream* the current one."""
        yield

    def mark(self, stream: Any) -> Any:
        """Return an event behind what is on *stream* now."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Have *stream* wait for *event*."""

    def order(self, first: Any, then: Any) -> None:
        """Have *then* wait for what is on *first* now."""
        self.wait(then, self.mark(first))

    def timed(
        self,
        run: Callable[[], object],
        rounds: int = 5,
        warm: int = 2,
        before: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Return the microseconds that what *run* enqueues took, in each round after the warm-up."""
        before()
        run()
        return [1.0]

    def stream_handle(self) -> int:
        """Return the current stream as the driver knows it."""
        return 0


class CudaMachine(CpuMachine):
    """The first CUDA device."""

    is_cuda = True

    def __init__(self) -> None:
        torch.cuda.init()
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = properties.multi_processor_count
        # work goes to a stream of its own: the batch copy refuses the legacy default stream
        torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def host_memory(self, nbytes: int) -> HostMemory:
        """Return *nbytes* of a memfd, populated and registered.

        Registration goes through torch: `kernels/pinning.py` is judged by its own section, and a fault in it must not
        take the other sections along.
        """
        return HostMemory(nbytes, register_with_torch)

    def synchronize(self) -> None:
        """Wait for all work; raise what went wrong in it."""
        torch.cuda.synchronize(self.device)

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Return a stream; a lower *priority* number goes first."""
        return torch.cuda.Stream(self.device, priority=priority)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream that work goes to now."""
        return torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Make *stream* the current one."""
        with torch.cuda.stream(stream):
            yield

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event behind what is on *stream* now."""
        return stream.record_event()

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Have *stream* wait for *event*."""
        stream.wait_event(event)

    def timed(
        self,
        run: Callable[[], object],
        rounds: int = 5,
        warm: int = 2,
        before: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Return the microseconds that what *run* enqueues took, in each round after the warm-up."""
        times = []
        for _ in range(warm + rounds):
            before()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LEAD_CYCLES)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return times[warm:]

    def stream_handle(self) -> int:
        """Return the current stream as the driver knows it."""
        return int(self.current_stream().cuda_stream)


def register_with_torch(address: int, nbytes: int) -> Callable[[], None]:
    """Register host bytes by the runtime that torch carries; return what undoes it.

    Raises:
        RuntimeError: the runtime refused; the message has its error.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, nbytes, REGISTER_FLAGS)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed: {error}")
    return lambda: check(runtime.cudaHostUnregister(address))


def check(error: Any) -> None:
    """Raise unless *error* is cudaSuccess."""
    if int(error) != 0:
        raise RuntimeError(f"the CUDA runtime answered {error}")


def describe(machine: CpuMachine, revision: str = "") -> dict[str, str]:
    """Return the fields of a row that say what machine this is and what ran on it."""
    fields = {
        "commit": revision or commit(), "version": kvferry.__version__, "gpu": "none", "driver": "", "cuda": "",
        "torch": torch.__version__, "triton": version_of("triton"), "host_cpu": cpu_name(), "pcie": "",
    }  # fmt: skip
    if machine.is_cuda:
        fields |= {
            "gpu": torch.cuda.get_device_name(machine.device), "cuda": str(torch.version.cuda),
            "driver": nvidia_smi("driver_version"), "pcie": link_state(),
        }  # fmt: skip
    return fields


def link_state() -> str:
    """Return generation and width of the device's link as they are now; an idle link reports less."""
    return nvidia_smi("pcie.link.gen.current,pcie.link.width.current").replace(", ", " x")


def nvidia_smi(query: str) -> str:
    """Return what nvidia-smi answers to *query*, "" if it does not."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return made.stdout.strip()


def version_of(package: str) -> str:
    """Return the installed version of *package*, "" if there is none."""
    try:
        return installed(package)
    except PackageNotFoundError:
        return ""


def host() -> str:
    """Return this host in one line."""
    return f"{cpu_name()} | python {platform.python_version()} | torch {torch.__version__}"
