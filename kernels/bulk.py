"""Gather and scatter blocks by the bulk copy engine of sm_90 and later: pages <-> frames, a warp per SM.

The kernels are in ``bulk.cu``, compiled at first use by NVRTC through cupy and kept in cupy's cache on
disk. One launch serves all groups, from the tables of :mod:`.table`. It moves what
:mod:`.gather` and :mod:`.scatter` move, without checksums and flags; those remain for devices that have no
bulk copy, and for layouts whose runs are not multiples of 16 bytes: see :func:`available` and
:func:`reason_against`.

Bytes in flight, per CTA, are those of the ring in its shared memory:

    ``num_stages * tile_bytes``, of which ``PENDING`` stages are on their way out
"""

import functools
import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .table import MAX_GROUPS, MAX_UNITS, MIN_TILE_BYTES, LayoutTable, Tiles

TILE_BYTES = 16 << 10
"""Bytes of a tile, and of a stage of the ring, where the budget allows: large enough that one thread's bookkeeping, some hundred
instructions a tile, is small beside the tile's time on a link of 64 GB/s (256 ns)."""

MAX_SMS = 2
"""CTAs of a launch. By arithmetic one ring keeps 1.5 us of such a link in flight; not measured yet."""

MAX_STAGES = 32
GATHER_PENDING, SCATTER_PENDING = 4, 2
CONTROL_BYTES = 32 * (24 + 8 + 8) + 32 * 4
"""What ``bulk.cu`` says under the same names (a test compares them); the last is ``sizeof(Control)``."""

MIN_CAPABILITY = (9, 0)
COMPILE_OPTIONS = ("--std=c++17",)
"""For NVRTC, beside the architecture."""

WORD_BYTES = 16
"""What every address and every size must be a multiple of."""

_GROUP = np.dtype(
    [(name, np.uint32) for name in ("first_unit", "first_entry", "first_tile", "tiles")]
)
_GROUPS = np.dtype([("row", _GROUP, MAX_GROUPS)])


class BulkUnavailableError(RuntimeError):
    """The bulk copy kernels cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The shape of a launch.

    Attributes:
        grid: CTAs at most, one to an SM.
        num_stages: of the ring of each.
        tile_bytes: of a stage.
    """

    grid: int
    num_stages: int
    tile_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        return self.num_stages * self.tile_bytes + CONTROL_BYTES


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What was compiled for one device."""

    cupy: Any
    gather: Any
    scatter: Any
    shared_bytes: int


_kernels: dict[int, _Kernels | str] = {}
_lock = threading.Lock()


@functools.cache
def source() -> str:
    """Return the kernels' source text."""
    return Path(__file__).with_name("bulk.cu").read_text(encoding="utf-8")


def cubin(architecture: str) -> bytes:
    """Compile the kernels without a device, as reports and tests do; not what a launch uses.

    Args:
        architecture: ``"sm_90"`` or later.

    Raises:
        ImportError: cuda-bindings is not installed.
        RuntimeError: NVRTC cannot be loaded, or refuses the source; its log is the message.
    """
    # a compiled module without types
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC failed: {result[0]}")
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(source().encode(), b"bulk.cu", 0, [], []))
    options = [*(option.encode() for option in COMPILE_OPTIONS), f"-arch={architecture}".encode()]
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options)[0].value:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC refused bulk.cu for {architecture}: {log.decode()}")
        image: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image


def available(device: torch.device | int) -> str | None:
    """Return why the kernels cannot run on *device*, or None if they can.

    The first call for a device compiles them, or loads them from cupy's cache; later ones look the
    answer up.

    Args:
        device: a CUDA device; another kind of device gets a reason, not an error.

    Threads:
        Any number at once.
    """
    found = _kernels_of(device)
    return found if isinstance(found, str) else None


def reason_against(table: LayoutTable) -> str | None:
    """Return why the kernels cannot move the blocks of *table*, or None if they can."""
    if table.alignment % WORD_BYTES:
        return (
            f"bulk copies move multiples of {WORD_BYTES} bytes; the layout's runs are aligned to "
            f"{table.alignment}"
        )
    return available(table.device)


def gather_blocks(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    *,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int | None = None,
) -> None:
    """Copy blocks out of the cache, each to its address.

    Enqueued on the current stream of the table's device; frames may be read once that has passed.

    Args:
        table: of the cache, with an alignment of 16.
        entries: ``[N, 2]`` int64 on the device, from :func:`.table.pack_entries`; they, the cache and the
            frames must live until the stream has passed.
        counts: entries of each group.
        max_sms: CTAs at most.
        bytes_in_flight: of all CTAs together, in bytes; None: what shared memory holds.

    Raises:
        BulkUnavailableError: the kernels cannot run on the device.

    Units:
        Moves ``2 * sum(block_bytes)`` bytes over the entries that are no holes.

    Source:
        Kernel ``bulk.cu``; meaning ``reference.py``; measured by ``perf/device_check.py``.
    """
    _launch(table, entries, counts, max_sms, bytes_in_flight, is_gather=True)


