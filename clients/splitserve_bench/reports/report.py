"""A report: all that was measured, as JSON that programs read and `compare` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from splitserve_bench.figures.intervals import Estimate, estimate
from splitserve_bench.figures.log_histogram import LogHistogram, merged
from splitserve_bench.figures.recorder import Recorder
from splitserve_bench.figures.request_figures import METRICS
from splitserve_rpc.json_text import parse_json

FORMAT = "splitserve-bench 1"
QUANTILES = (0.5, 0.9, 0.95, 0.99)
_BUSY_QUANTILE = 0.9
FIGURE_NAMES = ("mean", "p50", "p90", "p95", "p99")
RATES = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "good_requests_per_s")


class ReportUnreadable(ValueError):
    """A file is no report; the message names it."""


@dataclass(frozen=True, slots=True)
class TargetReport:
    """What was measured of one target: `content` as it is in JSON, and the histograms of it."""

    name: str
    content: Mapping[str, Any]
    parts: Mapping[str, list[LogHistogram]]


def report_of(name: str, url: str, model: str, recorder: Recorder) -> TargetReport:
    """One target's."""
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
    """Of the busier seconds of the busier processes: a tenth of all of them had more."""
    return busy.quantile(_BUSY_QUANTILE) if busy.num_values else None


def _rates(recorder: Recorder) -> dict[str, float]:
    """Over all rounds together."""
    total_s = sum(each.duration_s for each in recorder.rounds)
    return {
        name: sum(getattr(each, name) * each.duration_s for each in recorder.rounds) / total_s
        if total_s
        else 0.0
        for name in RATES
    }


def latency_of(parts: list[LogHistogram]) -> dict[str, Any]:
    """The figures of a metric, each with its interval; empty where nothing was measured."""
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
    """Raises OSError."""
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
    """The targets of a report. Raises OSError, ReportUnreadable."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ReportUnreadable(f"{path}: format {content['format']!r}; allowed: {FORMAT!r}")
        return [_target(entry) for entry in content["targets"]]
    except ReportUnreadable:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ReportUnreadable(f"{path}: this is no report of splitserve bench") from error


def _target(entry: dict[str, Any]) -> TargetReport:
    parts = {
        metric: [LogHistogram.from_json(part) for part in entry["parts"][metric]]
        for metric in METRICS
    }
    content = {name: value for name, value in entry.items() if name != "parts"}
    return TargetReport(str(entry["name"]), content, parts)
