"""Measured figures in bounded memory: distributions, confidence intervals, rates, errors."""

from splitserve_bench.figures.log_histogram import (
    RELATIVE_ERROR,
    Estimate,
    LogHistogram,
    Parts,
    estimate,
    estimate_ratios,
    merged,
)
from splitserve_bench.figures.recorder import METRICS, Recorder, Slo, parse_seconds, seconds_text

__all__ = [
    "METRICS",
    "RELATIVE_ERROR",
    "Estimate",
    "LogHistogram",
    "Parts",
    "Recorder",
    "Slo",
    "estimate",
    "estimate_ratios",
    "merged",
    "parse_seconds",
    "seconds_text",
]
