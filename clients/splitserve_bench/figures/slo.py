"""What a request must keep to be good."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve_bench.figures.quantities import parse_seconds
from splitserve_bench.figures.request_figures import RequestFigures

_ALLOWED = ("ttft", "tpot", "itl", "gap", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """The most that each of these metrics may be, in seconds, all through a request."""

    limits_s: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Of `ttft=200ms,itl=50ms`. Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, separator, value = part.strip().partition("=")
            if name not in _ALLOWED or not separator or name in limits:
                raise ValueError(
                    f"{part.strip()!r} is no limit; allowed: METRIC=TIME with each of"
                    f" {', '.join(_ALLOWED)} once"
                )
            limits[name] = parse_seconds(value)
        return cls(tuple(limits.items()))

    def is_met(self, figures: RequestFigures) -> bool:
        """Whether no limit is passed."""
        return all(figures.worst(name) <= limit_s for name, limit_s in self.limits_s)
