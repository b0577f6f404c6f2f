"""A histogram of arrays counts as prometheus_client's own does."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from splitserve_metrics.instruments import BulkHistogram, Kind, Metric, Page
from tests.support.metrics import Shown

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
    series = bulk.labels()
    for values in arrays:
        for value, times in Counter(values[1:]).items():
            series.repeat(value, times)
        series.add(values[0])
        for value in values:
            one_by_one.observe(value)

    def lines(text: bytes) -> dict[str, float]:
        said = [line.rpartition(" ") for line in text.decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in said}

    shown = lines(generate_latest(Page(CollectorRegistry(), [bulk.family()])))

    assert shown == lines(generate_latest(registry))


def test_bulk_histogram_keeps_series_apart_and_few_values_in_memory() -> None:
    metric = Metric("seconds", Kind.HISTOGRAM, "some", "", ("phase",), (1.0, 2.0))
    bulk = BulkHistogram(metric, unit=0.001)
    for number in range(20_000):
        bulk.labels("slow" if number % 4 else "quick").add(1500 if number % 4 else 500)
        assert bulk.labels("slow").num_waiting < 10_000

    shown = Shown(Page(CollectorRegistry(), [bulk.family()]))

    assert shown.histogram("seconds", phase="slow") == (15_000, 22_500.0)
    assert shown.histogram("seconds", phase="quick") == (5_000, 2_500.0)
    assert shown.value("seconds_bucket", phase="slow", le="1.0") == 0
    assert shown.value("seconds_bucket", phase="quick", le="1.0") == 5_000
