"""Instruments of prometheus_client for the metrics of a table, their page, and refused calls."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio
import numpy as np
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from splitserve_rpc import CODE_OF_REASON, OnRefusal, ignore_refusal

# Buckets for the waiting time for tokens: from a network round trip to a queue of minutes.
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
# Buckets for the parts of a step.
FINE_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
COUNTS = tuple(float(2**exponent) for exponent in range(0, 15, 2))


class MetricKind(enum.Enum):
    """Kinds of metrics. The values are Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric. `high`: meaning of a high or fast rising value.

    `action`: what an operator does then, in Markdown with links relative to `docs`. `labels`: names
    of labels with few values each, which callers cannot choose. `buckets`: upper bounds of a
    histogram.
    """

    name: str
    kind: MetricKind
    help: str
    high: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    action: str = ""


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
        if metric.kind is MetricKind.COUNTER:
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


# -- Prometheus histogram for many values, which are sorted into buckets when it is read -----------

# Maximum number of buffered values: some hundred KiB, and less than a millisecond to count.
_MOST_WAITING = 8192


class BulkValues:
    """Values of one series. Adding a value only buffers it, in a tenth of a microsecond."""

    def __init__(self, bounds: Iterable[float], unit: float) -> None:
        self._bounds = np.array(tuple(bounds))
        self._unit = unit
        self._waiting: list[float] = []
        self._times: list[int] = []
        self._counts = np.zeros(len(self._bounds) + 1, np.int64)
        self._sum = 0.0

    @property
    def num_waiting(self) -> int:
        """Number of buffered values."""
        return len(self._waiting)

    def add(self, value: float) -> None:
        """Adds one value."""
        self.repeat(value, 1)

    def repeat(self, value: float, times: int) -> None:
        """Adds the same value `times` times."""
        self._waiting.append(value)
        self._times.append(times)
        if len(self._waiting) >= _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        """Sorts the buffered values into buckets. A value equal to a bound is below the bound."""
        values = np.array(self._waiting, np.float64) * self._unit
        times = np.array(self._times, np.int64)
        self._waiting.clear()
        self._times.clear()
        buckets = np.searchsorted(self._bounds, values)
        # `bincount` adds weights as floats, which are exact up to 2**53.
        counts = np.bincount(buckets, weights=times, minlength=len(self._counts))
        self._counts += counts.astype(np.int64)
        self._sum += float(values @ times)

    def totals(self) -> tuple[list[int], float]:
        """Returns the cumulative counts by bound, the last for all values, and the sum."""
        self._count()
        return np.cumsum(self._counts).tolist(), self._sum


class BulkHistogram:
    """Histogram for events of every step. prometheus_client's own takes microseconds per value.

    Must be filled and read in the same thread.
    """

    def __init__(self, metric: Metric, unit: float = 1.0) -> None:
        """`unit`: factor of all values, such as 1e-9 for values in nanoseconds."""
        self._metric = metric
        self._unit = unit
        self._series: dict[tuple[str, ...], BulkValues] = {}

    def labels(self, *labels: str) -> BulkValues:
        """Returns the series with these labels; made at the first call."""
        if labels not in self._series:
            self._series[labels] = BulkValues(self._metric.buckets, self._unit)
        return self._series[labels]

    def family(self) -> HistogramMetricFamily:
        """Returns the current state as a metric family."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        names = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, values in self._series.items():
            totals, total = values.totals()
            family.add_metric(list(labels), list(zip(names, totals, strict=True)), total)
        return family


def counted_refusals(counter: Counter, then: OnRefusal = ignore_refusal) -> OnRefusal:
    """Returns an `on_refusal` callback that counts by reason and then calls `then`."""
    # Each series begins with 0: Prometheus misses the first increment of a series that begins with
    # 1.
    for reason in CODE_OF_REASON:
        counter.labels(reason)

    def tell(method: str, context: grpc.aio.ServicerContext, reason: str) -> None:
        counter.labels(reason).inc()
        then(method, context, reason)

    return tell
