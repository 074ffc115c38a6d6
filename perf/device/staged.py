"""G: does a gather inside device memory and one DMA per blob fill the link?

Two slots of a ring in device memory take turns: while one is being copied by the copy engine, the kernel fills the
other. Loads go the other way around. A blob is one block of Llama 3.1 8B, or of the same model under TP8.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
from perf.device.child import Context
from perf.device.copy_engine import engine_of, stream_of
from perf.device.link import roof
from perf.device.paged import PagedJob, Shape
from perf.device.record import Case

from kvferry.kernels import gather, scatter
from kvferry.kernels.descriptors import Descriptors, Direction
from kvferry.kernels.table import pack_entries

SHAPES = (
    Shape(64 << 10, 32, 128, "Llama 3.1 8B"),
    Shape(8 << 10, 32, 1024, "Llama 3.1 8B, TP8"),
    Shape(576 * 16, 27, 1024, "DeepSeek V2 Lite, fp8"),
)
TINY_SHAPES = (Shape(4 << 10, 3, 8),)
SLOT_BYTES, TINY_SLOT_BYTES = 32 << 20, 32 << 10
SMS, TINY_SMS = (132, 16), (2,)
TILE_BYTES = 16 << 10


@dataclasses.dataclass
class Part:
    """What goes through a slot of the ring at one time."""

    slot: int
    entries: torch.Tensor
    count: int
    copies: Descriptors


class Staged:
    """One job that goes through a ring of two slots.

    Attributes:
        job: what is moved.
        parts: of the job, in order.
    """

    def __init__(self, context: Context, shape: Shape, direction: Direction, max_sms: int) -> None:
        self.job = PagedJob(context, shape)
        self.direction = direction
        self._context, self._max_sms = context, max_sms
        slot_bytes = TINY_SLOT_BYTES if context.tiny else SLOT_BYTES
        machine = context.machine
        self._ring = context.once(
            "ring", lambda: torch.empty((2, slot_bytes), dtype=torch.uint8, device=machine.device)
        )
        self._kernels, self._copies = context.once(
            "streams", lambda: (machine.new_stream(), machine.new_stream())
        )
        per_slot = slot_bytes // shape.block_bytes
        self.parts = [
            self._part(number % 2, slice(start, min(start + per_slot, shape.blocks)))
            for number, start in enumerate(range(0, shape.blocks, per_slot))
        ]

    def _part(self, slot: int, blocks: slice) -> Part:
        job, ids = self.job, self.job.ids[blocks]
        size = job.shape.block_bytes
        places = np.arange(ids.size, dtype=np.int64) * size
        staged = self._ring[slot].data_ptr() + places
        frames = job.frames[blocks.start].data_ptr() + places
        entries = torch.from_numpy(pack_entries(job.table, ids, staged, [ids.size]))
        ends = (frames, staged) if self.direction == "d2h" else (staged, frames)
        copies = Descriptors(*ends, np.full(ids.size, size, np.int64))
        return Part(slot, entries.to(self._ring.device), ids.size, copies)

    def launch(self, part: Part) -> None:
        """Launch the kernel between the cache and the ring."""
        launcher = gather.gather_blocks if self.direction == "d2h" else scatter.scatter_blocks
        launcher(
            self.job.table, part.entries, [part.count],
            max_sms=self._max_sms, bytes_in_flight=self._max_sms * TILE_BYTES,
        )  # fmt: skip

    def copy(self, part: Part) -> None:
        """Copy between the ring and the frames, one descriptor for each blob."""
        engine = engine_of(self._context, "batch")
        engine.copy(part.copies, self.direction, stream_of(self._context))

    def run(self) -> None:
        """Enqueue the whole job behind the current stream, which then waits for it."""
        machine = self._context.machine
        caller = machine.current_stream()
        first: tuple[object, Callable[[Part], None]] = (self._kernels, self.launch)
        second: tuple[object, Callable[[Part], None]] = (self._copies, self.copy)
        if self.direction == "h2d":
            first, second = second, first
        machine.order(caller, self._kernels)
        machine.order(caller, self._copies)
        slot_is_free: dict[int, object] = {}
        for part in self.parts:
            if part.slot in slot_is_free:
                machine.wait(first[0], slot_is_free[part.slot])
            with machine.on(first[0]):
                first[1](part)
            machine.order(first[0], second[0])
            with machine.on(second[0]):
                second[1](part)
            slot_is_free[part.slot] = machine.mark(second[0])
        machine.order(second[0], caller)


def cases(tiny: bool) -> list[Case]:
    """Return the cases, one for each shape and direction."""
    return [
        Case(
            label(shape, direction), shape.num_bytes, f"{shape}, one descriptor for each block",
            functools.partial(stage, shape, direction, TINY_SMS if tiny else SMS),
        )
        for shape in (TINY_SHAPES if tiny else SHAPES)
        for direction in ("d2h", "h2d")
    ]  # fmt: skip


def label(shape: Shape, direction: str) -> str:
    """Return what the rows of a shape and direction are called."""
    blob = shape.block_bytes / 1024
    return f"{direction} {shape.segment_bytes / 1024:g} KiB in blobs of {blob:g} KiB"


def stage(shape: Shape, direction: Direction, sms: tuple[int, ...], context: Context) -> None:
    """Time the whole job, then its kernels alone."""
    name = label(shape, direction)
    kernel = "gather" if direction == "d2h" else "scatter"
    for cap in sms:
        staged = Staged(context, shape, direction, cap)
        moved = staged.job.moved(direction == "d2h")
        us = context.machine.timed(staged.run)
        right = moved.right()
        context.recorder.row(
            name, f"G {cap}", us=us, num_bytes=shape.num_bytes, roof_gbps=roof(context, direction),
            match=right, direction=direction, layout=f"{shape.segment_bytes} B segments",
            num_blocks=shape.blocks, layers=shape.segments, model=shape.model,
        )  # fmt: skip

        def kernels(staged=staged) -> None:
            for part in staged.parts:
                staged.launch(part)

        alone = context.machine.timed(kernels)
        context.recorder.row(
            name,
            f"{kernel} alone {cap}",
            us=alone,
            num_bytes=2 * shape.num_bytes,
            match=right,
            direction=direction,
        )
        share = 100 * sorted(alone)[len(alone) // 2] / sorted(us)[len(us) // 2]
        context.recorder.note(
            f"staged: {name}: {kernel}s with {cap} SMs are {share:.1f} % of the time of G"
        )
