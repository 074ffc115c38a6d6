"""Throw hostile texts at the vineyard messages and their framing: each must come out as a message or as our own error.

    python scripts/fuzz_wire.py                     # a million texts
    python scripts/fuzz_wire.py --texts 10000000 --first-seed 5000

Progress goes to standard error, one line for each tenth. A failure prints its seed; the same seed makes the same texts.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.kvops.vineyard.hostile import check_many

PER_SEED = 1000


def main() -> int:
    """Run the texts asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--texts", type=int, default=1_000_000, help="how many (default: a million)"
    )
    parser.add_argument(
        "--first-seed", type=int, default=0, help="where the seeds start (default: 0)"
    )
    args = parser.parse_args()
    seeds = max(1, -(-args.texts // PER_SEED))
    tenth = max(1, seeds // 10)
    began, understood = time.monotonic(), 0
    for done in range(seeds):
        seed = args.first_seed + done
        try:
            understood += check_many(seed, PER_SEED)
        except Exception:
            traceback.print_exc()
            print(f"FAILED: seed {seed}, after {done * PER_SEED} texts", file=sys.stderr)
            return 1
        if (done + 1) % tenth == 0:
            share, seconds = (done + 1) / seeds, time.monotonic() - began
            print(
                f"{(done + 1) * PER_SEED:,} texts ({share:.0%}) in {seconds:.0f} s,"
                f" about {seconds / share - seconds:.0f} s to go",
                file=sys.stderr,
            )
    print(
        f"{seeds * PER_SEED:,} texts, {understood:,} of them understood in one direction or the other,"
        f" in {time.monotonic() - began:.0f} s: no surprise"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
