"""What does the store add to a memcpy? Put and get of 128 KiB blobs against a plain copy to and from shared memory.

Cold: a working set of 512 MiB, so that neither side of a copy is in a cache. Hot: the same blob again and again.
The baseline copies the same bytes between the same kinds of memory (private pages and a populated memfd).

    python -m perf.bench_store --assert
"""

import sys
import time
from collections.abc import Callable

import numpy as np
from perf.harness import Case, Figure, Gate, Provider, parser, run

from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.store import Store

BLOB = 128 << 10
BATCH = 64
NAMESPACE = b"perf.bench_store"

LIMITS = {
    ("put", "off"): 1.5, ("get", "off"): 1.25, ("put", "always"): 1.7, ("get", "always"): 1.4,
    ("put64", "off"): 1.25, ("get64", "off"): 1.15,
}  # fmt: skip
"""Time divided by the memcpy's, cold."""

HOT_EXTRA_US = 5.0
"""Microseconds above a hot memcpy."""


def key(number: int) -> bytes:
    """Return a key like vLLM's: a 32-byte block hash and a group id."""
    return number.to_bytes(8, "little") * 4 + bytes(4)


def aligned(size: int) -> np.ndarray:
    """Return bytes that begin at a page, as an engine's cache does: other offsets make some copies three times slower."""
    raw = np.zeros(size + 4096, dtype=np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + size]


class Memory:
    """The working set: source blobs, the arena, a plain shared region, destination buffers."""

    def __init__(self, blobs: int) -> None:
        self.count = blobs
        size = blobs * BLOB
        self.keys = [key(number) for number in range(blobs)]
        source = aligned(size)
        source[:] = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
        self.out = aligned(size)
        self.source = source
        self.blobs = [memoryview(source)[n * BLOB : (n + 1) * BLOB] for n in range(blobs)]
        self.outs = [memoryview(self.out)[n * BLOB : (n + 1) * BLOB] for n in range(blobs)]
        self.plain_arena = Arena.open(None, size + (64 << 20), session="plain")
        start = self.plain_arena.data
        self.plain = self.plain_arena.buffer[start : start + size]
        self.stores: dict[str, Store] = {}
        for verify in ("off", "always"):
            arena = Arena.open(None, size + (96 << 20), session=verify)
            self.stores[verify] = Store.open(arena, namespace=NAMESPACE, verify=verify)

    def clear_out(self) -> None:
        """Poison the destination."""
        self.out.fill(0xA5)

    def out_matches(self) -> bool:
        """Whether every destination holds its source."""
        return bool(np.array_equal(self.out, self.source))

    def plain_matches(self) -> bool:
        """Whether the plain region holds the source."""
        return bool(np.array_equal(np.frombuffer(self.plain, np.uint8), self.source))

    def store_matches(self, verify: str) -> bool:
        """Whether the store holds the source."""
        self.clear_out()
        return all(self.stores[verify].get(self.keys, self.outs)) and self.out_matches()


def copy_in(memory: Memory) -> Callable[[], None]:
    """Return the plain copy of all blobs into shared memory."""
    plain, blobs = memory.plain, memory.blobs

    def work() -> None:
        at = 0
        for blob in blobs:
            plain[at : at + BLOB] = blob
            at += BLOB

    return work


def copy_out(memory: Memory) -> Callable[[], None]:
    """Return the plain copy of all blobs out of shared memory."""
    plain, outs = memory.plain, memory.outs

    def work() -> None:
        at = 0
        for out in outs:
            out[:] = plain[at : at + BLOB]
            at += BLOB

    return work


def batches(
    verb: Callable[..., object], keys: list[bytes], buffers: list[memoryview], size: int
) -> Callable[[], None]:
    """Return a run that calls *verb* with *size* keys and buffers at a time."""
    pieces = [(keys[n : n + size], buffers[n : n + size]) for n in range(0, len(keys), size)]

    def work() -> None:
        for some_keys, some_buffers in pieces:
            verb(some_keys, some_buffers)

    return work


def cold_cases(memory: Memory) -> list[Case]:
    """Return put and get, one by one and in batches."""
    cases = []
    for name, size in (("", 1), ("64", BATCH)):
        puts = [Provider("memcpy", copy_in(memory), verify=memory.plain_matches)]
        gets = [Provider("memcpy", copy_out(memory), memory.clear_out, memory.out_matches)]
        for verify, store in memory.stores.items():
            puts.append(
                Provider(
                    f"verify_{verify}",
                    batches(store.put, memory.keys, memory.blobs, size),
                    lambda store=store: store.delete(memory.keys),
                    lambda verify=verify: memory.store_matches(verify),
                )
            )
            gets.append(
                Provider(
                    f"verify_{verify}",
                    batches(store.get, memory.keys, memory.outs, size),
                    memory.clear_out,
                    memory.out_matches,
                )
            )
        cases.append(Case(f"put{name}", BLOB, memory.count, puts, "store"))
        cases.append(Case(f"get{name}", BLOB, memory.count, gets, "load"))
    return cases


def hot_cases(memory: Memory) -> list[Case]:
    """Return put and get of one blob that stays in the cache; the delete before each put is not timed."""
    store, key0, blob, out = memory.stores["off"], memory.keys[:1], memory.blobs[0], memory.outs[0]
    plain = memory.plain
    times = 2000

    def plain_in() -> float:
        spent, clock = 0.0, time.perf_counter
        for _ in range(times):
            begin = clock()
            plain[:BLOB] = blob
            spent += clock() - begin
        return spent

    def plain_out() -> None:
        for _ in range(times):
            out[:] = plain[:BLOB]

    def put() -> float:
        one, spent, clock = (blob,), 0.0, time.perf_counter
        for _ in range(times):
            store.delete(key0)
            begin = clock()
            store.put(key0, one)
            spent += clock() - begin
        return spent

    def get() -> None:
        one = (out,)
        for _ in range(times):
            store.get(key0, one)

    def fill() -> None:
        store.delete(key0)
        store.put(key0, (blob,))

    def matches() -> bool:
        return bytes(out) == bytes(blob)

    return [
        Case("hot put", BLOB, times, [
            Provider("memcpy", plain_in),
            Provider("verify_off", put, lambda: store.delete(key0)),
        ], "store"),
        Case("hot get", BLOB, times, [
            Provider("memcpy", plain_out, lambda: None, matches),
            Provider("verify_off", get, fill, matches),
        ], "load"),
    ]  # fmt: skip


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits."""
    made = []
    by_name = {(f.case.name, f.provider): f for f in figures}
    for (case, verify), limit in LIMITS.items():
        made.append(
            Gate(f"{case} verify={verify} / memcpy", by_name[case, f"verify_{verify}"].ratio, limit)
        )
    for case in ("hot put", "hot get"):
        extra = by_name[case, "verify_off"].p50 - by_name[case, "memcpy"].p50
        made.append(Gate(f"{case}: us above memcpy", extra, HOT_EXTRA_US))
    return made


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_store", __doc__).parse_args()
    memory = Memory(256 if args.quick or args.dry_run or args.list else 4096)
    return run("bench_store", args, cold_cases(memory) + hot_cases(memory), gates)


if __name__ == "__main__":
    sys.exit(main())
