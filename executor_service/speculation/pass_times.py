"""How long a pass takes, by how much is in it: a line through what was measured lately."""

from __future__ import annotations

# Of older measurements, how much counts when another one comes.
_KEPT = 0.95
# What is believed of a line before two sizes were seen: each unit adds so much of the whole.
_ASSUMED_SLOPE_RATIO = 0.1
_ASSUMED_WEIGHT = 0.1
# What is not measured any more is forgotten, until so little is left: the machine may have changed.
_KEPT_UNSEEN, _LEAST_WEIGHT = 0.998, 0.05


class PassTimes:
    """Seconds of a pass of n units, as a + b n with a, b >= 0; exponentially forgetting."""

    def __init__(self) -> None:
        # Sums over measurements: 1, n, n^2, y, n y.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured lately."""
        return self._sums[0] >= _LEAST_WEIGHT

    def add(self, size: int, seconds: float) -> None:
        """A pass of `size` units took so long."""
        weight, sizes, squares, times, products = self._sums
        self._sums = (
            _KEPT * weight + 1,
            _KEPT * sizes + size,
            _KEPT * squares + size * size,
            _KEPT * times + seconds,
            _KEPT * products + size * seconds,
        )

    def fade(self) -> None:
        """There was no such pass."""
        weight, sizes, squares, times, products = (_KEPT_UNSEEN * each for each in self._sums)
        self._sums = (weight, sizes, squares, times, products)

    @property
    def line(self) -> tuple[float, float]:
        """(a, b); zeros before anything is known."""
        weight, size, square, time, product = self._sums
        if not weight:
            return 0.0, 0.0
        mean_size, mean_time = size / weight, time / weight
        spread = max(square / weight - mean_size**2, 0.0)
        together = product / weight - mean_size * mean_time
        # A guess with little weight, where all passes were of one size.
        assumed = _ASSUMED_SLOPE_RATIO * mean_time / max(mean_size, 1.0)
        slope = (together + _ASSUMED_WEIGHT * assumed) / (spread + _ASSUMED_WEIGHT)
        slope = min(max(slope, 0.0), mean_time / max(mean_size, 1.0))
        return mean_time - slope * mean_size, slope

    def of(self, size: float) -> float:
        """Seconds that a pass of `size` is expected to take."""
        a, b = self.line
        return a + b * size
