"""What a launch takes from the work beside it unless told otherwise: chosen by arithmetic, not measured yet."""

MAX_SMS = 16
"""Programs, and so streaming multiprocessors: an eighth of those of an H200. By the formula of
`perf/results/predictions.md` enough for a link of 64 GB/s."""

BYTES_IN_FLIGHT = 256 << 10
"""Bytes on their way at once: twice what a link of 64 GB/s holds within 2 microseconds."""
