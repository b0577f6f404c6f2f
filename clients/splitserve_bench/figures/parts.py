"""The parts of a run: consecutive requests, in histograms of each metric."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve_bench.figures.log_histogram import LogHistogram

_MOST_PARTS = 64


class Parts:
    """Keeps at most 63 parts of equal size: where there would be more, each two become one."""

    def __init__(self, metrics: Iterable[str]) -> None:
        self._metrics = tuple(metrics)
        self._size = 1
        self._num_in_last = 0
        self._parts: list[dict[str, LogHistogram]] = [self._new()]

    def _new(self) -> dict[str, LogHistogram]:
        return {metric: LogHistogram() for metric in self._metrics}

    def add(self, values: Iterable[tuple[str, float, float]]) -> None:
        """One request's values: metric, value, weight."""
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
        """The last part is empty, and stays alone with the one before it."""
        for before, after in zip(self._parts[::2], self._parts[1::2], strict=True):
            for metric, histogram in before.items():
                histogram.merge(after[metric])
        self._parts = self._parts[::2]
        self._num_in_last = self._size
        self._size *= 2

    def of(self, metric: str) -> list[LogHistogram]:
        """That metric's histograms, in order."""
        return [part[metric] for part in self._parts]
