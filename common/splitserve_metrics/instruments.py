"""Instruments of prometheus_client for the metrics of a table, and the page that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from splitserve_metrics.metric import Kind, Metric

LiveFamily: TypeAlias = CounterMetricFamily | GaugeMetricFamily

# Prometheus has no use for the start times of series, which double the number of series.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Instruments:
    """Counters and histograms of a table, registered when they are made. Thread-safe.

    Values that are looked up at the time of reading are a `family` instead.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.registry = CollectorRegistry()
        self._metrics = {metric.name: metric for metric in metrics}

    def metric(self, name: str) -> Metric:
        """Returns the table row of the metric `name`."""
        return self._metrics[name]

    def counter(self, name: str) -> Counter:
        """Makes the counter `name`. Must be called once for each name."""
        metric = self._metrics[name]
        return Counter(name, metric.help, metric.labels, registry=self.registry)

    def histogram(self, name: str) -> Histogram:
        """Makes the histogram `name`. Must be called once for each name."""
        metric = self._metrics[name]
        return Histogram(
            name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry
        )

    def family(self, name: str) -> LiveFamily:
        """Returns an empty family for samples that are taken at the time of reading."""
        metric = self._metrics[name]
        if metric.kind is Kind.COUNTER:
            return CounterMetricFamily(name, metric.help, labels=metric.labels)
        return GaugeMetricFamily(name, metric.help, labels=metric.labels)


class Page:
    """Metrics shown to one reader: the instruments of `registry`, and families of this moment."""

    def __init__(self, registry: CollectorRegistry, families: Iterable[Family]) -> None:
        self._registry = registry
        self._families = list(families)

    def collect(self) -> Iterator[Family]:
        """Yields all families for `prometheus_client.generate_latest`. Thread-safe."""
        yield from self._registry.collect()
        yield from self._families
