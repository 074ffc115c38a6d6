"""Random orders of everything that can happen, on a device that runs one step at a time."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.transfer.queue import Copy, TransferQueue

CHUNK = 3
NUM_CHUNKS = 20


class Game:
    """An engine that submits, waits and overwrites pages, in an order drawn from a seed."""

    def __init__(self, seed, lanes, depth, new_layout, new_frames, new_device, faulty):
        self.random = random.Random(seed)
        self.layout = new_layout(NUM_CHUNKS * CHUNK)
        self.frames = new_frames(self.layout.part_bytes, 400)
        self.device = new_device(lanes, depth, seed)
        self.device.touched = self.check_touch
        if faulty:
            for verb in ("begin_write", "finish_write", "begin_read", "fail_write", "finish_read"):
                self.frames.faults[verb] = self.maybe_fail
            self.device.faults = {"copy": self.maybe_fail, "enqueue": self.maybe_fail}
        self.queue = TransferQueue(
            [self.layout], self.frames, self.device, max_inflight_bytes=10 * self.layout.part_bytes
        )
        self.free_chunks = set(range(NUM_CHUNKS))
        self.next_header = self.next_job = 0
        self.ready = []  # headers of frames that may be loaded
        self.jobs = {}  # job -> (is_load, chunks, headers, expected blobs)
        self.busy = {}  # job -> chunks whose pages it may touch
        self.results = {}

    def maybe_fail(self, header):
        if self.random.random() < 0.1:
            raise RuntimeError("injected")
        return "gone" if self.random.random() < 0.1 else None

    def check_touch(self, is_load, block):
        owners = [job for job, chunks in self.busy.items() if block // CHUNK in chunks]
        assert owners, f"block {block} is touched though its pages are the engine's again"
        assert self.jobs[owners[0]][0] == is_load

    def blocks(self, chunk):
        return list(range(chunk * CHUNK, chunk * CHUNK + CHUNK))

    def blob(self, chunk):
        pages = [t[b].view(torch.uint8) for b in self.blocks(chunk) for t in self.layout.tensors]
        return torch.cat(pages)

    def overwrite(self, chunk):
        for tensor in self.layout.tensors:
            tensor[self.blocks(chunk)] = self.random.randrange(-128, 128)

    def submit(self, is_load):
        wanted = min(self.random.randrange(0, 4), len(self.free_chunks))
        chunks = self.random.sample(sorted(self.free_chunks), wanted)
        if is_load and len(self.ready) < len(chunks):
            return
        if is_load:
            headers = [self.random.choice(self.ready) for _ in chunks]
        else:
            headers = list(range(self.next_header, self.next_header + len(chunks)))
            self.next_header += len(chunks)
        size = self.layout.block_bytes * CHUNK
        blobs = [
            self.frames.part(h)[:size].clone() if is_load else self.blob(c)
            for h, c in zip(headers, chunks, strict=True)
        ]
        job, self.next_job = self.next_job, self.next_job + 1
        self.free_chunks -= set(chunks)
        self.jobs[job] = is_load, chunks, headers, blobs
        self.busy[job] = set(chunks)
        copies = [Copy(0, 0, self.blocks(c), h, 1) for h, c in zip(headers, chunks, strict=True)]
        (self.queue.submit_load if is_load else self.queue.submit_store)(job, copies)

    def wait(self):
        job_ids = {job for job in self.busy if self.random.random() < 0.5} | {-5}
        self.queue.wait(job_ids, 60)
        for job in job_ids & self.busy.keys():
            if not self.jobs[job][0]:
                self.give_back(job, overwrite=True)
        self.poll()
        loads = {job for job, (is_load, *_) in self.jobs.items() if is_load}
        assert job_ids & loads <= self.results.keys(), "a load that was waited for has no result"

    def give_back(self, job, overwrite=False):
        """The pages are the engine's again, and it may write there at once."""
        for chunk in self.jobs[job][1]:
            if overwrite:
                self.overwrite(chunk)
            self.free_chunks.add(chunk)
        del self.busy[job]

    def poll(self):
        for ended in self.queue.poll():
            assert ended.job_id not in self.results, "a job ended twice"
            self.results[ended.job_id] = ended
            is_load, chunks, headers, blobs = self.jobs[ended.job_id]
            assert ended.is_load == is_load
            good = set(range(len(chunks))) - set(ended.failed)
            assert ended.bytes == len(good) * self.layout.block_bytes * CHUNK
            for i in range(len(chunks)):
                if is_load and i in good:
                    assert torch.equal(self.blob(chunks[i]), blobs[i])
                if not is_load:
                    assert (self.frames.state[headers[i]] == "ready") == (i in good)
                    if i in good:
                        assert torch.equal(self.frames.part(headers[i])[: len(blobs[i])], blobs[i])
                        self.ready.append(headers[i])
            if ended.job_id in self.busy:
                self.give_back(ended.job_id)

    def play(self, turns):
        for _ in range(turns):
            turn = self.random.randrange(10)
            if turn < 2:
                self.submit(is_load=False)
            elif turn < 4:
                self.submit(is_load=True)
            elif turn == 4:
                self.wait()
            elif turn == 5:
                self.poll()
            else:
                for _ in range(self.random.randrange(1, 8)):
                    self.device.step()

    def check_end(self, faulty):
        self.poll()
        assert self.results.keys() == self.jobs.keys()
        assert self.queue.inflight_bytes == 0
        assert self.queue.poll() == []
        loads = sum(len(j[1]) for j in self.jobs.values() if j[0])
        reads = sum(n for (verb, _), n in self.frames.calls.items() if verb == "finish_read")
        assert reads == loads
        for header in range(self.next_header):
            ends = self.frames.endings(header)
            # where finishing raised, the part is failed as well
            assert ends == 1 or (faulty and ends == 2 and self.frames.calls["fail_write", header])


@pytest.mark.parametrize("faulty", [False, True])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    lanes=st.integers(1, 3),
    depth=st.integers(1, 3),
    turns=st.integers(1, 60),
    ends_by=st.sampled_from(["drain", "flush", "close", "wait"]),
)
def test_any_order_keeps_the_promises(
    seed, lanes, depth, turns, ends_by, faulty, new_layout, new_frames, new_device
):
    game = Game(seed, lanes, depth, new_layout, new_frames, new_device, faulty)
    game.play(turns)
    if ends_by == "drain":
        game.device.drain()
    elif ends_by == "flush":
        assert game.queue.flush(60)
    elif ends_by == "close":
        game.queue.close()
    else:
        game.queue.wait(list(game.busy), 60)
        game.device.drain()
    game.check_end(faulty)
