"""Prometheus metrics of all processes: tables of metrics, instruments, and the HTTP listener."""

from splitserve_metrics.executor_table import EXECUTOR_METRICS, GATEWAY_METRICS
from splitserve_metrics.instruments import (
    BulkHistogram,
    BulkValues,
    Instruments,
    LiveFamily,
    Metric,
    MetricKind,
    Page,
    counted_refusals,
)
from splitserve_metrics.listener import MAX_CONNECTIONS, MetricsAddress, MetricsListener
from splitserve_metrics.scheduler_table import SCHEDULER_METRICS

__all__ = [
    "EXECUTOR_METRICS",
    "GATEWAY_METRICS",
    "MAX_CONNECTIONS",
    "SCHEDULER_METRICS",
    "BulkHistogram",
    "BulkValues",
    "Instruments",
    "LiveFamily",
    "Metric",
    "MetricKind",
    "MetricsAddress",
    "MetricsListener",
    "Page",
    "counted_refusals",
]
