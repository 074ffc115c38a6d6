"""What does it cost the host to hand over a transfer? 2,000 blocks of 80 layers, and the small calls around it."""

import functools
import time

import numpy as np
import torch
from perf.device import bulk, copy_engine
from perf.device.child import Context
from perf.device.paged import PagedJob, Shape
from perf.device.record import Case

from kvferry.kernels import gather
from kvferry.kernels.descriptors import BlockRuns
from kvferry.kernels.table import pack_entries

SHAPE, TINY_SHAPE = Shape(1024, 80, 2000), Shape(1024, 3, 8)
"""Small pages: only the host's time counts."""
ROUNDS, BATCH_ROUNDS = 30, 5
"""A batch of 160,000 descriptors takes long, and varies little."""


def cases(tiny: bool) -> list[Case]:
    """Return the cases."""
    shape = TINY_SHAPE if tiny else SHAPE
    made = [
        Case(
            f"submit by {kind}", shape.num_bytes, str(shape), functools.partial(submit, kind, shape)
        )
        for kind in ("S", "B", "T")
    ]
    if not tiny:
        made.append(Case("small calls", 0, "event record, query, wait", small_calls))
    return made


def host_us(context: Context, run, rounds: int = ROUNDS) -> list[float]:
    """Return the microseconds until *run* returns, with a device that is idle before each round."""
    times = []
    for _ in range(2 if context.tiny else rounds + 3):
        context.machine.synchronize()
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e6)
    return times[1:] if context.tiny else times[3:]


def submit(kind: str, shape: Shape, context: Context) -> None:
    """Time everything from block ids to the return of the last call."""
    job = PagedJob(context, shape)
    addresses = job.frames.data_ptr() + np.arange(shape.blocks, dtype=np.int64) * shape.block_bytes
    if kind == "B":
        runs, engine = BlockRuns(job.table), copy_engine.engine_of(context, "batch")

        def run() -> None:
            engine.copy_blocks(
                runs, job.ids, addresses, job.counts, "d2h", copy_engine.stream_of(context)
            )
    else:
        launch = gather.gather_blocks if kind == "S" else bulk.launcher("d2h", context)

        def run() -> None:
            packed = pack_entries(job.table, job.ids, addresses, job.counts)
            entries = torch.from_numpy(packed).to(context.machine.device, non_blocking=True)
            launch(job.table, entries, job.counts, max_sms=2)

    moved = job.moved(to_host=True)
    us = host_us(context, run, BATCH_ROUNDS if kind == "B" else ROUNDS)
    context.machine.synchronize()
    context.recorder.row(
        "submit 2,000 blocks of 80 layers", kind, us=us, match=moved.right(), num_blocks=shape.blocks,
        layers=shape.segments,
    )  # fmt: skip


def small_calls(context: Context) -> None:
    """Time what a driver does around each transfer."""
    machine = context.machine
    stream, event = machine.new_stream(), torch.cuda.Event()
    calls = {
        "event record": lambda: event.record(stream),
        "event query": event.query,
        "stream waits for event": lambda: stream.wait_event(event),
    }
    for name, call in calls.items():
        us = host_us(context, lambda call=call: [call() for _ in range(100)])
        context.recorder.row("small calls", name, us=[one / 100 for one in us])
