"""Does every kernel move the same bytes as its twin? What the others are worth depends on it, so it comes first."""

import functools
import importlib

import torch
from perf.device.child import Context
from perf.device.machine import link_state, nvidia_smi
from perf.device.record import Case

PARTS = ("correct_blocks", "correct_rows", "correct_paths", "correct_ops")


def cases(tiny: bool) -> list[Case]:
    """Return the cases: what the machine is, then every kernel.

    A part that cannot be imported is one case that fails.
    """
    made = [Case("attributes", 0, "device, link, addresses of registered memory", attributes)]
    for name in PARTS:
        made += part(name, tiny)
    return made


def part(name: str, tiny: bool) -> list[Case]:
    """Return the cases of one part."""
    try:
        return importlib.import_module(f"perf.device.{name}").cases(tiny)
    except Exception as error:
        return [Case(f"import {name}", 0, str(error), functools.partial(fail, error))]


def fail(error: Exception, context: Context) -> None:
    """Raise *error*."""
    raise error


def attributes(context: Context) -> None:
    """Note what the device is, and check that host memory can be used in place."""
    recorder = context.recorder
    if not context.machine.is_cuda:
        recorder.note("correctness: no device: a rehearsal")
        return
    device = torch.cuda.get_device_properties(context.machine.device)
    recorder.note(
        f"device: {device.name}, sm_{device.major}{device.minor}, {device.multi_processor_count} SMs, "
        f"{device.total_memory / 2**30:.0f} GiB, L2 {device.L2_cache_size >> 20} MiB, driver "
        f"{nvidia_smi('driver_version')}, PCIe now {link_state()}"
    )
    host = context.machine.host_memory(1 << 20)
    recorder.note(f"torch takes registered memory for pinned: {host.bytes.is_pinned()}")
    from cupy.cuda import runtime

    for name in (
        "CanUseHostPointerForRegisteredMem", "HostRegisterSupported", "HostRegisterReadOnlySupported",
        "PageableMemoryAccess", "AsyncEngineCount",
    ):  # fmt: skip
        value = runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), 0)
        recorder.note(f"attribute {name}: {value}")
    pointer = runtime.pointerGetAttributes(host.address).devicePointer
    recorder.row("registered memory", "same address on the device", match=pointer == host.address)
    host.close()
