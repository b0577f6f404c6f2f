"""Report as an SVG picture: latencies by percentile, throughput and open requests over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from splitserve_bench.figures import LogHistogram, merged, seconds_text
from splitserve_bench.reports.report import TargetReport
from splitserve_common import printable

_HEAD = 64
# Titles up to this many characters fit in letters of this size.
_TITLE_CHARS, _TITLE_PX = 95, 16
# Marked percentiles, from 0 to 99.9 %; the axis is logarithmic in the rest.
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
    """Writes the picture to `path`. Raises OSError."""
    path.write_text(picture(title, targets), encoding="utf-8")


def picture(title: str, targets: Sequence[TargetReport]) -> str:
    """Returns the SVG text."""
    named = [
        (target, _name_of(target), COLOURS[index % len(COLOURS)])
        for index, target in enumerate(targets)
    ]
    charts = [
        _by_percentile("Time to first token (ttft)", "ttft", named),
        _by_percentile("Time per token (itl)", "itl", named),
        _over_time("Output tokens/s, first round", "num_tokens", named, per_s=True),
        _over_time("Open requests; dashed: without a token yet", "num_open", named, per_s=False),
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
    return f"{name} (incomplete load)" if target.content.get("given_up") else name


_Named = Sequence[tuple[TargetReport, str, str]]


def _by_percentile(title: str, metric: str, named: _Named) -> Chart:
    lines = []
    for target, name, colour in named:
        whole = merged(target.parts[metric])
        lines.append(Line(name, colour, _percentile_points(whole)))
    ticks = [(_rarity(share), f"{100 * share:g} %") for share in _SHARES]
    return Chart(title, "percentile", ticks, _seconds_or_0, lines)


def _seconds_or_0(value_s: float) -> str:
    return seconds_text(value_s) if value_s else "0"


def _percentile_points(whole: LogHistogram) -> list[tuple[float, float]]:
    """Returns points of rarity and value, as far as enough values support them."""
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


# -- Line charts as SVG, without external resources ------------------------------------------------
#
# Own code, since chart libraries are as large as matplotlib or bring third-party scripts.

WIDTH, HEIGHT = 470, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 26, 34, 40
# Palette for colour-blind readers, too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a chart, with points from left to right. `is_dashed`: drawn as a secondary line."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Line chart. `x_ticks`: positions with labels.

    Values of y begin at 0; `y_text` formats a value.
    """

    title: str
    x_name: str
    x_ticks: Sequence[tuple[float, str]]
    y_text: Callable[[float], str]
    lines: Sequence[Line] = field(default_factory=tuple)

    def svg(self, left: float, top: float) -> str:
        """Returns the chart as an SVG group.

        `left`, `top`: its position in the picture, in pixels.
        """
        most = max((y for line in self.lines for _, y in line.points), default=0.0)
        step = _step(most)
        num_steps = max(math.ceil(most / step - 1e-9), 1)
        low, high = self.x_ticks[0][0], self.x_ticks[-1][0]
        width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

        def place(x: float, y: float) -> tuple[float, float]:
            across = (x - low) / max(high - low, 1e-12)
            return _LEFT + across * width, _TOP + height - y / (step * num_steps) * height

        parts = [f'<g transform="translate({left} {top})">']
        parts.append(f'<text class="title" x="{_LEFT}" y="20">{escape(self.title)}</text>')
        for number in range(num_steps + 1):
            x, y = place(low, number * step)
            parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}h{width}"/>')
            text = escape(self.y_text(number * step))
            parts.append(f'<text class="y" x="{x - 6:.1f}" y="{y + 4:.1f}">{text}</text>')
        for value, name in self.x_ticks:
            x, y = place(value, 0)
            parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}v4"/>')
            parts.append(f'<text class="x" x="{x:.1f}" y="{y + 17:.1f}">{escape(name)}</text>')
        parts += [self._path(line, place) for line in self.lines if line.points]
        middle = _LEFT + width / 2
        parts.append(f'<text class="x" x="{middle}" y="{HEIGHT - 6}">{escape(self.x_name)}</text>')
        return "\n".join([*parts, "</g>"])

    @staticmethod
    def _path(line: Line, place: Callable[[float, float], tuple[float, float]]) -> str:
        steps = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line.points)
        kind = "line behind" if line.is_dashed else "line"
        return (
            f'<polyline class="{kind}" stroke="{line.colour}" points="{steps}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )


def _step(most: float) -> float:
    """Returns the distance of grid lines: 1, 2 or 5 times a power of ten, for about four lines."""
    if most <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(most / 4))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= most / 4)


def even_ticks(last: float, text: Callable[[float], str]) -> list[tuple[float, str]]:
    """Returns ticks from 0 to `last` at round numbers. An end that is not round has no label."""
    step = _step(last)
    ticks = [(n * step, text(n * step)) for n in range(math.floor(last / step + 1e-9) + 1)]
    return ticks if ticks[-1][0] >= last > 0 else [*ticks, (last or 1.0, "")]


def legend(entries: Iterable[tuple[str, str]], left: float, top: float) -> str:
    """Returns names with their colours as an SVG row."""
    parts = []
    for name, colour in entries:
        parts.append(f'<path d="M{left} {top - 4}h22" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 28}" y="{top}">{escape(name)}</text>')
        left += 52 + 7.5 * len(name)
    return "\n".join(parts)
