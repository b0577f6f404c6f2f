"""A chart with lines, as SVG: two axes, lines with names, nothing that has to be loaded.

Own code, since what draws charts is either as large as matplotlib or brings scripts of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 470, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 26, 34, 40
# Told apart by those who see colours otherwise, too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right. `is_dashed`: it stands behind the others."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """`x_ticks`: places with their texts. Values of y begin at 0; `y_text` writes one."""

    title: str
    x_name: str
    x_ticks: Sequence[tuple[float, str]]
    y_text: Callable[[float], str]
    lines: Sequence[Line] = field(default_factory=tuple)

    def svg(self, left: float, top: float) -> str:
        """Where it stands in a picture."""
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
    """Between lines of the grid: 1, 2 or 5 times a power of ten, four or so of them."""
    if most <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(most / 4))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= most / 4)


def even_ticks(last: float, text: Callable[[float], str]) -> list[tuple[float, str]]:
    """From 0 to `last`, at round numbers; that at the end has no text unless it is round, too."""
    step = _step(last)
    ticks = [(n * step, text(n * step)) for n in range(math.floor(last / step + 1e-9) + 1)]
    return ticks if ticks[-1][0] >= last > 0 else [*ticks, (last or 1.0, "")]


def legend(entries: Iterable[tuple[str, str]], left: float, top: float) -> str:
    """Names with their colours, in a row."""
    parts = []
    for name, colour in entries:
        parts.append(f'<path d="M{left} {top - 4}h22" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 28}" y="{top}">{escape(name)}</text>')
        left += 52 + 7.5 * len(name)
    return "\n".join(parts)
