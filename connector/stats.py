"""Our metrics in vLLM's form: they travel with its own offloading statistics and appear on its ``/metrics``.

The names, kinds and labels are those of ``kvops/metrics.py``; vLLM refuses a name that is not declared here.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from kvferry.kvops.metrics import PREFIX, Metric, Metrics

Labels = tuple[str, ...]
Series = tuple[str, Labels]


def metric_definitions() -> dict[str, Any]:
    """Return every metric of ours as vLLM declares its own."""
    return {metric.name: _definition(metric) for metric in Metrics.all()}


def _definition(metric: Metric) -> Any:
    labels = tuple(metric.labels)
    if metric.kind == "counter":
        return OffloadingCounterMetadata(metric.help, labels)
    if metric.kind == "gauge":
        return OffloadingGaugeMetadata(metric.help, labels)
    return OffloadingHistogramMetadata(metric.help, labels, metric.buckets)


def store_gauges(
    stats: Mapping[str, float], inflight_bytes: float
) -> Iterator[tuple[Metric, Labels, float]]:
    """Yield what holds in a store now, from its ``stats()``."""
    yield Metrics.ARENA_BYTES, (), stats["arena_bytes"]
    yield Metrics.ARENA_USED_BYTES, (), stats["used_bytes"]
    yield Metrics.LEASES, (), stats["leases"]
    yield Metrics.INFLIGHT_BYTES, (), inflight_bytes
    for state in ("ready", "writing", "free"):
        yield Metrics.FRAMES, (state,), stats[f"{state}_frames"]


def forget_earlier_engines() -> None:
    """Take our metrics of an earlier engine of this process out of Prometheus's registry.

    vLLM does the same for its own before it declares them again, but knows them by its name.
    """
    from prometheus_client import REGISTRY

    for collector in list(REGISTRY._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith(PREFIX):
            REGISTRY.unregister(collector)


class Tally:
    """Counts since the last report. Threads: one."""

    def __init__(self) -> None:
        self._counts: dict[Series, float] = {}
        self._samples: list[tuple[Series, float]] = []
        self._totals: dict[Series, float] = {}
        self._levels: dict[Series, float] = {}

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Add *amount* to a counter."""
        if amount:
            series = (metric.name, labels)
            self._counts[series] = self._counts.get(series, 0) + amount

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add one sample to a histogram."""
        self._samples.append(((metric.name, labels), value))

    def follow(self, metric: Metric, total: float, *labels: str) -> None:
        """Bring a counter up to *total*, which somebody else counts from zero."""
        series = (metric.name, labels)
        before = self._totals.get(series, 0)
        # two numbers that are read one after the other may disagree for a moment; a counter never goes back
        if total > before:
            self.count(metric, total - before, *labels)
            self._totals[series] = total

    def report(self, gauges: Iterable[tuple[Metric, Labels, float]] = ()) -> Any:
        """Return what changed since the last report as vLLM's statistics, or None if nothing did."""
        levels = {(metric.name, labels): value for metric, labels, value in gauges}
        changed = {
            series: value for series, value in levels.items() if self._levels.get(series) != value
        }
        if not (self._counts or self._samples or changed):
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), amount in self._counts.items():
            stats.increase_counter(name, amount, labels)
        for (name, labels), value in self._samples:
            stats.observe_histogram(name, value, labels)
        for (name, labels), value in changed.items():
            stats.set_gauge(name, value, labels)
        self._counts.clear()
        self._samples.clear()
        self._levels.update(levels)
        return stats

    def pending(self) -> Mapping[Series, float]:
        """Return the counts that have not been reported yet, by metric name and label values."""
        return dict(self._counts)
