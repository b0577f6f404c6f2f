"""A histogram of many values, which are counted when somebody reads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from splitserve_metrics.metric import Metric

# So many values wait to be counted: some hundred KiB, and less than a millisecond.
_MOST_WAITING = 8192


class BulkValues:
    """Those of one series. To take a value is to remember it, a tenth of a microsecond."""

    def __init__(self, bounds: Iterable[float], unit: float) -> None:
        self._bounds = np.array(tuple(bounds))
        self._unit = unit
        self._waiting: list[float] = []
        self._times: list[int] = []
        self._counts = np.zeros(len(self._bounds) + 1, np.int64)
        self._sum = 0.0

    @property
    def num_waiting(self) -> int:
        """Values that are not counted yet."""
        return len(self._waiting)

    def add(self, value: float) -> None:
        """One more."""
        self.repeat(value, 1)

    def repeat(self, value: float, times: int) -> None:
        """So many more of the same."""
        self._waiting.append(value)
        self._times.append(times)
        if len(self._waiting) >= _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        """One that equals a bound is below it."""
        values = np.array(self._waiting, np.float64) * self._unit
        times = np.array(self._times, np.int64)
        self._waiting.clear()
        self._times.clear()
        buckets = np.searchsorted(self._bounds, values)
        # Weights are counted as floats, which have all numbers up to 2**53.
        counts = np.bincount(buckets, weights=times, minlength=len(self._counts))
        self._counts += counts.astype(np.int64)
        self._sum += float(values @ times)

    def totals(self) -> tuple[list[int], float]:
        """How many are not above each bound, then all; and their sum."""
        self._count()
        return np.cumsum(self._counts).tolist(), self._sum


class BulkHistogram:
    """For what happens in every step, where prometheus_client's own would cost too much.

    That takes some microseconds a value. Used in one thread, also to be read.
    """

    def __init__(self, metric: Metric, unit: float = 1.0) -> None:
        """`unit`: what values are multiplied by, 1e-9 of nanoseconds."""
        self._metric = metric
        self._unit = unit
        self._series: dict[tuple[str, ...], BulkValues] = {}

    def labels(self, *labels: str) -> BulkValues:
        """Where the values with these labels go; made once."""
        if labels not in self._series:
            self._series[labels] = BulkValues(self._metric.buckets, self._unit)
        return self._series[labels]

    def family(self) -> HistogramMetricFamily:
        """What it says now."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        names = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, values in self._series.items():
            totals, total = values.totals()
            family.add_metric(list(labels), list(zip(names, totals, strict=True)), total)
        return family