def scatter_blocks(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    *,
    max_sms: int = MAX_SMS,
    bytes_in_flight: int | None = None,
) -> None:
    """Copy blocks into the cache, each from its address; all else as in :func:`gather_blocks`."""
    _launch(table, entries, counts, max_sms, bytes_in_flight, is_gather=False)


def group_rows(tiles: Tiles, counts: Sequence[int]) -> tuple[np.ndarray[Any, Any], int]:
    """Return where each group's units, entries and tiles start, and how many units there are.

    Returns:
        The kernel's ``Groups``, as an array of one element, and the number of units.
    """
    rows = np.zeros(1, _GROUPS)
    unit = entry = 0
    for group, (count, first, per_block) in enumerate(
        zip(counts, tiles.first, tiles.count, strict=True)
    ):
        rows["row"][0, group] = (unit, entry, first, per_block)
        unit += count * per_block
        entry += count
    return rows, unit


def choose_ring(max_sms: int, bytes_in_flight: int | None, shared_bytes: int, pending: int) -> Ring:
    """Return the shape of a launch.

    Args:
        max_sms: CTAs at most.
        bytes_in_flight: of all CTAs together; None: as many as fit.
        shared_bytes: shared memory that one CTA may have.
        pending: stages on their way out.

    Returns:
        A ring with a stage more than *pending* at least, its tiles cut down if need be. Only a budget
        below ``pending + 1`` of the smallest tiles is exceeded.
    """
    grid = max(1, max_sms)
    room = shared_bytes - CONTROL_BYTES
    if bytes_in_flight is not None:
        room = min(room, bytes_in_flight // grid)
    tile_bytes = TILE_BYTES
    while room < (pending + 1) * tile_bytes and tile_bytes > MIN_TILE_BYTES:
        tile_bytes //= 2
    return Ring(grid, min(MAX_STAGES, max(room // tile_bytes, pending + 1)), tile_bytes)


def _launch(
    table: LayoutTable,
    entries: torch.Tensor,
    counts: Sequence[int],
    max_sms: int,
    bytes_in_flight: int | None,
    *,
    is_gather: bool,
) -> None:
    kernels = _kernels_of(table.device)
    if isinstance(kernels, str):
        raise BulkUnavailableError(kernels)
    pending = GATHER_PENDING if is_gather else SCATTER_PENDING
    ring = choose_ring(max_sms, bytes_in_flight, kernels.shared_bytes, pending)
    tiles = table.tiles(ring.tile_bytes)
    groups, num_units = group_rows(tiles, counts)
    if not num_units:
        return
    if num_units >= MAX_UNITS:
        raise ValueError(f"entries must be less than {MAX_UNITS} tiles together; got {num_units}")
    cupy = kernels.cupy
    stream = _Stream(torch.cuda.current_stream(table.device).cuda_stream)
    with cupy.cuda.Device(_index(table.device)), cupy.cuda.Stream.from_external(stream):
        (kernels.gather if is_gather else kernels.scatter)(
            (min(ring.grid, num_units),),
            (32,),
            (
                np.uint64(entries.data_ptr()),
                np.uint64(tiles.table.data_ptr()),
                groups,
                np.uint32(len(counts)),
                np.uint32(num_units),
                np.uint32(ring.num_stages),
                np.uint32(ring.tile_bytes),
            ),
            shared_mem=ring.shared_bytes,
        )


class _Stream:
    """torch's stream under the protocol that cupy takes streams by; torch 2.6 does not speak it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _index(device: torch.device | int) -> int:
    """Return the CUDA ordinal of *device*."""
    if isinstance(device, int):
        return device
    return torch.cuda.current_device() if device.index is None else device.index


def _kernels_of(device: torch.device | int) -> _Kernels | str:
    """Return the kernels of *device*, or why there are none."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return f"bulk copies need a CUDA device; got {device}"
    try:
        index = _index(device)
    except (RuntimeError, AssertionError) as error:
        return f"bulk copies need a CUDA device; got {error}"
    with _lock:
        if index not in _kernels:
            _kernels[index] = _compile(index)
        return _kernels[index]


def _compile(index: int) -> _Kernels | str:
    """Compile for one device; return why if it can't be done."""
    try:
        import cupy
    except ImportError as error:
        return f"bulk copies need cupy (the extra 'cuda'); got {error}"
    try:
        with cupy.cuda.Device(index) as device:
            capability = device.compute_capability
            if int(capability) < MIN_CAPABILITY[0] * 10 + MIN_CAPABILITY[1]:
                return f"bulk copies need sm_90 or later; device {index} is sm_{capability}"
            shared = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
            module = cupy.RawModule(code=source(), options=COMPILE_OPTIONS)
            gather = module.get_function("kvferry_gather_blocks")
            scatter = module.get_function("kvferry_scatter_blocks")
            for kernel in (gather, scatter):
                kernel.max_dynamic_shared_size_bytes = shared
    # the errors of CUDA's driver, runtime and NVRTC are RuntimeErrors; a library may be missing, too
    except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
        return f"bulk copies cannot be compiled for device {index}: {error}"
    return _Kernels(cupy, gather, scatter, shared)
