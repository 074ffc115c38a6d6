"""The store against a model of what was promised: any sequence of verbs, sizes, resets, failures and restarts.

The model does not know where frames lie nor which is evicted next; it follows what the store says it evicted. It knows
every byte that may be read, every frame that somebody holds, and that at the end nothing is left over.
"""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.store import Lookup, Reserve, Store

from .chunks import ARENA_BYTES, KIB, MIB, audit, blob, drain, is_frame, key

SIZES = [4 * KIB, 100_000, 300 * KIB, MIB, 3 * MIB]
KEYS = [key(number, group) for number in range(24) for group in range(2)]
SIZE_OF = {k: SIZES[number % len(SIZES)] for number, k in enumerate(KEYS)}
# a run of keys, as a prompt has; the same ones come again and again
some_keys = st.builds(
    lambda first, count: KEYS[first : first + count], st.integers(0, 40), st.integers(1, 10)
)
picks = st.randoms(use_true_random=False)
FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Job:
    """A frame in the hands of workers: a store or a load; each rank has begun, ended, or neither."""

    def __init__(self, frame, ranks):
        self.frame = frame
        self.waiting = set(range(ranks))
        self.begun = {}
        self.failed = False


class Model(RuleBasedStateMachine):
    @initialize(ranks=st.sampled_from([1, 1, 2, 3]))
    def open(self, ranks):
        self.folder = tempfile.TemporaryDirectory(dir=FOLDER)
        self.path = Path(self.folder.name) / "model.arena"
        self.ranks, self.epoch = ranks, 0
        self.readable, self.corrupt = {}, set()
        self.stores, self.loads, self.stale = [], [], []
        self.protected = set()
        self.open_store()

    def open_store(self):
        self.arena = Arena.open(self.path, ARENA_BYTES, session="engine", populate=False)
        self.arena.attach()
        self.store = Store.open(self.arena, namespace=self.namespace(), parts=self.ranks)
        self.workers = [Frames(self.arena, rank) for rank in range(self.ranks)]

    def namespace(self):
        return self.epoch.to_bytes(16, "little")

    def size(self, k):
        return SIZE_OF[k] // self.ranks // 64 * 64 * self.ranks

    def data(self, k):
        return blob(k + self.namespace(), self.size(k))

    def follow_evictions(self):
        for k in self.store.take_evicted():
            frame = self.readable.pop(k)
            assert frame not in self.protected, "a frame of this step's hits was evicted"
            assert not any(job.frame is frame for job in self.loads), "a leased frame was evicted"
            self.corrupt.discard(frame)

    # --- storing -----------------------------------------------------------------------------------------------

    @rule(wanted=some_keys)
    def reserve(self, wanted):
        """One call per size, as the connector does."""
        for size in {self.size(k) for k in wanted}:
            same = [k for k in wanted if self.size(k) == size]
            in_flight = {job.frame.key for job in self.stores}
            before = dict(self.readable)
            answers = self.store.reserve(same, size)
            self.follow_evictions()
            for k, answer in zip(same, answers, strict=True):
                if answer is Reserve.EXISTS:
                    assert k in before
                elif answer is Reserve.PENDING:
                    assert k in in_flight or before[k] in self.corrupt
                elif is_frame(answer):
                    assert k not in in_flight
                    assert k not in self.readable
                    self.stores.append(Job(answer, self.ranks))
                    in_flight.add(k)
                else:
                    assert answer is Reserve.NO_ROOM

    @rule(pick=picks, steps=st.integers(1, 30))
    def write(self, pick, steps):
        """Workers go on with parts in any order."""
        for _ in range(steps):
            writing = self.writing()
            jobs = [j for j in self.stores + self.stale if j.waiting and j.frame in writing]
            if not jobs:
                return
            job = pick.choice(jobs)
            self.write_a_part(job, pick.choice(sorted(job.waiting)), fails=pick.random() < 0.05)

    def write_a_part(self, job, rank, fails=False):
        worker, frame = self.workers[rank], job.frame
        if rank not in job.begun:
            job.begun[rank] = worker.begin_write(frame.header, frame.generation)
            assert job.begun[rank] is not None, "a frame in flight was taken away"
            return
        offset, size = job.begun[rank]
        job.waiting.remove(rank)
        if fails:
            job.failed = True
            worker.fail_write(frame.header, frame.generation)
            return
        whole = blob(frame.key + frame.namespace, frame.blob_bytes)
        self.arena.buffer[offset : offset + size] = whole[rank * size : (rank + 1) * size]
        assert worker.finish_write(frame.header, frame.generation)

    def writing(self):
        return {f for f in self.store._space.held if f.is_writing}

    @rule(pick=picks, share=st.sampled_from([0.3, 1.0]))
    def complete_stores(self, pick, share):
        """The engine tells of a job's end when no worker has it in hand any more."""
        for job in [job for job in self.stores if not set(job.begun) & job.waiting]:
            if pick.random() > share or (len(job.waiting) == self.ranks and pick.random() < 0.8):
                continue
            self.complete_store(job, commit=pick.random() < 0.9)

    def complete_store(self, job, commit):
        self.stores.remove(job)
        if commit:
            whole = not job.waiting and not job.failed
            assert self.store.commit([job.frame]) == [whole]
            if whole:
                self.readable[job.frame.key] = job.frame
        else:
            self.store.abort([job.frame])

    @rule(wanted=some_keys)
    def store_at_once(self, wanted):
        before = len(self.stores)
        self.reserve(wanted)
        for job in self.stores[before:]:
            for rank in range(self.ranks):
                self.write_a_part(job, rank)
                self.write_a_part(job, rank)
            self.complete_store(job, commit=True)

    # --- loading -----------------------------------------------------------------------------------------------

    @rule(wanted=some_keys)
    def hit(self, wanted):
        for k, answer in zip(wanted, self.store.lookup(wanted), strict=True):
            if answer is Lookup.HIT:
                frame = self.store.frames[k]
                frame.step = self.store.step
                self.protected.add(frame)

    @rule()
    def end_step(self):
        self.store.end_step()
        self.protected.clear()

    @rule(wanted=some_keys)
    def prepare_load(self, wanted):
        for k in dict.fromkeys(wanted):
            frame = self.readable.get(k)
            if frame is not None and (frame not in self.corrupt or frame.is_ready):
                self.store.lease([frame])
                self.loads.append(Job(frame, self.ranks))

    @rule(pick=picks, steps=st.integers(1, 30))
    def read(self, pick, steps):
        for _ in range(steps):
            leased = self.store._leased
            jobs = [j for j in self.loads + self.stale if j.waiting and j.frame in leased]
            if not jobs:
                return
            job = pick.choice(jobs)
            self.read_a_part(job, pick.choice(sorted(job.waiting)))

    def read_a_part(self, job, rank):
        worker, frame = self.workers[rank], job.frame
        if rank not in job.begun:
            job.begun[rank] = worker.begin_read(frame.header, frame.generation)
            assert job.begun[rank] is not None or frame in self.corrupt
            return
        job.waiting.remove(rank)
        place = job.begun[rank]
        if place is not None:
            offset, size = place
            whole = blob(frame.key + frame.namespace, frame.blob_bytes)
            # corrupted after it had been verified is beyond what a checksum can tell
            assert frame in self.corrupt or (
                self.arena.buffer[offset : offset + size] == whole[rank * size : (rank + 1) * size]
            ), "wrong bytes were read"
        worker.finish_read(frame.header, frame.generation, ok=place is not None)

    @rule()
    def complete_loads(self):
        for job in [job for job in self.loads if not job.waiting]:
            self.loads.remove(job)
            was_bad = job.frame.leases == 1 and self.state(job.frame) == fmt.State.BAD
            self.store.release([job.frame])
            if was_bad and self.readable.get(job.frame.key) is job.frame:
                self.corrupt.discard(self.readable.pop(job.frame.key))

    @rule(wanted=some_keys)
    def load_at_once(self, wanted):
        before = len(self.loads)
        self.prepare_load(wanted)
        for job in self.loads[before:]:
            for rank in range(self.ranks):
                self.read_a_part(job, rank)
                self.read_a_part(job, rank)
        self.complete_loads()

    def state(self, frame):
        return self.arena.words[frame.word] & 0xFF

    @precondition(lambda self: self.readable)
    @rule(pick=picks)
    def corrupt_a_blob(self, pick):
        frame = self.readable[pick.choice(sorted(self.readable))]
        if frame in self.corrupt:
            return
        at = pick.randrange(frame.blob_bytes)
        self.arena.buffer[frame.offset + at] ^= 0x80
        self.corrupt.add(frame)

    @rule(wanted=some_keys)
    def get(self, wanted):
        if self.ranks > 1:
            return
        outs = [bytearray(b"\xa5" * self.size(k)) for k in wanted]
        for k, ok, out in zip(wanted, self.store.get(wanted, outs), outs, strict=True):
            frame = self.readable.get(k)
            assert ok == (frame is not None and frame not in self.corrupt)
            assert not ok or out == self.data(k)
            if frame in self.corrupt and not frame.leases:
                self.corrupt.discard(self.readable.pop(k))

    # --- the rest ----------------------------------------------------------------------------------------------

    @rule(wanted=some_keys)
    def put(self, wanted):
        if self.ranks > 1:
            return
        for k in wanted:
            before = self.readable.get(k)
            (answer,) = self.store.put([k], [self.data(k)])
            self.follow_evictions()
            if answer is True:
                assert before is None
                self.readable[k] = self.store.frames[k]
            elif answer is Reserve.EXISTS:
                assert before is not None

    @rule(wanted=some_keys)
    def touch(self, wanted):
        self.store.touch(wanted)

    @rule(wanted=some_keys)
    def delete(self, wanted):
        for k in wanted[:3]:
            frame = self.readable.get(k)
            (gone,) = self.store.delete([k])
            assert gone == (frame is not None and not frame.leases and frame not in self.protected)
            if gone:
                self.corrupt.discard(self.readable.pop(k))

    @rule(pick=picks)
    def reset(self, pick):
        if pick.random() < 0.7:
            return
        self.epoch += 1
        self.store.new_epoch(self.namespace())
        self.stale += self.stores + self.loads
        self.stores, self.loads = [], []
        self.readable.clear()
        self.protected.clear()
        self.store.take_evicted()

    @rule()
    def reap(self):
        waited_for = self.store.reap()
        in_hand = {job.frame for job in self.stale if job.waiting}
        assert set(self.store._orphans) <= in_hand
        assert waited_for == len(self.store._orphans)
        self.stale = [job for job in self.stale if job.frame in self.store._orphans]

    @precondition(lambda self: not any(job.begun for job in self.stores + self.stale))
    @rule()
    def restart(self):
        """Everything that was committed is there again; what was in flight is not."""
        self.arena.close()
        self.stores, self.loads, self.stale = [], [], []
        self.protected.clear()
        bad = {f.key for f in self.corrupt}
        marked = {k for k, f in self.readable.items() if not f.is_ready}
        self.open_store()
        there = {k for k in KEYS if self.store.lookup([k]) == [Lookup.HIT]}
        assert set(self.readable) - marked - bad <= there <= set(self.readable)
        self.readable = {k: self.store.frames[k] for k in there}
        self.corrupt = {self.readable[k] for k in there & bad}
        for k, frame in self.readable.items():
            data = self.arena.buffer[frame.offset : frame.offset + frame.blob_bytes]
            assert frame in self.corrupt or data == self.data(k)

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "store"):
            return
        audit(self.store)
        for k in KEYS:
            (answer,) = self.store.lookup([k])
            frame = self.readable.get(k)
            if frame is not None:
                assert answer is Lookup.HIT or frame in self.corrupt
            else:
                assert answer is not Lookup.HIT

    def teardown(self):
        if not hasattr(self, "store"):
            return
        try:
            self.let_everything_go()
        finally:
            self.arena.close()
            self.folder.cleanup()

    def let_everything_go(self):
        for job in self.stores + self.stale + self.loads:
            frame = job.frame
            for rank in sorted(job.waiting):
                if job in self.loads or frame in self.store._leased:
                    if rank not in job.begun:
                        self.workers[rank].begin_read(frame.header, frame.generation)
                    self.workers[rank].finish_read(frame.header, frame.generation, ok=True)
                else:
                    self.workers[rank].fail_write(frame.header, frame.generation)
        assert self.store.reap() == 0, "frames in flight at a reset leak"
        drain(self.store)
        assert self.arena.writes_in_flight() == 0


TestStoreModel = Model.TestCase
TestStoreModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
