"""Prometheus metrics: requests as they end, and each model's queue as it is when asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.serving.gate import Call
from inference.serving.models import ModelTable

PREFIX = "slide_inference"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_GAUGES = {
    "queued": "Tiles that wait for a batch.",
    "queued_bytes": "Bytes of tiles that wait for a batch.",
    "running": "Tiles in the forward pass.",
    "lanes": "Lanes with waiting tiles.",
    "oldest_age_s": "Seconds the oldest waiting tile has waited.",
    "accepting": "1 while the model takes work, 0 once closed or broken.",
}
_COUNTERS = {
    "accepted": "Tiles that entered the queue.",
    "completed": "Tiles answered with a result.",
    "refused": "Tiles for which there was no room, or no model.",
    "cancelled": "Tiles whose callers left before the forward pass.",
    "expired": "Tiles whose deadline passed.",
    "wasted": "Results that no caller received.",
    "batches": "Batches cut.",
    "forward_calls": "Calls of the model, repetitions after a failure included.",
    "forward_s": "Seconds spent in calls of the model.",
}


class Metrics:
    """The metrics of one service."""

    def __init__(self, models: ModelTable) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Queues(models))
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests by what they were answered.", ["route", "model", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            f"{PREFIX}_request_seconds", "Time from a request's head to the end of its answer.", ["route"],
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip

    def observe(self, call: Call) -> None:
        """Count a request that is over."""
        self._requests.labels(call.route, call.model or "", str(call.status)).inc()
        self._seconds.labels(call.route).observe(call.elapsed_s)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _Queues(Collector):
    def __init__(self, models: ModelTable) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        books = [(name, found) for name, p in self._models.loaded() if (found := p.statistics()) is not None]
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}_{_named(field)}", text, labels=["model"])
            for name, found in books:
                gauge.add_metric([name], float(getattr(found, field)))
            yield gauge
        for field, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}_{_named(field)}", text, labels=["model"])
            for name, found in books:
                counter.add_metric([name], float(getattr(found, field)))
            yield counter
        failed = CounterMetricFamily(f"{PREFIX}_failed", "Tiles answered with an error.", labels=["model", "code"])
        sizes = CounterMetricFamily(f"{PREFIX}_batches_by_size", "Batches cut, by tiles.", labels=["model", "size"])
        for name, found in books:
            for code, count in found.failed.items():
                failed.add_metric([name, code], count)
            for size, count in found.batch_sizes.items():
                sizes.add_metric([name, str(size)], count)
        yield failed
        yield sizes


def _named(field: str) -> str:
    """The metric of a field: units are spelt out."""
    return f"{field.removesuffix('_s')}_seconds" if field.endswith("_s") else field
