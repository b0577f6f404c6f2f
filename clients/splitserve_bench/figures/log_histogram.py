"""Histogram with classes of equal ratio, confidence intervals by bootstrap, and parts of a run.

Memory is bounded. Any percentile is right within 0.1 % of its value, over 1 µs to a day, for any
number of values; the mean and the extremes are exact (DDSketch: Masson, Rim, Lee, VLDB 2019). Own
code of a few lines, since the intervals need the counts themselves, to weigh parts of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

RELATIVE_ERROR = 0.001
_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = math.log(_GROWTH)
# Values outside this range fall into the first or last class.
_SHORTEST_S = 1e-6
_LONGEST_S = 86_400.0


def class_of(value: float) -> int:
    """Returns the class of `value`; `value_of` the class is within RELATIVE_ERROR of `value`."""
    return math.ceil(math.log(min(max(value, _SHORTEST_S), _LONGEST_S)) / _LOG_GROWTH)


def value_of(number: int) -> float:
    """Returns the value that represents a class."""
    return float(2 * _GROWTH**number / (_GROWTH + 1))


@dataclass(slots=True)
class LogHistogram:
    """Histogram of values from 0 on, each with a weight (1 counts as one value)."""

    counts: dict[int, float] = field(default_factory=dict)
    num_values: float = 0.0
    total: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    def record(self, value: float, weight: float = 1.0) -> None:
        """Adds a value; a negative value (clocks can cause one) counts as 0."""
        value = max(value, 0.0)
        number = class_of(value)
        self.counts[number] = self.counts.get(number, 0.0) + weight
        self.num_values += weight
        self.total += value * weight
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def merge(self, other: LogHistogram) -> None:
        """Adds the values of `other`."""
        for number, count in other.counts.items():
            self.counts[number] = self.counts.get(number, 0.0) + count
        self.num_values += other.num_values
        self.total += other.total
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        """Mean of all values. Raises ZeroDivisionError without values."""
        return self.total / self.num_values

    def quantile(self, ratio: float) -> float:
        """Returns the smallest value with at least the share `ratio` of all values at or below it.

        Needs at least one value.
        """
        wanted, found = ratio * self.num_values, 0.0
        for number in sorted(self.counts):
            found += self.counts[number]
            # Tolerance for rounding errors of summed weights.
            if found >= wanted * (1 - 1e-12):
                return self.within(value_of(number))
        return self.largest

    def within(self, value: float) -> float:
        """Clamps `value` to the extremes, which are exact."""
        return min(max(value, self.smallest), self.largest)

    def as_json(self) -> dict[str, Any]:
        """Returns the histogram as JSON values for a report."""
        return {
            "counts": [[number, self.counts[number]] for number in sorted(self.counts)],
            "total": self.total,
            "smallest": self.smallest,
            "largest": self.largest,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LogHistogram:
        """Restores a histogram from `as_json`. Raises ValueError, LookupError or TypeError."""
        counts = {int(number): float(count) for number, count in content["counts"]}
        return cls(
            counts,
            sum(counts.values()),
            float(content["total"]),
            float(content["smallest"]),
            float(content["largest"]),
        )


def merged(histograms: Iterable[LogHistogram]) -> LogHistogram:
    """Returns one histogram with the values of all."""
    result = LogHistogram()
    for histogram in histograms:
        result.merge(histogram)
    return result


def not_empty(histograms: Iterable[LogHistogram]) -> Sequence[LogHistogram]:
    """Returns the histograms that have values."""
    return [histogram for histogram in histograms if histogram.num_values]


# -- Confidence intervals of 95 %, by a bootstrap over parts of the run ----------------------------
#
# Tokens of a request depend on each other, and so do requests that were queued together: an
# interval for independent draws would be far too narrow. So a run is divided into 32 to 63 parts
# of consecutive requests. Each resample draws as many whole parts, with replacement, and computes
# the figure; a thousand resamples show its spread (Künsch 1989). With few parts this interval is
# too narrow, so its ends are moved out, as Student's t is wider than the normal distribution
# (Hesterberg 2015, "expanded percentile interval"). No interval is given for fewer than ten parts,
# for a percentile with fewer than five values beyond it, or if these belong to fewer than four
# parts: a bootstrap cannot know a tail that was not observed.

NUM_RESAMPLES = 1000
CONFIDENCE = 0.95
_FEWEST_BEYOND = 5
_FEWEST_PARTS = 10
# Effective number of parts, by Kish's formula for unequal weights: a part may have most of a tail.
_FEWEST_PARTS_BEYOND = 4.0
_MEAN = 0.5  # the mean is known if the median is
_SEED = 20231116  # fixed: equal measurements give equal reports

Figures = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Figure with its 95 % confidence interval; bounds are None if unknown."""

    value: float
    low: float | None = None
    high: float | None = None


def estimate(parts: Sequence[LogHistogram], quantiles: Sequence[float]) -> list[Estimate]:
    """Returns estimates of the mean, then of each quantile (0 to 1); empty without values."""
    parts = not_empty(parts)
    if not parts:
        return []
    whole = merged(parts)
    values = [whole.mean, *map(whole.quantile, quantiles)]
    moved = resampled(parts, quantiles, _SEED)
    known = [_is_known(parts, ratio) for ratio in (_MEAN, *quantiles)]
    return _with_intervals(values, moved, known, len(parts))


