"""What a metric is."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Of waiting for tokens: a network's round trip to a queue of minutes.
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
# Of parts of a step.
FINE_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
COUNTS = tuple(float(2**exponent) for exponent in range(0, 15, 2))


class Kind(enum.Enum):
    """How a number behaves; the values are Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One name. `high` says what a high value means, or one that rises fast.

    `labels` have few values each, which callers cannot choose. `buckets`: of a histogram.
    """

    name: str
    kind: Kind
    help: str
    high: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
