"""Reports as JSON, as a table for the terminal, and as a comparison of two targets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from splitserve_bench.figures import (
    METRICS,
    Estimate,
    LogHistogram,
    Recorder,
    estimate,
    estimate_ratios,
    merged,
    seconds_text,
)
from splitserve_common import parse_json, printable

FORMAT = "splitserve-bench 1"
QUANTILES = (0.5, 0.9, 0.95, 0.99)
_BUSY_QUANTILE = 0.9
FIGURE_NAMES = ("mean", "p50", "p90", "p95", "p99")
RATES = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "good_requests_per_s")


class ReportUnreadable(ValueError):
    """File is not a report; the message names the file."""


@dataclass(frozen=True, slots=True)
class TargetReport:
    """Measurements of one target: `content` as in JSON, and histograms of each metric by part."""

    name: str
    content: Mapping[str, Any]
    parts: Mapping[str, list[LogHistogram]]


def report_of(name: str, url: str, model: str, recorder: Recorder) -> TargetReport:
    """Returns the report of one target."""
    parts = {metric: recorder.parts.of(metric) for metric in METRICS}
    content = {
        "name": name,
        "url": url,
        "model": model,
        "requests": asdict(recorder.counts),
        "errors": {
            kind: {"count": count, "first": recorder.messages[kind]}
            for kind, count in recorder.errors.most_common()
        },
        "slo_s": dict(recorder.slo.limits_s),
        "rates": _rates(recorder),
        "generator_busy_ratio": _busy_ratio(recorder.busy),
        "rounds": [asdict(each) for each in recorder.rounds],
        "given_up": [
            {"round": number, **asdict(given_up)} for number, given_up in recorder.given_up.items()
        ],
        "latency_s": {metric: latency_of(parts[metric]) for metric in METRICS},
        "timelines": [timeline.as_json() for timeline in recorder.timelines],
    }
    return TargetReport(name, content, parts)


def _busy_ratio(busy: LogHistogram) -> float | None:
    """Returns the 90th percentile of the generators' busy ratios; None without samples."""
    return busy.quantile(_BUSY_QUANTILE) if busy.num_values else None


def _rates(recorder: Recorder) -> dict[str, float]:
    """Returns the rates over all rounds together."""
    total_s = sum(each.duration_s for each in recorder.rounds)
    return {
        name: sum(getattr(each, name) * each.duration_s for each in recorder.rounds) / total_s
        if total_s
        else 0.0
        for name in RATES
    }


def latency_of(parts: list[LogHistogram]) -> dict[str, Any]:
    """Returns the figures of a metric with their intervals; empty without values."""
    estimates = estimate(parts, QUANTILES)
    if not estimates:
        return {}
    whole = merged(parts)
    figures = {name: _figure(each) for name, each in zip(FIGURE_NAMES, estimates, strict=True)}
    extremes = {"smallest": whole.smallest, "largest": whole.largest}
    return {"count": whole.num_values, **extremes, **figures}


def _figure(figure: Estimate) -> dict[str, float | None]:
    return asdict(figure)


def write_report(path: Path, load: Mapping[str, Any], targets: list[TargetReport]) -> None:
    """Writes the report as JSON. Raises OSError."""
    content = {
        "format": FORMAT,
        "load": dict(load),
        "targets": [
            {
                **target.content,
                "parts": {
                    metric: [part.as_json() for part in parts if part.num_values]
                    for metric, parts in target.parts.items()
                },
            }
            for target in targets
        ],
    }
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_report(path: Path) -> list[TargetReport]:
    """Returns the targets of a report file. Raises OSError, ReportUnreadable."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ReportUnreadable(f"{path}: format {content['format']!r}; allowed: {FORMAT!r}")
        return [_target(entry) for entry in content["targets"]]
    except ReportUnreadable:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ReportUnreadable(f"{path}: not a report of splitserve bench") from error


def _target(entry: dict[str, Any]) -> TargetReport:
    parts = {
        metric: [LogHistogram.from_json(part) for part in entry["parts"][metric]]
        for metric in METRICS
    }
    content = {name: value for name, value in entry.items() if name != "parts"}
    return TargetReport(str(entry["name"]), content, parts)


# -- Report of one target as text ------------------------------------------------------------------

# Beyond these limits the measurement includes delays of the generator itself.
_MOST_SEND_DELAY_S = 0.01
_MOST_BUSY_RATIO = 0.85


def text_of(target: TargetReport) -> str:
    """Returns the main figures as text."""
    content = target.content
    requests, rates = content["requests"], content["rates"]
    lines = [
        f"{printable(target.name)}: {printable(content['model'])} at {printable(content['url'])}",
        f"  requests    {requests['num_completed']} completed, {requests['num_failed']} failed,"
        f" {requests['num_warm_up']} of the warm-up excluded",
        f"  tokens      {requests['num_prompt_tokens']} in"
        f" ({requests['num_cached_tokens']} from the prefix cache),"
        f" {requests['num_output_tokens']} out of {requests['num_wanted_tokens']} requested",
        f"  throughput  {rates['requests_per_s']:.2f} requests/s,"
        f" {rates['output_tokens_per_s']:.1f} tokens/s out,"
        f" {rates['prompt_tokens_per_s']:.1f} in",
    ]
    if content["slo_s"]:
        limits = ", ".join(
            f"{name} {seconds_text(limit)}" for name, limit in content["slo_s"].items()
        )
        num_all = requests["num_completed"] + requests["num_failed"]
        lines.append(
            f"  goodput     {rates['good_requests_per_s']:.2f} requests/s within {limits}"
            f" ({requests['num_good']} of {num_all})"
        )
    lines += _generator_line(content)
    lines += [""] + ["  " + line for line in _latency_lines(content["latency_s"])]
    lines += _notes(content)
    return "\n".join(lines) + "\n"


def _latency_lines(latency: dict[str, Any]) -> list[str]:
    """Returns a table of at most 78 columns, with the interval's bounds below each figure."""
    rows = [["", *FIGURE_NAMES, "largest"]]
    for metric, figures in latency.items():
        if figures:
            cells = [seconds_text(figures[name]["value"]) for name in FIGURE_NAMES]
            rows.append([metric, *cells, seconds_text(figures["largest"])])
            rows += _interval_rows([figures[name] for name in FIGURE_NAMES])
    return aligned(rows)


