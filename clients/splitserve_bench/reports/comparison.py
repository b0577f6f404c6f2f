"""Two targets beside each other: how many times the first one's figures the second one's are."""

from __future__ import annotations

from splitserve_bench.figures.intervals import Estimate, estimate_ratios
from splitserve_bench.figures.quantities import seconds_text
from splitserve_bench.figures.request_figures import METRICS
from splitserve_bench.reports.report import FIGURE_NAMES, QUANTILES, RATES, TargetReport
from splitserve_bench.reports.tables import aligned
from splitserve_rpc.printable import printable


def comparison_text(before: TargetReport, after: TargetReport) -> str:
    """A table: both figures, their ratio with its interval, and whether that excludes 1."""
    rows = [["", printable(before.name), printable(after.name), "ratio", "", ""]]
    for rate in RATES:
        values = before.content["rates"][rate], after.content["rates"][rate]
        ratio = f"{values[1] / values[0]:.3f}" if values[0] else "-"
        cells = [f"{value:.2f}" for value in values]
        rows.append([rate, *cells, ratio, _by_round(rate, before, after), ""])
    for metric in METRICS:
        if metric != "send_delay":
            rows += _latency_rows(metric, before, after)
    head = f"{printable(after.name)} compared with {printable(before.name)}:"
    return "\n".join([head, *("  " + line.rstrip() for line in aligned(rows))]) + "\n"


def _by_round(rate: str, before: TargetReport, after: TargetReport) -> str:
    """How far the ratio moved from round to round, which two targets took in turns."""
    rounds = zip(before.content["rounds"], after.content["rounds"], strict=False)
    ratios = [b[rate] / a[rate] for a, b in rounds if a[rate]]
    return f"{min(ratios):.3f} to {max(ratios):.3f}" if len(ratios) > 1 else ""


def _latency_rows(metric: str, before: TargetReport, after: TargetReport) -> list[list[str]]:
    figures = before.content["latency_s"][metric], after.content["latency_s"][metric]
    ratios = estimate_ratios(before.parts[metric], after.parts[metric], QUANTILES)
    return [
        [
            f"{metric} {name}",
            *(seconds_text(each[name]["value"]) for each in figures),
            f"{ratio.value:.3f}",
            _interval(ratio),
            _verdict(ratio),
        ]
        for name, ratio in zip(FIGURE_NAMES, ratios, strict=False)
    ]


def _interval(ratio: Estimate) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    return f"[{ratio.low:.3f}, {ratio.high:.3f}]"


def _verdict(ratio: Estimate) -> str:
    """Only what the interval bears out."""
    if ratio.low is None or ratio.high is None:
        return ""
    if ratio.high < 1:
        return "shorter"
    return "longer" if ratio.low > 1 else "no difference seen"
