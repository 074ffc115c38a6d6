"""What a device is, to whoever drives transfers: streams, events, copies, and lanes that are stepped.

A *lane* carries chunks one after the other; its ``step`` (lane.py) never blocks. The device owns
whatever runs the steps: threads (host_device.py), a thread that polls a GPU's events, or a test that
chooses the order. A *stream* carries the copies of one lane in order; an *event* says that what was
enqueued before it has passed.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.kernels.layout import BlockLayout

Step = Callable[[], bool]
"""Advance a lane by one step; False: there was nothing to do. Never blocks, never raises."""


class Mover(Protocol):
    """Moves the chunks of one KV cache group. What it is, is between a device and its streams."""

    @property
    def layout(self) -> BlockLayout:
        """The group's layout."""
        ...


class Move(NamedTuple):
    """One chunk's copy: blocks of a group <-> a part of a blob.

    Attributes:
        mover: of the group, made by the device that gets the move.
        block_ids: ``[N]`` block numbers, checked.
        first: place of the first block inside the chunk.
        address: of the part, in host memory; ``mover.layout.part_bytes`` bytes.
        is_load: part to blocks; else blocks to part.
    """

    mover: Mover
    block_ids: npt.NDArray[np.int64]
    first: int
    address: int
    is_load: bool


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Say whether everything before it has passed; once it has, raise what made any of it fail."""
        ...


class Stream(Protocol):
    """Copies in order. One thread at a time."""

    def wait(self, event: Event) -> None:
        """Begin later copies only after *event*, which may belong to another stream."""
        ...

    def copy(self, move: Move) -> None:
        """Enqueue a copy; if this raises, nothing was enqueued and no page is touched any more.

        The memory belongs to the stream until an event after it has passed.
        """
        ...

    def record(self) -> Event:
        """Return the point behind everything enqueued so far. Does not raise."""
        ...


class Device(Protocol):
    """Where the engine's pages are, and what moves them.

    Attributes:
        num_lanes: chunks that may be under way in parallel.
        depth: chunks that one lane may have under way.
    """

    num_lanes: int
    depth: int

    def make_mover(self, layout: BlockLayout) -> Mover:
        """Prepare to move a group's chunks; ValueError if its pages are not on this device."""
        ...

    def open_stream(self, lane: int) -> Stream:
        """Return the stream of a lane. Owned by the device."""
        ...

    def fence(self) -> Event | None:
        """Return the point behind all work the engine has enqueued; None: such work has passed."""
        ...

    def start(self, steps: Sequence[Step]) -> None:
        """Run the lanes from now on: each step by one thread at a time. Called once."""
        ...

    def wake(self) -> None:
        """Say that lanes may have something to do. Never waits."""
        ...

    def block(
        self, changed: threading.Condition, done: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Wait until *done*, at most *timeout_s* seconds (None: for ever), and say whether it is.

        The caller holds *changed*, which is notified of every change that may matter to *done*.
        """
        ...

    def close(self) -> bool:
        """Let the lanes run until none has anything to do, then stop; say whether they have. May be called twice."""
        ...
