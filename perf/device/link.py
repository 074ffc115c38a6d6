"""What can the link do? One large copy by the copy engine each way, then both ways at once, then inside the device.

These are the roofs that the other sections' figures are held against; each of them measures its own again.
"""

import functools
from collections.abc import Callable

import torch
from perf.device.child import Context
from perf.device.machine import link_state, nvidia_smi
from perf.device.paged import POISON, Pool, random_bytes
from perf.device.record import Case

FULL, TINY = 256 << 20, 64 << 10


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    size = TINY if tiny else FULL
    label = name_of(size)
    return [
        Case(f"h2d {label}", size, "registered memfd to device", functools.partial(one_way, "h2d", size)),
        Case(f"d2h {label}", size, "device to registered memfd", functools.partial(one_way, "d2h", size)),
        Case(f"both {label}", 2 * size, "both at once, two streams", functools.partial(both, size)),
        Case(f"device {label}", 2 * size, "inside device memory, read plus written", functools.partial(inside, size)),
    ]  # fmt: skip


def name_of(size: int) -> str:
    """Return *size* in words."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def roof(context: Context, direction: str) -> float:
    """Return what the copy engine does in this process in *direction*, in GB/s; measured once.

    In memory of its own: the pool's may hold what a caller is about to compare.
    """

    def measure() -> float:
        size = TINY if context.tiny else FULL
        host = context.machine.host_memory(size)
        device = random_bytes(size, context.machine.device)
        host.bytes.copy_(device)
        ends = (host.bytes, device) if direction == "d2h" else (device, host.bytes)
        us = context.machine.timed(lambda: ends[0].copy_(ends[1], non_blocking=True))
        host.close()
        return size / sorted(us)[len(us) // 2] / 1e3

    return context.once(("roof", direction), measure)


def copy_of(
    context: Context, direction: str, size: int, offset: int = 0
) -> tuple[Callable[[], object], torch.Tensor, torch.Tensor]:
    """Return what copies *size* bytes, its destination and its source."""
    pool = context.once("pool", lambda: Pool(context))
    host = pool.host.bytes[offset : offset + size]
    device = pool.device_bytes[offset : offset + size]
    destination, source = (host, device) if direction == "d2h" else (device, host)
    return lambda: destination.copy_(source, non_blocking=True), destination, source


def one_way(direction: str, size: int, context: Context) -> None:
    """Copy in one direction."""
    run, destination, source = copy_of(context, direction, size)
    destination.fill_(POISON)
    us = context.machine.timed(run)
    right = torch.equal(destination.cpu(), source.cpu())
    context.recorder.row(
        f"{direction} {name_of(size)}", "copy_engine", us=us, num_bytes=size, match=right,
        direction=direction, roof_gbps=size / min(us) / 1e3,
    )  # fmt: skip
    if context.machine.is_cuda:
        context.recorder.note(
            f"link: PCIe {link_state()} right after {direction}, at most {_most()}"
        )


def _most() -> str:
    return nvidia_smi("pcie.link.gen.max,pcie.link.width.max").replace(", ", " x")


def both(size: int, context: Context) -> None:
    """Copy in both directions at once."""
    machine = context.machine
    away, away_to, away_from = copy_of(context, "d2h", size)
    home, home_to, home_from = copy_of(context, "h2d", size, offset=size)
    main, side = machine.new_stream(), machine.new_stream()
    away_to.fill_(POISON)
    home_to.fill_(POISON)

    def run() -> None:
        machine.order(machine.current_stream(), main)
        machine.order(machine.current_stream(), side)
        with machine.on(main):
            away()
        with machine.on(side):
            home()
        machine.order(main, machine.current_stream())
        machine.order(side, machine.current_stream())

    us = machine.timed(run)
    right = torch.equal(away_to.cpu(), away_from.cpu()) and torch.equal(
        home_to.cpu(), home_from.cpu()
    )
    context.recorder.row(
        f"both {name_of(size)}", "copy_engine", us=us, num_bytes=2 * size, match=right,
        direction="both", roof_gbps=roof(context, "h2d") + roof(context, "d2h"),
    )  # fmt: skip


def inside(size: int, context: Context) -> None:
    """Copy inside device memory."""
    pool = context.once("pool", lambda: Pool(context))
    source, destination = pool.device_bytes[:size], pool.device_bytes[size : 2 * size]
    destination.fill_(POISON)
    us = context.machine.timed(lambda: destination.copy_(source))
    context.recorder.row(
        f"device {name_of(size)}", "torch copy", us=us, num_bytes=2 * size,
        match=torch.equal(destination, source), direction="device", roof_gbps=2 * size / min(us) / 1e3,
    )  # fmt: skip
