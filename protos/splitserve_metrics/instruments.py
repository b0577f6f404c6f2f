"""Instruments of prometheus_client for the metrics of a table, and pages of what they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from splitserve_metrics.metric import Kind, Metric

LiveFamily: TypeAlias = CounterMetricFamily | GaugeMetricFamily

# When a series began is of no use to Prometheus, and doubles the series.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Instruments:
    """One for each metric that is counted as it happens, registered when it is first asked for.

    They may be used in any thread. What is looked up when somebody reads is a `family`.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.registry = CollectorRegistry()
        self._metrics = {metric.name: metric for metric in metrics}

    def metric(self, name: str) -> Metric:
        """The row of the table."""
        return self._metrics[name]

    def counter(self, name: str) -> Counter:
        """Made once for each name."""
        metric = self._metrics[name]
        return Counter(name, metric.help, metric.labels, registry=self.registry)

    def histogram(self, name: str) -> Histogram:
        """Made once for each name."""
        metric = self._metrics[name]
        return Histogram(
            name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry
        )

    def family(self, name: str) -> LiveFamily:
        """An empty one, for samples of this moment."""
        metric = self._metrics[name]
        if metric.kind is Kind.COUNTER:
            return CounterMetricFamily(name, metric.help, labels=metric.labels)
        return GaugeMetricFamily(name, metric.help, labels=metric.labels)


class Page:
    """What one who reads is shown: the instruments of `registry`, and families of this moment."""

    def __init__(self, registry: CollectorRegistry, families: Iterable[Family]) -> None:
        self._registry = registry
        self._families = list(families)

    def collect(self) -> Iterator[Family]:
        """As `prometheus_client.generate_latest` asks for it; in any thread."""
        yield from self._registry.collect()
        yield from self._families
