"""A report as one picture (SVG, which browsers show): latencies by percentile, and what went on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from splitserve_bench.figures.log_histogram import LogHistogram, merged
from splitserve_bench.figures.quantities import seconds_text
from splitserve_bench.reports.chart import (
    COLOURS,
    HEIGHT,
    WIDTH,
    Chart,
    Line,
    even_ticks,
    legend,
)
from splitserve_bench.reports.report import TargetReport
from splitserve_rpc.printable import printable

_HEAD = 64
# A title of so many characters has room in letters of this size.
_TITLE_CHARS, _TITLE_PX = 95, 16
# Percentiles stand as far to the right as they are rare: from 0 to 99.9 %.
_SHARES = (0.0, 0.5, 0.9, 0.99, 0.999)
_NUM_POINTS = 120
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 }
.title { font-weight: 600; font-size: 13px } .head { font-weight: 600 }
.x { text-anchor: middle } .y { text-anchor: end }
.grid { stroke: #ddd; fill: none } .line { fill: none; stroke-width: 2 }
.behind { stroke-dasharray: 4 3; stroke-width: 1.5 }
"""


def write_picture(path: Path, title: str, targets: Sequence[TargetReport]) -> None:
    """Raises OSError."""
    path.write_text(picture(title, targets), encoding="utf-8")


def picture(title: str, targets: Sequence[TargetReport]) -> str:
    """The SVG."""
    named = [
        (target, _name_of(target), COLOURS[index % len(COLOURS)])
        for index, target in enumerate(targets)
    ]
    charts = [
        _by_percentile("Time to first token (ttft)", "ttft", named),
        _by_percentile("Time per token (itl)", "itl", named),
        _over_time("Output tokens/s, first round", "num_tokens", named, per_s=True),
        _over_time(
            "Open requests, and (dashed) without a token yet", "num_open", named, per_s=False
        ),
    ]
    width, height = 2 * WIDTH, _HEAD + 2 * HEIGHT
    body = [
        chart.svg(index % 2 * WIDTH, _HEAD + index // 2 * HEIGHT)
        for index, chart in enumerate(charts)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text class="head" style="font-size: {_title_px(title):.1f}px" x="16" y="26">'
            f"{escape(title)}</text>",
            legend([(name, colour) for _, name, colour in named], 16, 50),
            *body,
            "</svg>\n",
        ]
    )


def _title_px(title: str) -> float:
    return _TITLE_PX * min(1.0, _TITLE_CHARS / len(title))


def _name_of(target: TargetReport) -> str:
    name = printable(target.name)
    return f"{name} (not put on as asked)" if target.content.get("given_up") else name


_Named = Sequence[tuple[TargetReport, str, str]]


def _by_percentile(title: str, metric: str, named: _Named) -> Chart:
    lines = []
    for target, name, colour in named:
        whole = merged(target.parts[metric])
        lines.append(Line(name, colour, _percentile_points(whole)))
    ticks = [(_rarity(share), f"{100 * share:g} %") for share in _SHARES]
    return Chart(title, "of all at most", ticks, _seconds_or_0, lines)


def _seconds_or_0(value_s: float) -> str:
    return seconds_text(value_s) if value_s else "0"


def _percentile_points(whole: LogHistogram) -> list[tuple[float, float]]:
    """As far as there are values to bear them out."""
    if not whole.num_values:
        return []
    last = min(_rarity(_SHARES[-1]), math.log10(max(whole.num_values, 1.0)))
    rarities = [last * number / _NUM_POINTS for number in range(_NUM_POINTS + 1)]
    return [(rarity, whole.quantile(1 - 10**-rarity)) for rarity in rarities]


def _rarity(share: float) -> float:
    return -math.log10(1 - share)


def _over_time(title: str, column: str, named: _Named, *, per_s: bool) -> Chart:
    lines, last_s = [], 0.0
    for target, name, colour in named:
        timeline = (target.content["timelines"] or [{"width_s": 1.0, column: []}])[0]
        last_s = max(last_s, timeline["width_s"] * len(timeline[column]))
        lines.append(Line(name, colour, _time_points(timeline, column, per_s)))
        if not per_s:
            waiting = _time_points(timeline, "num_waiting", per_s)
            lines.append(Line(f"{name}, waiting", colour, waiting, is_dashed=True))
    ticks = even_ticks(last_s, lambda second: f"{second:g}")
    return Chart(title, "seconds", ticks, lambda value: f"{value:g}", lines)


def _time_points(timeline: Any, column: str, per_s: bool) -> list[tuple[float, float]]:  # noqa: ANN401
    width_s = timeline["width_s"]
    return [
        ((number + 0.5) * width_s, value / width_s if per_s else value)
        for number, value in enumerate(timeline.get(column, []))
    ]
