"""Fakes: frames that keep a diary, and a device that a test steps."""

import random
import threading
from collections import Counter, deque

import pytest
import torch

from kvferry.kernels.host import HostMover
from kvferry.kernels.layout import BlockLayout


class FakeFrames:
    """Frames of one size in a poisoned buffer; header ``i`` is frame ``i``. Fails on demand.

    ``faults`` maps a verb to a callable that gets the header and may raise, or return a substitute
    for the verb's answer; None lets the verb answer.
    """

    def __init__(self, part_bytes, num_frames):
        self.part_bytes = part_bytes
        self.memory = torch.full((part_bytes * num_frames,), 0xA5, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.state = ["empty"] * num_frames
        self.calls = Counter()
        self.faults = {}
        self.lock = threading.Lock()

    def part(self, header):
        return self.memory[header * self.part_bytes : (header + 1) * self.part_bytes]

    def _call(self, verb, header):
        with self.lock:
            self.calls[verb, header] += 1
        return self.faults.get(verb, lambda header: None)(header)

    def begin_write(self, header, generation):
        answer = self._call("begin_write", header)
        if answer == "gone":
            return None
        return answer or (header * self.part_bytes, self.part_bytes)

    def finish_write(self, header, generation):
        if self._call("finish_write", header) == "gone":
            return False
        self.state[header] = "ready"
        return True

    def fail_write(self, header, generation):
        self._call("fail_write", header)
        self.state[header] = "failed"

    def begin_read(self, header, generation):
        if self._call("begin_read", header) == "gone":
            return None
        return header * self.part_bytes, self.part_bytes

    def finish_read(self, header, generation, *, ok):
        self._call("finish_read", header)
        if not ok:
            self.state[header] = "bad"

    def endings(self, header):
        """How often a store of this frame was told to have ended."""
        return self.calls["finish_write", header] + self.calls["fail_write", header]


class SteppingStream:
    """A queue of copies that move one block at a time, so that early readers see torn bytes."""

    def __init__(self, device):
        self.device = device
        self.todo = deque()
        self.enqueued = self.passed = 0
        self.errors = {}

    def wait(self, event):
        self.todo.append((event, None, None))
        self.enqueued += 1

    def copy(self, move):
        if "enqueue" in self.device.faults:
            self.device.faults["enqueue"](move)
        self.todo += [(None, move, place) for place in range(len(move.block_ids))]
        self.enqueued += len(move.block_ids)

    def record(self):
        return SteppingEvent(self, self.enqueued)

    def can_step(self):
        return self.todo and (self.todo[0][0] is None or self.todo[0][0].query())

    def step(self):
        _, move, place = self.todo.popleft()
        self.passed += 1
        if move is None:
            return
        try:
            if "copy" in self.device.faults:
                self.device.faults["copy"](move)
        except RuntimeError as error:
            self.errors[self.passed] = error
            return
        block = move.block_ids[place : place + 1]
        self.device.touched(move.is_load, int(block[0]))
        move.mover.move(block, move.first + place, move.address, is_load=move.is_load)


class SteppingEvent:
    def __init__(self, stream, behind):
        self.stream = stream
        self.behind = behind

    def query(self):
        if self.stream.passed < self.behind:
            return False
        mine = [at for at in sorted(self.stream.errors) if at <= self.behind]
        errors = [self.stream.errors.pop(at) for at in mine]
        if errors:
            raise errors[0]
        return True


class SteppingDevice:
    """Nothing runs unless a test says so; which of the possible steps comes next is drawn.

    ``patience`` is how many steps a blocked caller waits before its time is up.
    """

    def __init__(self, lanes=1, depth=1, seed=0, patience=None):
        self.num_lanes, self.depth = lanes, depth
        self.random = random.Random(seed)
        self.patience = patience
        self.streams, self.lanes = [], []
        self.faults = {}
        self.touched = lambda is_load, block: None
        self.engine_event = None

    def make_mover(self, layout):
        return HostMover(layout)

    def open_stream(self, lane):
        self.streams.append(SteppingStream(self))
        return self.streams[-1]

    def fence(self):
        return self.engine_event

    def start(self, steps):
        self.lanes = list(steps)

    def wake(self):
        pass

    def step(self):
        """Run one step of a lane or a stream; False: nothing has anything to do."""
        choices = [s.step for s in self.streams if s.can_step()] + self.lanes
        self.random.shuffle(choices)
        return any(choice() is not False for choice in choices)

    def drain(self):
        while self.step():
            pass

    def block(self, changed, done, timeout_s):
        steps = 0
        while not done():
            if self.patience is not None and steps >= self.patience:
                return False
            steps += 1
            changed.release()
            try:
                if not self.step():
                    return done()
            finally:
                changed.acquire()
        return True

    def close(self):
        self.drain()


PAGES = [48, 20, 20]
BLOCKS_PER_CHUNK = 3


@pytest.fixture
def layout():
    return make_layout()


def make_layout(num_blocks=60, seed=7):
    """Layers of random bytes, in one storage and apart."""
    rng = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-128, 128, (num_blocks, page), dtype=torch.int8, generator=rng)
        for page in PAGES
    ]
    return BlockLayout.from_tensors(tensors, PAGES, BLOCKS_PER_CHUNK)


@pytest.fixture
def new_layout():
    return make_layout


@pytest.fixture
def new_frames():
    return FakeFrames


@pytest.fixture
def new_device():
    return SteppingDevice


@pytest.fixture
def blob_of():
    """Return what a whole chunk's part must hold, made in the simplest way."""

    def make(layout, block_ids):
        parts = [t[b].view(torch.uint8) for b in block_ids for t in layout.tensors]
        return torch.cat(parts)

    return make
