"""Kill processes that create an arena, at random moments, and check that the next one finds a usable path.

python tests/kvops/store/storm_create.py --runs 500
"""

import sys

from chunks import MIB, NAMESPACE, audit, key, put, read
from crashing import arena_file, arguments, end, fork

from kvferry.kvops.errors import ArenaMismatchError
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.store import Store

SIZES = (16 * MIB, 24 * MIB)


def main():
    options, rng = arguments(__doc__, 200)
    killed = unfinished = 0
    with arena_file() as path:
        for _ in range(options.runs):
            path.unlink(missing_ok=True)
            size = rng.choice(SIZES)
            pid = fork(lambda size=size: Arena.open(path, size, session="first"))
            killed += end(pid, after_s=rng.uniform(0, 0.012 * size / SIZES[0]))
            unfinished += path.exists() and path.read_bytes()[:8] in (b"", b"KVFERRY?")
            # the next one may want another size: what is unfinished is nobody's
            other = rng.choice(SIZES)
            try:
                arena = Arena.open(path, other, session="second", populate=False)
            except ArenaMismatchError:
                # the first had finished
                if other == size:
                    raise
                arena = Arena.open(path, size, session="second", populate=False)
            with arena:
                store = Store.open(arena, namespace=NAMESPACE)
                if put(store, [key(1)], 100_000) != [True] or read(store, [key(1)], 100_000) == [
                    None
                ]:
                    sys.exit("an arena that was reopened after a crash does not store")
                audit(store)
    print(f"{options.runs} rounds: {killed} creators killed, {unfinished} left an unfinished file")


if __name__ == "__main__":
    main()
