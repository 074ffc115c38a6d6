"""Flip one byte anywhere in a resting arena and check that no wrong byte is ever returned.

Whatever the byte was: the arena is refused with an ArenaError, or it works, and a chunk is right or missing.

    python tests/kvops/store/storm_flip.py --runs 5000
"""

import os
import sys

from chunks import ARENA_BYTES, NAMESPACE, OTHER, audit, blob, fill, is_frame, keys, poisoned
from crashing import arena_file, arguments

from kvferry.kvops.errors import ArenaError
from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.frames import Frames
from kvferry.kvops.store.health import inspect_arena
from kvferry.kvops.store.index import Reader
from kvferry.kvops.store.store import Store

WANTED = keys(120) + keys(40, group=1)
SIZES = {key: (4096, 10_000, 60_000)[number % 3] for number, key in enumerate(WANTED)}


def make(path):
    """Make an arena that holds a bit of everything; return its bytes and the regions that matter, by name."""
    with Arena.open(path, ARENA_BYTES, session="first", populate=False) as arena:
        arena.attach()
        store = Store.open(arena, namespace=OTHER)
        store.put(WANTED[:20], [b"other" * 1000] * 20)
        store.close()
        store = Store.open(arena, namespace=NAMESPACE)
        frames = Frames(arena, 0)
        store.put(WANTED, [blob(key, SIZES[key]) for key in WANTED])
        store.delete(WANTED[::7])
        writing = [f for f in store.reserve(keys(6, first=1000), 10_000) if is_frame(f)]
        for frame in writing[::2]:
            fill(frames, frame)
        index = arena.words[fmt.INDEX_OFFSET_WORD]
        spans = [span for span in store._space.spans.all() if span.size is not None]
        used = arena.data + max(s.first + s.slabs for s in spans) * arena.slab_bytes
        regions = {
            "superblock": [(0, 128)],
            "attach table": [(fmt.ATTACH_OFFSET, fmt.ATTACH_BYTES)],
            "span table": [(arena.span_table, arena.slab_count * fmt.SPAN_ENTRY_BYTES)],
            "index": [(index, fmt.INDEX_SLOTS_MIN * fmt.INDEX_SLOT_BYTES)],
            "headers": [
                (span.headers, span.frame_count * span.size.header_bytes) for span in spans
            ],
            "data": [(arena.data, used - arena.data)],
            "blobs": [(frame.offset, frame.blob_bytes) for frame in store.frames.values()],
        }
    # what lies behind the last span is not in use, and need not be restored
    return path.read_bytes()[:used], regions


def check(path, verify):
    """Open and read everything; return how many chunks were right."""
    with Arena.open(path, ARENA_BYTES, session="next", populate=False) as arena:
        arena.attach()
        store = Store.open(arena, namespace=NAMESPACE, verify=verify)
        frames, reader = Frames(arena, 0, verify=verify), Reader(arena)
        audit(store)
        right = 0
        for key, place in zip(WANTED, reader.lookup(NAMESPACE, WANTED), strict=True):
            frame, expected = store.frames.get(key), blob(key, SIZES[key])
            if frame is None:
                assert place is None
                continue
            assert place == (frame.header, frame.offset, frame.generation)
            assert frame.blob_bytes == SIZES[key]
            # as a worker reads it
            store.lease([frame])
            found = frames.begin_read(frame.header, frame.generation)
            if found is not None:
                assert found == (frame.offset, SIZES[key])
                data = bytes(arena.buffer[found[0] : found[0] + found[1]])
                assert data == expected or verify == "off", "a worker would have loaded wrong bytes"
            frames.finish_read(frame.header, frame.generation, ok=found is not None)
            store.release([frame])
            # as the owner reads it
            out = poisoned(SIZES[key])
            if store.get([key], [out]) == [True]:
                assert out == expected or verify == "off", "get returned wrong bytes"
                right += 1
        fresh = keys(6, first=5000)
        assert store.put(fresh, [blob(key, 60_000) for key in fresh]) == [True] * 6
        outs = [poisoned(60_000) for _ in fresh]
        assert store.get(fresh, outs) == [True] * 6
        assert outs == [blob(key, 60_000) for key in fresh]
        audit(store)
    return right


def main():
    options, rng = arguments(__doc__, 1_000)
    refused = lost = 0
    with arena_file() as path:
        image, regions = make(path)
        complete = check(path, "always")
        fd = os.open(path, os.O_RDWR)
        for _ in range(options.runs):
            os.pwrite(fd, image, 0)
            name = rng.choice(list(regions))
            start, size = rng.choice(regions[name])
            at, flip = start + rng.randrange(size), rng.randrange(1, 256)
            # without checksums a flipped byte of a blob is read as it is; all else must hold
            verify = rng.choice(["always", "off"])
            os.pwrite(fd, bytes([image[at] ^ flip]), at)
            inspect_arena(path)
            try:
                right = check(path, verify)
                lost += right < complete
            except ArenaError:
                refused += 1
            except BaseException:
                print(f"byte {at} ({name}) ^ {flip:#x}, verify {verify}")
                raise
        os.close(fd)
    print(
        f"{options.runs} bytes flipped: {refused} arenas refused, {lost} lost a chunk, 0 wrong bytes read"
    )
    if complete < 100:
        sys.exit("the undamaged arena did not hold what was stored")


if __name__ == "__main__":
    main()
