"""Tests the tables of metrics, and histograms of arrays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from splitserve_metrics import (
    EXECUTOR_METRICS,
    GATEWAY_METRICS,
    SCHEDULER_METRICS,
    BulkHistogram,
    Instruments,
    Metric,
    MetricKind,
    Page,
)
from tests.support.metrics import Shown

ROOT = Path(__file__).resolve().parents[3]
METRICS = (*SCHEDULER_METRICS, *EXECUTOR_METRICS, *GATEWAY_METRICS)
# What a number may be of, at the end of its name: a base unit, or a count of the thing named.
TIMES = re.compile(r"time|duration|latency|recovery|running_seconds")
RESERVED = ("_count", "_sum", "_bucket", "_created")


def test_names_are_said_once() -> None:
    names = [metric.name for metric in METRICS]

    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"splitserve_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
    assert not metric.name.endswith(RESERVED)
    assert not re.search(r"_(ms|us|ns|milliseconds|kib|mib|percent)\b", metric.name)
    if TIMES.search(metric.name):
        assert metric.name.endswith("_seconds")
    assert bool(metric.buckets) is (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help
    assert metric.high
    assert metric.action


def test_document_has_all_metrics() -> None:
    path = os.pathsep.join([str(ROOT / "common"), str(ROOT / "protos")])
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "list_metrics.py", "--check"],
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )

    assert result.returncode == 0, "make options; a new metric also needs a row in operations.md"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool: Debian's prometheus has it")
@pytest.mark.parametrize("table", [SCHEDULER_METRICS, EXECUTOR_METRICS, GATEWAY_METRICS])
def test_promtool_finds_nothing_wrong_with_a_page(table: tuple[Metric, ...]) -> None:
    made = Instruments(table)
    families = []
    for metric in table:
        labels = ["x"] * len(metric.labels)
        if metric.kind is MetricKind.HISTOGRAM:
            histogram = made.histogram(metric.name)
            (histogram.labels(*labels) if labels else histogram).observe(1)
        else:
            family = made.family(metric.name)
            family.add_metric(labels, 1)
            families.append(family)

    result = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(Page(made.registry, families)),
        capture_output=True,
        check=False,
    )

    assert (result.returncode, result.stdout + result.stderr) == (0, b"")


METRIC = Metric("seconds", MetricKind.HISTOGRAM, "some", "", buckets=(1 / 1024, 0.5, 1.0, 300.0))
# Multiples of 1/1024 have exact sums, in whatever order.
VALUES = st.one_of(st.sampled_from(METRIC.buckets), st.integers(0, 2**20).map(lambda n: n / 1024))


@given(st.lists(st.lists(VALUES, min_size=1), max_size=4))
def test_bulk_histogram_equals_one_of_single_values(
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
    metric = Metric("seconds", MetricKind.HISTOGRAM, "some", "", ("phase",), (1.0, 2.0))
    bulk = BulkHistogram(metric, unit=0.001)
    for number in range(20_000):
        bulk.labels("slow" if number % 4 else "quick").add(1500 if number % 4 else 500)
        assert bulk.labels("slow").num_waiting < 10_000

    shown = Shown(Page(CollectorRegistry(), [bulk.family()]))

    assert shown.histogram("seconds", phase="slow") == (15_000, 22_500.0)
    assert shown.histogram("seconds", phase="quick") == (5_000, 2_500.0)
    assert shown.value("seconds_bucket", phase="slow", le="1.0") == 0
    assert shown.value("seconds_bucket", phase="quick", le="1.0") == 5_000
