"""What does pinning host memory cost? `kernels/pinning.py` on memfd mappings, with and without pages behind them.

Registered memory is then used: the copy engine writes into both ends of it, and the bytes are compared.
"""

import ctypes
import dataclasses
import functools
import mmap
import os
import time

import numpy as np
import torch
from perf.device.child import Context
from perf.device.machine import MADV_POPULATE_WRITE, register_with_torch
from perf.device.paged import POISON, random_bytes
from perf.device.record import Case

from kvferry.kernels import pinning

GIB = 1 << 30
PROBE_BYTES, TINY_PROBE_BYTES = 16 << 20, 16 << 10
MADV_HUGEPAGE = 14
MFD_HUGETLB = 4


@dataclasses.dataclass(frozen=True)
class How:
    """One way of getting registered memory.

    Attributes:
        name: what the rows are called.
        nbytes: how much.
        populate: whether pages are in place before.
        pieces: registrations it is cut into.
        by_torch: with torch's runtime, for comparison.
        huge: "", "advice" (transparent huge pages) or "hugetlb" (reserved ones).
        read_only: whether the mapping is.
    """

    name: str
    nbytes: int
    populate: bool = True
    pieces: int = 1
    by_torch: bool = False
    huge: str = ""
    read_only: bool = False


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    unit = 1 << 20 if tiny else GIB
    ways = (
        How("register populated", unit),
        How("register cold", unit, populate=False),
        How("register populated", 4 * unit),
        How("register in pieces", unit, pieces=4),
        How("register read-only", unit, read_only=True),
        How("register with huge pages advised", unit, huge="advice"),
        How("register reserved huge pages", unit, huge="hugetlb"),
        How("register populated by torch", unit, by_torch=True),
    )
    return [
        Case(
            f"{how.name}, {how.nbytes / unit:g} {'MiB' if tiny else 'GiB'}", how.nbytes,
            f"pages in place: {how.populate}, {how.pieces} pieces", functools.partial(pin, how),
        )
        for how in (ways[:5] if tiny else ways)
    ]  # fmt: skip


class HostRuntime:
    """The calls of a CUDA runtime that pinning makes, on a host without one: for rehearsals."""

    class CUDARuntimeError(RuntimeError):
        """Never raised here."""

    @dataclasses.dataclass
    class Pointer:
        """What the device knows of an address."""

        devicePointer: int

    def __getattr__(self, name: str) -> str:
        return name

    def getDevice(self) -> int:
        """Return the current device."""
        return 0

    def deviceGetAttribute(self, attribute: str, device: int) -> int:
        """Return that the device can."""
        return 1

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Read a byte of each end, as pinning would fault it in."""
        ctypes.string_at(address, 1)
        ctypes.string_at(address + nbytes - 1, 1)

    def hostUnregister(self, address: int) -> None:
        """Do nothing."""

    def pointerGetAttributes(self, address: int) -> Pointer:
        """Return the same address."""
        return self.Pointer(address)


def pin(how: How, context: Context) -> None:
    """Map, register, use, unregister."""
    descriptor = os.memfd_create("kvferry-pin", MFD_HUGETLB if how.huge == "hugetlb" else 0)
    try:
        os.ftruncate(descriptor, how.nbytes)
        mapping = mmap.mmap(descriptor, how.nbytes)
        reader = (
            mmap.mmap(descriptor, how.nbytes, prot=mmap.PROT_READ) if how.read_only else mapping
        )
    except OSError as error:
        if how.huge != "hugetlb":
            raise
        context.recorder.note(f"registration: no reserved huge pages: {error}")
        return
    finally:
        os.close(descriptor)
    if how.huge == "advice":
        mapping.madvise(MADV_HUGEPAGE)
    started = time.perf_counter()
    if how.populate:
        mapping.madvise(MADV_POPULATE_WRITE)
    populate_s = time.perf_counter() - started
    memory = np.frombuffer(reader, np.uint8)
    address = int(memory.ctypes.data)
    started = time.perf_counter()
    if how.by_torch:
        close = (
            register_with_torch(address, how.nbytes) if context.machine.is_cuda else lambda: None
        )
    else:
        piece = how.nbytes // how.pieces
        close = pinning.register(
            address, how.nbytes, boundaries=range(0, how.nbytes, piece), piece_bytes=piece,
            is_read_only=how.read_only, runtime=None if context.machine.is_cuda else HostRuntime(),
        ).close  # fmt: skip
    register_s = time.perf_counter() - started
    right = usable(memory, mapping, how.read_only, context)
    started = time.perf_counter()
    close()
    unregister_s = time.perf_counter() - started
    size = f"{how.nbytes / GIB:g} GiB"
    record = functools.partial(context.recorder.row, how.name, num_bytes=how.nbytes, match=right)
    record(provider=f"{'torch' if how.by_torch else 'pinning'} {size}", us=[register_s * 1e6])
    record(provider=f"unregister {size}", us=[unregister_s * 1e6])
    if how.populate:
        record(provider=f"populate {size}", us=[populate_s * 1e6])


def usable(memory: np.ndarray, mapping: mmap.mmap, read_only: bool, context: Context) -> bool:
    """Return whether the device reads and writes the right bytes at both ends of registered memory."""
    size = TINY_PROBE_BYTES if context.tiny else PROBE_BYTES
    source = random_bytes(size, context.machine.device)
    writable = torch.from_numpy(np.frombuffer(mapping, np.uint8))
    right = True
    for place in (slice(0, size), slice(memory.size - size, memory.size)):
        end = writable[place]
        if read_only:
            end.copy_(source.cpu())
        else:
            end.fill_(POISON)
            end.copy_(source, non_blocking=True)
        context.machine.synchronize()
        there = torch.full_like(source, POISON)
        # the registered addresses are those of the read-only mapping, where there is one
        seen = from_memory(memory[place])
        there.copy_(seen, non_blocking=True)
        context.machine.synchronize()
        right &= bool(torch.equal(there, source)) and bool(torch.equal(end, source.cpu()))
    return right


def from_memory(memory: np.ndarray) -> torch.Tensor:
    """Return a tensor over *memory*, which may be read-only: it is only read."""
    whole = (ctypes.c_uint8 * memory.size).from_address(int(memory.ctypes.data))
    return torch.from_numpy(np.ctypeslib.as_array(whole))
