"""Every metric: name, kind, labels and help, as plain data.

Names follow Prometheus: base units, ``_total`` for counters. Labels are closed sets, so that no
prompt or path can blow up the number of series. The connector turns this into vLLM's own metric
definitions; nothing here imports a metrics library.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

PREFIX = "kvferry:"
"""Start of every name."""

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    help: str
    """A sentence with the unit."""
    labels: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Label to the values it can have."""
    buckets: tuple[float, ...] | None = None
    """Upper bounds of a histogram, in the metric's unit."""

    def series(self) -> Iterator[tuple[str, ...]]:
        """Yield the label values of every series; one empty tuple without labels."""
        return itertools.product(*self.labels.values())

    def at(self, *values: str) -> tuple[str, ...]:
        """Return *values* as the key of one series.

        Raises:
            ValueError: they are not in the closed sets.
        """
        if values not in set(self.series()):
            raise ValueError(
                f"labels of {self.name} must be from {dict(self.labels)}; got {values}"
            )
        return values


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(PREFIX + name, "gauge", text, labels)


def _histogram(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(PREFIX + name, "histogram", text, labels, _SECONDS)


class Metrics:
    """All of them; `all` lists them in this order."""

    LOOKUP_CHUNKS = _counter(
        "lookup_chunks",
        "Chunks looked up in the store, in chunks: readable, absent, or still being written.",
        result=("hit", "miss", "pending"),
    )
    STORED_BYTES = _counter("stored_bytes", "KV cache copied into the store, in bytes.")
    LOADED_BYTES = _counter("loaded_bytes", "KV cache copied back to the engine, in bytes.")
    STORED_CHUNKS = _counter("stored_chunks", "Chunks published in the store, in chunks.")
    LOADED_CHUNKS = _counter("loaded_chunks", "Chunks copied back to the engine, in chunks.")
    SKIPPED_STORES = _counter(
        "skipped_stores",
        "Chunks that were not stored, in chunks: the bound on bytes in flight was reached, no room "
        "could be made, an earlier chunk of the request was skipped, or it was not full.",
        reason=("inflight", "no_room", "sticky", "partial"),
    )
    ABORTED_STORES = _counter(
        "aborted_stores", "Chunks whose store began and was not published, in chunks."
    )
    EVICTED_CHUNKS = _counter("evicted_chunks", "Chunks that made room for others, in chunks.")
    LOAD_FAILURES = _counter(
        "load_failures",
        "Chunks that could not be loaded and were reported to the engine, in chunks: wrong "
        "checksum, gone before the load began, or an error while copying.",
        reason=("checksum", "gone", "error"),
    )
    VERIFIED_BLOBS = _counter(
        "verified_blobs", "Blobs whose checksum was compared before a load, in blobs of one rank."
    )
    BAD_FRAMES = _counter(
        "bad_frames", "Frames taken out of use because a load from them failed, in frames."
    )
    PENDING_TIMEOUTS = _counter(
        "pending_timeouts",
        "Requests that stopped waiting for chunks still being stored, in requests.",
    )
    RESETS = _counter(
        "cache_resets", "Times that the engine dropped everything stored so far, in resets."
    )
    ARENA_BYTES = _gauge("arena_bytes", "Size of the arena, in bytes.")
    ARENA_USED_BYTES = _gauge("arena_used_bytes", "Arena in use by frames, in bytes.")
    FRAMES = _gauge(
        "frames",
        "Frames in the arena by state, in frames.",
        state=("ready", "writing", "free"),
    )
    LEASES = _gauge("leases", "Leases that keep frames from being evicted, in leases.")
    INFLIGHT_BYTES = _gauge("inflight_bytes", "Stores that have begun and not ended, in bytes.")
    DISK_CHUNKS = _counter(
        "disk_chunks",
        "Chunks moved between memory and the disk, in chunks.",
        direction=("save", "load"),
    )
    DISK_BYTES = _counter(
        "disk_bytes",
        "Chunks moved between memory and the disk, in bytes: those saved, divided by the chunks loaded, are what a hit "
        "costs the drive.",
        direction=("save", "load"),
    )
    DISK_SKIPPED = _counter(
        "disk_skipped_saves",
        "Chunks that were not written to the disk, in chunks: seen once only, too many bytes in flight, the disk "
        "switched off after failures, or no room could be made.",
        reason=("admission", "busy", "off", "no_room"),
    )
    DISK_FAILURES = _counter(
        "disk_failures",
        "Chunks that could not be moved, in chunks: an error of the drive, no answer in time, or wrong bytes.",
        direction=("save", "load"),
        reason=("error", "timeout", "corrupt"),
    )
    DISK_EVICTED = _counter(
        "disk_evicted_chunks", "Chunks on the disk that made room for others, in chunks."
    )
    DISK_USED_BYTES = _gauge("disk_used_bytes", "Room that the folder takes on the disk, in bytes.")
    DISK_BLOBS = _gauge("disk_blobs", "Chunks on the disk that can be read, in chunks.")
    DISK_QUARANTINED = _gauge(
        "disk_quarantined", "Blobs and files on the disk that are kept but never read, in pieces."
    )
    DISK_OFF = _gauge(
        "disk_off",
        "Whether the disk is left alone after failures, in pauses: 1 while it is, else 0.",
        direction=("save", "load"),
    )
    DISK_STAGE_SECONDS = _gauge(
        "disk_stage_seconds",
        "Time in a stage of the disk tier since the start, in seconds: of a request to the drive, which may carry "
        "several chunks, or of a publication.",
        stage=("queue", "io", "checksum", "publish"),
        stat=("avg", "p50", "p99"),
    )
    TRANSFER_SECONDS = _histogram(
        "transfer_seconds",
        "Time from the start of a transfer's first copy to the end of its last, in seconds.",
        direction=("store", "load"),
    )
    QUEUE_WAIT_SECONDS = _histogram(
        "queue_wait_seconds",
        "Time that a transfer waited before its first copy, in seconds.",
        direction=("store", "load"),
    )

    @classmethod
    def all(cls) -> list[Metric]:
        """Return every metric, in the order above."""
        return [item for item in vars(cls).values() if isinstance(item, Metric)]


def markdown_table() -> str:
    """Return the table of metrics that the documentation shows, ending in a line feed."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in Metrics.all():
        labels = "; ".join(
            f"{label}: {', '.join(values)}" for label, values in metric.labels.items()
        )
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
