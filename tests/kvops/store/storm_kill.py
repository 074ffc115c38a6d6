"""Kill an owner at random moments, or at a random line of the store, and check what the next owner finds.

Every chunk whose commit was answered is there with the right bytes, none that was not is ever hit, no place is lost.

    python tests/kvops/store/storm_kill.py --runs 500
"""

import mmap
import random
import sys
import time
from pathlib import Path

from chunks import ARENA_BYTES, NAMESPACE, OTHER, audit, blob, drain, fill, is_frame, keys
from crashing import arena_file, arguments, die_at_line, end, fork

from kvferry.kvops.store import store as store_module
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.store import Lookup, Store

STORE_FOLDER = str(Path(store_module.__file__).parent)
SIZES = (4096, 12_288, 61_440)
WANTED = keys(160)
ROOMY, TIGHT = "roomy", "tight"

# what the killed process had been told about each chunk
NOTHING, BEGUN, STORED, DELETING, DELETED = range(5)


class Life:
    """What the child does until it is killed. *told* is memory that the parent sees."""

    def __init__(self, path, told, rng, mode, parts):
        arena = Arena.open(path, ARENA_BYTES, session="killed", populate=False)
        arena.attach()
        self.store = Store.open(arena, namespace=NAMESPACE, parts=parts)
        self.frames = [Frames(arena, rank) for rank in range(parts)]
        self.told, self.rng, self.mode = told, rng, mode

    def run(self):
        verbs = [self.write, self.write, self.write, self.delete, self.leave, self.rebuild]
        if self.store.parts == 1:
            verbs += [self.put] * 3
        if self.mode == TIGHT:
            verbs += [self.stream] * 2 + [self.reset]
        while True:
            self.rng.choice(verbs)()
            if self.mode == ROOMY and self.store.counts["evicted"]:
                raise RuntimeError("a roomy arena is one in which nothing is evicted")

    def some(self, *states):
        numbers = [n for n in range(len(WANTED)) if self.told[n] in states]
        return self.rng.sample(numbers, min(4, len(numbers)))

    def size(self, number):
        return SIZES[number % 3] * self.store.parts

    def write(self):
        for number in self.some(NOTHING, DELETED):
            self.told[number] = BEGUN
            (frame,) = self.store.reserve([WANTED[number]], self.size(number))
            if is_frame(frame):
                for rank, frames in enumerate(self.frames):
                    fill(frames, frame, rank)
                if self.store.commit([frame]) == [True]:
                    self.told[number] = STORED

    def leave(self):
        """Reserve and write half: such chunks must never be hit."""
        for number in self.some(NOTHING)[:1]:
            (frame,) = self.store.reserve([WANTED[number]], self.size(number))
            if is_frame(frame):
                offset, size = self.frames[0].begin_write(frame.header, frame.generation)
                self.store.arena.buffer[offset : offset + size // 2] = b"\x5a" * (size // 2)

    def put(self):
        numbers = self.some(NOTHING, DELETED)
        for number in numbers:
            self.told[number] = BEGUN
        blobs = [blob(WANTED[n], self.size(n)) for n in numbers]
        for number, answer in zip(
            numbers, self.store.put([WANTED[n] for n in numbers], blobs), strict=True
        ):
            if answer is True:
                self.told[number] = STORED

    def delete(self):
        for number in self.some(STORED)[:2]:
            self.told[number] = DELETING
            if self.store.delete([WANTED[number]]) == [True]:
                self.told[number] = DELETED

    def rebuild(self):
        self.store._grow_index()

    def stream(self):
        """Chunks of another size crowd the others out."""
        self.store.reserve(
            keys(2, first=self.rng.randrange(1000, 1 << 20)), 1_500_160 * self.store.parts
        )
        for frame in list(self.store._space.held)[:4]:
            self.store.abort([frame])

    def reset(self):
        if self.rng.random() < 0.1:
            self.store.new_epoch(OTHER if self.store.namespace == NAMESPACE else NAMESPACE)
            self.store.abandon()


def check(path, told, mode, parts):
    """Open what was left; return whether the killed process had been writing."""
    with Arena.open(path, ARENA_BYTES, session="next", populate=False) as arena:
        store = Store.open(arena, namespace=NAMESPACE, parts=parts)
        arena.attach()
        audit(store)
        answers = store.lookup(WANTED)
        assert Lookup.PENDING not in answers
        for number, (key, answer) in enumerate(zip(WANTED, answers, strict=True)):
            if mode == ROOMY:
                expected = {STORED: [Lookup.HIT], BEGUN: list(Lookup), DELETING: list(Lookup)}
                assert answer in expected.get(told[number], [Lookup.MISS]), (number, told[number])
            if answer is Lookup.HIT:
                frame = store.frames[key]
                size = SIZES[number % 3] * parts
                assert bytes(arena.buffer[frame.offset : frame.offset + size]) == blob(key, size)
                for rank in range(parts):
                    frames = Frames(arena, rank)
                    assert frames.begin_read(frame.header, frame.generation) is not None
        was_writing = store.counts["discarded"] > 0
        assert store.stats()["quarantined_frames"] == 0
        if mode == TIGHT:
            drain(store)
        # what the next life begins with
        for number, answer in enumerate(store.lookup(WANTED)):
            told[number] = STORED if answer is Lookup.HIT else NOTHING
        return was_writing


def one_round(path, rng, mode, by_line, parts):
    path.unlink(missing_ok=True)
    Arena.open(path, ARENA_BYTES, session="first", populate=False).close()
    told = mmap.mmap(-1, len(WANTED) + 1)
    writing = 0
    # lives follow one another on one arena
    for _ in range(3):
        seed, line = rng.randrange(1 << 32), rng.randrange(1, 4000)

        def live(seed=seed, line=line):
            life = Life(path, told, random.Random(seed), mode, parts)
            if by_line:
                die_at_line(line, STORE_FOLDER)
            told[len(WANTED)] = 1
            life.run()

        told[len(WANTED)] = 0
        pid = fork(live)
        if by_line:
            assert end(pid), "the child ended by itself"
        else:
            deadline = time.monotonic() + 60
            while not told[len(WANTED)]:
                assert time.monotonic() < deadline
            end(pid, after_s=rng.uniform(0, 0.03))
        try:
            writing += check(path, told, mode, parts)
        except AssertionError:
            print(f"life seed {seed}, {mode}, parts {parts}, line {line if by_line else None}")
            raise
    return writing


def main():
    options, rng = arguments(__doc__, 100)
    lives = writing = 0
    with arena_file() as path:
        while lives < options.runs:
            case = rng.choice([ROOMY, TIGHT]), rng.random() < 0.5, rng.choice([1, 1, 2])
            writing += one_round(path, rng, *case)
            lives += 3
    print(f"{lives} owners killed, {writing} of them while frames were being written")
    if lives >= 20 and not writing:
        sys.exit("no owner was killed while a frame was being written")


if __name__ == "__main__":
    main()
