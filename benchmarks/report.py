"""How benchmarks say what they measured."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence

import numpy as np


def emit(bench: str, **values: object) -> None:
    """Prints one JSON object on a line of its own."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    sys.stdout.write(json.dumps({"bench": bench, **values, "machine": machine}) + "\n")
    sys.stdout.flush()


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Prints lines of equally many columns, each as wide as its longest entry."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        row = "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        sys.stdout.write(row.rstrip() + "\n")


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of `values`, rounded to a tenth."""
    return round(float(np.percentile(values, percent)), 1)
