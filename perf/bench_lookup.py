"""What does a lookup cost? One key at a time, 4,096 in one call, hits and misses, in the owner and in another process.

    python -m perf.bench_lookup --assert

The baseline is a plain dictionary lookup of the same keys. The other process maps the same arena and sends no message.
"""

import random
import sys
from collections.abc import Callable, Sequence

from perf.harness import Case, Figure, Gate, Provider, parser, run

from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.index import Reader
from kvferry.kvops.store.store import Lookup, Store

BATCH = 4096
NAMESPACE = b"perf.bench_lookup"[:16]


def key(number: int) -> bytes:
    """Return a key like vLLM's, spread like a hash."""
    return random.Random(number).randbytes(32) + bytes(4)


def one_by_one(verb: Callable[[Sequence[bytes]], object], keys: list[bytes]) -> Callable[[], None]:
    """Return a run that asks for each key alone."""
    singles = [(one,) for one in keys]

    def work() -> None:
        for single in singles:
            verb(single)

    return work


def cases(count: int) -> list[Case]:
    """Return the cases over a store with *count* small blobs."""
    arena = Arena.open(None, 16 << 20 if count < 2000 else 256 << 20, session="bench")
    store = Store.open(arena, namespace=NAMESPACE, verify="off")
    there = [key(number) for number in range(count)]
    absent = [key(number) for number in range(count, 2 * count)]
    plain = dict.fromkeys(there, 1)
    assert all(answer is True for answer in store.put(there, [b"x" * 64] * count))
    random.Random(3).shuffle(there)
    reader = Reader(arena)
    made = []
    for name, keys, answer in (("hit", there, Lookup.HIT), ("miss", absent, Lookup.MISS)):

        def right(keys: list[bytes] = keys, answer: Lookup = answer) -> bool:
            return store.lookup(keys) == [answer] * len(keys)

        def read_right(keys: list[bytes] = keys, answer: Lookup = answer) -> bool:
            found = reader.lookup(NAMESPACE, keys)
            return all((f is not None) is (answer is Lookup.HIT) for f in found)

        def batched(keys: list[bytes] = keys) -> None:
            for start in range(0, len(keys), BATCH):
                store.lookup(keys[start : start + BATCH])

        base = Provider("dict", lambda keys=keys: [plain.get(k) for k in keys])
        made.append(
            Case(
                f"{name}, one key",
                0,
                count,
                [
                    base,
                    Provider("owner", one_by_one(store.lookup, keys), verify=right),
                    Provider(
                        "other_process",
                        one_by_one(lambda k: reader.lookup(NAMESPACE, k), keys),
                        verify=read_right,
                    ),
                ],
            )
        )
        made.append(
            Case(
                f"{name}, {BATCH} keys", 0, count, [base, Provider("owner", batched, verify=right)]
            )
        )
    return made


def gates(figures: list[Figure]) -> list[Gate]:
    """Return the stated limits."""
    made = []
    for figure in figures:
        if figure.provider == "owner":
            limit = 1.5 if "one key" in figure.case.name else 0.3
            made.append(Gate(f"{figure.case.name}: us a key", figure.p50, limit))
    return made


def main() -> int:
    """Run the benchmark."""
    args = parser("bench_lookup", __doc__).parse_args()
    return run("bench_lookup", args, cases(1024 if args.quick else 32 * BATCH // 8), gates)


if __name__ == "__main__":
    sys.exit(main())
