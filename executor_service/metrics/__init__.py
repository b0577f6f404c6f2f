"""Prometheus metrics of steps and streams."""

from executor_service.metrics.executor_metrics import ExecutorMetrics

__all__ = ["ExecutorMetrics"]