def estimate_ratios(
    parts: Sequence[LogHistogram],
    others: Sequence[LogHistogram],
    quantiles: Sequence[float],
) -> list[Estimate]:
    """Returns the ratios of figures, `others` to `parts`, with intervals.

    Order as of `estimate`.
    """
    parts, others = not_empty(parts), not_empty(others)
    before, after = estimate(parts, quantiles), estimate(others, quantiles)
    if not before or not after:
        return []
    ratios = [_ratio(b.value, a.value) for a, b in zip(before, after, strict=True)]
    moved_before = resampled(parts, quantiles, _SEED)
    moved = resampled(others, quantiles, _SEED + 1) / np.maximum(moved_before, 1e-12)
    known = [_is_known(parts, ratio) and _is_known(others, ratio) for ratio in (_MEAN, *quantiles)]
    return _with_intervals(ratios, moved, known, min(len(parts), len(others)))


def _is_known(parts: Sequence[LogHistogram], ratio: float) -> bool:
    """Returns whether enough values, of enough parts, lie on both sides of a quantile."""
    num_beyond = sum(part.num_values for part in parts) * min(ratio, 1 - ratio)
    if len(parts) < _FEWEST_PARTS or num_beyond < _FEWEST_BEYOND - 1e-9:
        return False
    edge = class_of(merged(parts).quantile(ratio))
    beyond = [sum(n for number, n in part.counts.items() if number >= edge) for part in parts]
    squares = sum(number**2 for number in beyond)
    return sum(beyond) ** 2 >= _FEWEST_PARTS_BEYOND * squares


def _with_intervals(
    values: Sequence[float], moved: Figures, are_known: Sequence[bool], num_parts: int
) -> list[Estimate]:
    return [
        Estimate(value, *_interval(moved[:, column], num_parts)) if is_known else Estimate(value)
        for column, (value, is_known) in enumerate(zip(values, are_known, strict=True))
    ]


def resampled(parts: Sequence[LogHistogram], quantiles: Sequence[float], seed: int) -> Figures:
    """Returns means and quantiles of resamples of parts: [NUM_RESAMPLES, 1 + quantiles]."""
    numbers = sorted({number for part in parts for number in part.counts})
    column_of = {number: column for column, number in enumerate(numbers)}
    counts = np.zeros((len(parts), len(numbers)))
    for row, part in enumerate(parts):
        for number, count in part.counts.items():
            counts[row, column_of[number]] = count
    totals = np.array([part.total for part in parts])
    whole = merged(parts)
    values = np.array([whole.within(value_of(number)) for number in numbers])
    rng = np.random.default_rng(seed)
    even = np.full(len(parts), 1 / len(parts))
    drawn = rng.multinomial(len(parts), even, size=NUM_RESAMPLES).astype(np.float64)
    sums = np.cumsum(drawn @ counts, axis=1)
    figures = np.empty((NUM_RESAMPLES, 1 + len(quantiles)))
    figures[:, 0] = (drawn @ totals) / sums[:, -1]
    for column, ratio in enumerate(quantiles, start=1):
        wanted = ratio * sums[:, -1:] * (1 - 1e-12)
        figures[:, column] = values[np.argmax(sums >= wanted, axis=1)]
    return figures


def _interval(figures: Figures, num_parts: int) -> tuple[float, float]:
    outside = _outside(num_parts)
    low, high = np.quantile(figures, [outside, 1 - outside])
    return float(low), float(high)


def _outside(num_parts: int) -> float:
    """Returns the share of resamples beyond each end; smaller for fewer parts. Needs two parts."""
    normal = NormalDist()
    z, freedom = normal.inv_cdf((1 + CONFIDENCE) / 2), num_parts - 1
    # Student's t by the first terms of its expansion: within 1 % from ten parts on.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-math.sqrt(num_parts / freedom) * t)


def _ratio(value: float, other: float) -> float:
    return value / max(other, 1e-12)


# -- Parts of a run: consecutive requests, with a histogram per metric -----------------------------

_MOST_PARTS = 64


class Parts:
    """At most 63 parts of equal size; merges pairs of parts where there would be more."""

    def __init__(self, metrics: Iterable[str]) -> None:
        self._metrics = tuple(metrics)
        self._size = 1
        self._num_in_last = 0
        self._parts: list[dict[str, LogHistogram]] = [self._new()]

    def _new(self) -> dict[str, LogHistogram]:
        return {metric: LogHistogram() for metric in self._metrics}

    def add(self, values: Iterable[tuple[str, float, float]]) -> None:
        """Adds the values of one request: metric, value, weight."""
        if self._num_in_last == self._size:
            self._parts.append(self._new())
            self._num_in_last = 0
            if len(self._parts) == _MOST_PARTS:
                self._halve()
        self._num_in_last += 1
        last = self._parts[-1]
        for metric, value, weight in values:
            last[metric].record(value, weight)

    def _halve(self) -> None:
        """Merges pairs of parts. The last part is empty, so the last pair is one part."""
        for before, after in zip(self._parts[::2], self._parts[1::2], strict=True):
            for metric, histogram in before.items():
                histogram.merge(after[metric])
        self._parts = self._parts[::2]
        self._num_in_last = self._size
        self._size *= 2

    def of(self, metric: str) -> list[LogHistogram]:
        """Returns the histograms of `metric`, one per part, in order."""
        return [part[metric] for part in self._parts]
