"""Random numbers as a flag says them: `512`, `uniform:64:1024`, `lognormal:512:1` and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

Rng = np.random.Generator

FORMS = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or exponential:MEAN"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Draws numbers; `text` is what it was parsed from."""

    text: str
    draw: Callable[[Rng], float]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Raises ValueError, which says what is allowed."""
        name, *rest = text.split(":")
        try:
            numbers = [float(number) for number in (rest or [name])]
        except ValueError:
            numbers = [math.nan]
        kind = "constant" if not rest else name
        num_wanted = _NUM_NUMBERS.get(kind)
        if len(numbers) != num_wanted or not all(0 <= number < math.inf for number in numbers):
            raise ValueError(f"{text!r} is no distribution of numbers from 0 on; allowed: {FORMS}")
        if kind == "uniform" and numbers[0] > numbers[1]:
            raise ValueError(f"{text!r} ends before it begins; allowed: LOW <= HIGH")
        if kind == "lognormal" and numbers[0] == 0:
            raise ValueError(f"{text!r} has the median 0; allowed: above 0")
        return cls(text, _DRAWS[kind](*numbers))

    def draw_count(self, rng: Rng, smallest: int = 1, largest: int | None = None) -> int:
        """A whole number within these."""
        number = round(min(self.draw(rng), 2.0**53))
        return max(number if largest is None else min(number, largest), smallest)


def _constant(value: float) -> Callable[[Rng], float]:
    return lambda _rng: value


def _uniform(low: float, high: float) -> Callable[[Rng], float]:
    return lambda rng: float(rng.uniform(low, high))


def _lognormal(median: float, sigma: float) -> Callable[[Rng], float]:
    return lambda rng: float(rng.lognormal(math.log(median), sigma))


def _exponential(mean: float) -> Callable[[Rng], float]:
    return lambda rng: float(rng.exponential(mean))


_DRAWS: Mapping[str, Callable[..., Callable[[Rng], float]]] = MappingProxyType(
    {
        "constant": _constant,
        "uniform": _uniform,
        "lognormal": _lognormal,
        "exponential": _exponential,
    }
)
_NUM_NUMBERS = MappingProxyType({"constant": 1, "uniform": 2, "lognormal": 2, "exponential": 1})
