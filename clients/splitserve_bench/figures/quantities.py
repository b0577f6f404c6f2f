"""Times as people write them."""

from __future__ import annotations

import math
import re

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|)")


def parse_seconds(text: str) -> float:
    """Of `200ms`, `1.5s`, `2m`, `3`. Raises ValueError."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no time; allowed: a number with us, ms, s, m or h")
    return float(found[1]) * _UNITS_S[found[2]]


def seconds_text(value_s: float | None) -> str:
    """Three digits, and the unit that suits them."""
    if value_s is None or not math.isfinite(value_s):
        return "-"
    value_s = float(f"{value_s:.3g}")
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value_s >= size:
            return f"{_digits(value_s / size)} {unit}"
    return f"{_digits(value_s * 1e6)} us"


def _digits(value: float) -> str:
    value = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(value))) if value >= 1 else 2
    return f"{value:.{decimals}f}"
