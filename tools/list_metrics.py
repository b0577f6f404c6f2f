"""Writes the tables of all metrics into docs/metrics.md.

`--check` writes nothing; the exit code is 1 if one of them is not what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from splitserve_metrics import EXECUTOR_METRICS, GATEWAY_METRICS, SCHEDULER_METRICS, Metric

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
TABLES: Mapping[str, tuple[Metric, ...]] = MappingProxyType(
    {"scheduler": SCHEDULER_METRICS, "executor": EXECUTOR_METRICS, "gateway": GATEWAY_METRICS}
)


def markdown(metrics: Sequence[Metric]) -> str:
    """A table of them."""
    lines = [
        "| metric | kind | labels | what it is | a high value | action |",
        "|---|---|---|---|---|---|",
    ]
    for metric in metrics:
        labels = " ".join(f"`{label}`" for label in metric.labels)
        lines.append(
            f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} | {metric.high}"
            f" | {metric.action} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Writes or checks the tables; returns the exit code."""
    before = text = DOCUMENT.read_text()
    for name, metrics in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        pattern = re.compile(f"{begin}\n.*?{end}", re.DOTALL)
        # A backslash in a replacement would mean something.
        table = f"{begin}\n{markdown(metrics)}\n{end}".replace("\\", r"\\")
        text = pattern.sub(table, text)
    if "--check" in argv:
        return int(text != before)
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
