"""The tables of metrics keep Prometheus' rules, and the document has them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from splitserve_metrics.executor_table import EXECUTOR_METRICS, GATEWAY_METRICS
from splitserve_metrics.instruments import Instruments, Kind, Metric, Page
from splitserve_metrics.scheduler_table import SCHEDULER_METRICS

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
    assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
    assert not metric.name.endswith(RESERVED)
    assert not re.search(r"_(ms|us|ns|milliseconds|kib|mib|percent)\b", metric.name)
    if TIMES.search(metric.name):
        assert metric.name.endswith("_seconds")
    assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
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
        if metric.kind is Kind.HISTOGRAM:
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
