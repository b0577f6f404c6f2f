"""Definition of a metric: its name, kind, labels and buckets."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Buckets for the waiting time for tokens: from a network round trip to a queue of minutes.
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
# Buckets for the parts of a step.
FINE_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
COUNTS = tuple(float(2**exponent) for exponent in range(0, 15, 2))


class Kind(enum.Enum):
    """Kinds of metrics. The values are Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric. `high`: meaning of a high or fast rising value.

    `labels`: names of labels with few values each, which callers cannot choose. `buckets`: upper
    bounds of a histogram.
    """

    name: str
    kind: Kind
    help: str
    high: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
