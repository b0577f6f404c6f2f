"""What went on at each time, in bounded memory: spans become longer as the run does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_MOST_SPANS = 512
_FIRST_WIDTH_S = 0.25


@dataclass(slots=True)
class Span:
    """`num_open` and `num_waiting` (for their first token) are the most at any time in it."""

    num_sent: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_open: int = 0
    num_waiting: int = 0

    def absorb(self, other: Span) -> None:
        """Becomes both."""
        self.num_sent += other.num_sent
        self.num_completed += other.num_completed
        self.num_failed += other.num_failed
        self.num_tokens += other.num_tokens
        self.num_open = max(self.num_open, other.num_open)
        self.num_waiting = max(self.num_waiting, other.num_waiting)


class Timeline:
    """Spans of equal width, from the beginning of a run on; times are since that."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._spans: list[Span] = []
        self._num_open = 0
        self._num_waiting = 0

    def sent(self, at_s: float) -> None:
        """A request has been sent."""
        span = self._at(at_s)
        self._num_open += 1
        self._num_waiting += 1
        span.num_sent += 1
        span.num_open = max(span.num_open, self._num_open)
        span.num_waiting = max(span.num_waiting, self._num_waiting)

    def came(self, at_s: float, num_tokens: int, is_first: bool) -> None:
        """Tokens of a request came."""
        span = self._at(at_s)
        span.num_tokens += num_tokens
        self._num_waiting -= is_first

    def ended(self, at_s: float, has_failed: bool, was_waiting: bool) -> None:
        """A request has ended. `was_waiting`: without a token."""
        span = self._at(at_s)
        span.num_failed += has_failed
        span.num_completed += not has_failed
        self._num_open -= 1
        self._num_waiting -= was_waiting

    def _at(self, at_s: float) -> Span:
        while (number := int(max(at_s, 0.0) / self._width_s)) >= _MOST_SPANS:
            self._halve()
        while len(self._spans) <= number:
            # What is open now was so all the time since the last span.
            span = Span(num_open=self._num_open, num_waiting=self._num_waiting)
            self._spans.append(span)
        return self._spans[number]

    def _halve(self) -> None:
        self._width_s *= 2
        for index in range(0, len(self._spans) - 1, 2):
            self._spans[index].absorb(self._spans[index + 1])
        self._spans = self._spans[::2]

    def as_json(self) -> dict[str, Any]:
        """Columns, for a report."""
        rows = [asdict(span) for span in self._spans]
        columns = {name: [row[name] for row in rows] for name in asdict(Span())}
        return {"width_s": self._width_s, **columns}
