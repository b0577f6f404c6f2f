"""A histogram of arrays counts as prometheus_client's own does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from splitserve_metrics.bulk_histogram import BulkHistogram
from splitserve_metrics.instruments import Page
from splitserve_metrics.metric import Kind, Metric

METRIC = Metric("seconds", Kind.HISTOGRAM, "some", "", buckets=(1 / 1024, 0.5, 1.0, 300.0))
# Multiples of 1/1024 have exact sums, in whatever order.
VALUES = st.one_of(st.sampled_from(METRIC.buckets), st.integers(0, 2**20).map(lambda n: n / 1024))


@given(st.lists(st.lists(VALUES, min_size=1), max_size=4))
def test_bulk_histogram_says_what_one_says_that_is_told_each_value(
    arrays: list[list[float]],
) -> None:
    registry = CollectorRegistry()
    one_by_one = Histogram(METRIC.name, METRIC.help, buckets=METRIC.buckets, registry=registry)
    bulk = BulkHistogram(METRIC)
    for values in arrays:
        bulk.observe(np.array(values))
        for value in values:
            one_by_one.observe(value)

    def lines(text: bytes) -> dict[str, float]:
        said = [line.rpartition(" ") for line in text.decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in said}

    shown = lines(generate_latest(Page(CollectorRegistry(), [bulk.family()])))

    assert shown == lines(generate_latest(registry))