def _interval_rows(figures: Sequence[dict[str, float | None]]) -> list[list[str]]:
    """Returns the two rows of interval bounds; none without any interval.

    A cell is empty if there are too few requests for an interval.
    """
    rows = []
    for name, bound in (("from", "low"), ("to", "high")):
        values = [figure[bound] for figure in figures]
        if any(value is not None for value in values):
            cells = ["" if value is None else seconds_text(value) for value in values]
            rows.append([f"  {name}", *cells, ""])
    return rows


def _generator_line(content: Any) -> list[str]:  # noqa: ANN401
    """Returns a line on the generator's own delay and load; empty without measurements."""
    delay, busy_ratio = content["latency_s"]["send_delay"], content["generator_busy_ratio"]
    if not delay or busy_ratio is None:
        return []
    late = seconds_text(delay["p99"]["value"])
    return [f"  generator   p99 send delay {late}; {busy_ratio:.0%} busy"]


def _is_limit(content: Any) -> bool:  # noqa: ANN401
    delay, busy_ratio = content["latency_s"]["send_delay"], content["generator_busy_ratio"]
    is_late = bool(delay) and delay["p99"]["value"] > _MOST_SEND_DELAY_S
    return is_late or (busy_ratio or 0.0) > _MOST_BUSY_RATIO


def _notes(content: Any) -> list[str]:  # noqa: ANN401
    requests = content["requests"]
    notes = [
        f"  {entry['count']} failed with {printable(kind)}: {printable(entry['first'])}"
        for kind, entry in content["errors"].items()
    ]
    if requests["num_interrupted"]:
        notes.append(
            f"  The run was stopped: {requests['num_interrupted']} unfinished requests are in no"
            " figure."
        )
    notes += [f"  {_given_up(each)}" for each in content["given_up"]]
    if requests["num_held"]:
        notes.append(
            f"  {requests['num_held']} requests were delayed by --max-open: the target was"
            " overloaded. Their latencies count from when they were due."
        )
    if _is_limit(content):
        notes.append(
            "  The generator limits the measurement: give it more --processes, or a separate"
            " machine."
        )
    return ["", *notes] if notes else []


def _given_up(entry: Mapping[str, Any]) -> str:
    """Returns a note on a round whose load was incomplete, and on the effect on its figures."""
    num_begun, after_s = entry["num_begun"], entry["after_s"]
    return (
        f"The load of round {entry['round'] + 1} is incomplete: after {seconds_text(after_s)} it"
        f" was {seconds_text(entry['behind_s'])} late, and sending stopped (--max-behind)."
        f" {num_begun} conversations had begun, {num_begun / max(after_s, 1e-9):.1f} per second."
        " Requests that were not sent are in no figure, so the figures are too good: give a lower"
        " --rate, or find the capacity of the target with --concurrency."
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines of aligned columns; the first column is left-aligned, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# -- Comparison of two targets ---------------------------------------------------------------------


def comparison_text(before: TargetReport, after: TargetReport) -> str:
    """Returns a table of both targets' figures, and their ratios with intervals and verdicts.

    A ratio is the second target's figure divided by the first's.
    """
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
    """Returns the range of the ratio over rounds, in which the targets took turns."""
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
    """Returns a verdict only if the interval supports it."""
    if ratio.low is None or ratio.high is None:
        return ""
    if ratio.high < 1:
        return "shorter"
    return "longer" if ratio.low > 1 else "no difference"
