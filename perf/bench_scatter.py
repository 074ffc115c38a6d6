"""How fast do blobs come back into the paged cache? scatter_blocks against a memcpy of as many bytes.

The shapes, the ways and the limits are those of perf/bench_gather.py, the other way round.

    python -m perf.bench_scatter --assert
"""

import sys

from perf.bench_gather import main

if __name__ == "__main__":
    sys.exit(main("bench_scatter", __doc__, is_load=True))
