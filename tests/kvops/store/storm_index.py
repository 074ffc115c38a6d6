"""Look keys up in one process while another changes everything, and check every byte that was found.

python tests/kvops/store/storm_index.py --runs 1000000
"""

import os
import signal
import sys
import time

from chunks import ARENA_BYTES, NAMESPACE, OTHER, blob, keys
from crashing import arena_file, arguments, end, fork

from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.index import Reader
from kvferry.kvops.store.store import Store

WANTED = keys(600)
SIZES = {key: 4096 + 20_480 * (number % 5 == 0) for number, key in enumerate(WANTED)}
BLOBS = {key: blob(key, size) for key, size in SIZES.items()}


def write(path, rng):
    """Spin until killed: about 600 chunks in room for fewer, two namespaces, an index that is rebuilt now and then."""
    with Arena.open(path, ARENA_BYTES, session="s") as arena:
        store = Store.open(arena, namespace=NAMESPACE)
        while True:
            batch = rng.sample(WANTED, 20)
            store.put(batch, [BLOBS[key] for key in batch])
            store.delete(rng.sample(WANTED, 5))
            choice = rng.random()
            if choice < 0.02:
                store.new_epoch(rng.choice([NAMESPACE, OTHER]))
            elif choice < 0.1:
                store._grow_index()
            elif choice < 0.2:
                # crowd the room out, so that spans change hands
                store.put(keys(3, first=rng.randrange(1 << 20)), [b"\xa5" * 1_500_000] * 3)


def main():
    options, rng = arguments(__doc__, 100_000)
    found = wrong = gone = 0
    deadline = time.monotonic() + 60 + options.runs / 100
    with arena_file() as path:
        Arena.open(path, ARENA_BYTES, session="s").close()
        pid = fork(lambda: write(path, rng))
        with Arena.open(path, ARENA_BYTES, session="s") as arena:
            reader = Reader(arena)
            try:
                while found < options.runs and not wrong and time.monotonic() < deadline:
                    batch = rng.sample(WANTED, 30)
                    places = reader.lookup(rng.choice([NAMESPACE, OTHER]), batch)
                    for key, place in zip(batch, places, strict=True):
                        if place is None:
                            continue
                        header, offset, generation = place
                        data = bytes(arena.buffer[offset : offset + SIZES[key]])
                        if arena.words[header // 8] != generation << 8 | 2:
                            gone += 1
                            continue
                        found += 1
                        wrong += data != BLOBS[key]
            finally:
                os.kill(pid, signal.SIGKILL)
                end(pid)
    print(f"{found} found, {gone} gone meanwhile, {wrong} wrong")
    if wrong or found < options.runs:
        sys.exit("a reader was told something wrong, or nothing at all")


if __name__ == "__main__":
    main()
