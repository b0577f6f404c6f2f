"""What went on at each time, in bounded memory: spans become longer as the run does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitserve_bench.load.outcome import Outcome

_MOST_SPANS = 512
_FIRST_WIDTH_S = 0.25


@dataclass(slots=True)
class Span:
    """`open_s` and `waiting_s` (for their first token): of all requests together, in that span."""

    num_sent: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_tokens: float = 0
    open_s: float = 0.0
    waiting_s: float = 0.0

    def absorb(self, other: Span) -> None:
        """Becomes both."""
        self.num_sent += other.num_sent
        self.num_completed += other.num_completed
        self.num_failed += other.num_failed
        self.num_tokens += other.num_tokens
        self.open_s += other.open_s
        self.waiting_s += other.waiting_s


class Timeline:
    """Spans of equal width, from `begin_s` on. Requests may come in any order."""

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._width_s = _FIRST_WIDTH_S
        self._spans: list[Span] = []

    def add(self, outcome: Outcome) -> None:
        """One request, from when it was sent until nothing more came."""
        sent_s, ended_s = outcome.sent_s - self._begin_s, outcome.ended_s - self._begin_s
        # First, so that the width stays what it is for all that follows.
        last = self._at(ended_s)
        if not outcome.is_interrupted:
            last.num_failed += outcome.failed is not None
            last.num_completed += outcome.failed is None
        self._at(sent_s).num_sent += 1
        arrivals = zip(outcome.arrivals_s, outcome.tokens_of_arrivals, strict=True)
        for arrival_s, num_tokens in arrivals:
            self._at(arrival_s - self._begin_s).num_tokens += num_tokens
        first_s = outcome.arrivals_s[0] - self._begin_s if outcome.arrivals_s else ended_s
        for span, seconds in self._within(sent_s, ended_s):
            span.open_s += seconds
        for span, seconds in self._within(sent_s, first_s):
            span.waiting_s += seconds

    def _within(self, from_s: float, to_s: float) -> list[tuple[Span, float]]:
        """The spans that a time touches, with how much of each."""
        found, width_s = [], self._width_s
        for number in range(int(max(from_s, 0.0) / width_s), int(max(to_s, 0.0) / width_s) + 1):
            begin_s = number * width_s
            found.append((self._spans[number], min(to_s, begin_s + width_s) - max(from_s, begin_s)))
        return found

    def _at(self, at_s: float) -> Span:
        while (number := int(max(at_s, 0.0) / self._width_s)) >= _MOST_SPANS:
            self._halve()
        while len(self._spans) <= number:
            self._spans.append(Span())
        return self._spans[number]

    def _halve(self) -> None:
        self._width_s *= 2
        for index in range(0, len(self._spans) - 1, 2):
            self._spans[index].absorb(self._spans[index + 1])
        self._spans = self._spans[::2]

    def as_json(self) -> dict[str, Any]:
        """Columns, for a report: counts, and how many requests were open on average."""
        counts = ("num_sent", "num_completed", "num_failed", "num_tokens")
        columns: dict[str, list[float]] = {
            name: [getattr(span, name) for span in self._spans] for name in counts
        }
        columns["num_open"] = [span.open_s / self._width_s for span in self._spans]
        columns["num_waiting"] = [span.waiting_s / self._width_s for span in self._spans]
        return {"width_s": self._width_s, **columns}
