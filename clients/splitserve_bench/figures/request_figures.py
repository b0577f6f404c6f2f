"""What one answer says of latency."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from splitserve_bench.load.outcome import Outcome

# All that is measured, in the order of reports. docs/benchmarking.md says what each is.
METRICS = ("ttft", "tpot", "itl", "gap", "e2e", "send_delay")


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Seconds. `gaps`: between arrivals, each with how many tokens it brought."""

    ttft: float
    e2e: float
    send_delay: float
    tpot: float | None
    gaps: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, outcome: Outcome) -> RequestFigures:
        """Of an answer that is complete."""
        arrivals = outcome.arrivals_s
        num_tokens = outcome.num_output_tokens
        spread_s = arrivals[-1] - arrivals[0]
        return cls(
            ttft=arrivals[0] - outcome.due_s,
            e2e=outcome.ended_s - outcome.due_s,
            send_delay=outcome.sent_s - outcome.due_s - outcome.held_s,
            tpot=spread_s / (num_tokens - 1) if num_tokens > 1 else None,
            gaps=tuple(
                (after - before, number)
                for (before, after), number in zip(
                    pairwise(arrivals), _tokens_after_gaps(outcome), strict=True
                )
            ),
        )

    def values(self) -> list[tuple[str, float, float]]:
        """Each metric's values with their weights. A gap's tokens share it."""
        found = [("ttft", self.ttft, 1.0), ("e2e", self.e2e, 1.0)]
        found.append(("send_delay", self.send_delay, 1.0))
        if self.tpot is not None:
            found.append(("tpot", self.tpot, 1.0))
        for gap, num_tokens in self.gaps:
            found.append(("gap", gap, 1.0))
            found.append(("itl", gap / num_tokens, num_tokens))
        return found

    def worst(self, metric: str) -> float:
        """The largest that the request has of it; 0 where it has none."""
        return max((value for name, value, _ in self.values() if name == metric), default=0.0)


def _tokens_after_gaps(outcome: Outcome) -> list[float]:
    """As they were counted; where they were not, each arrival brought as many as the others."""
    counts = outcome.num_tokens[1:]
    known = [float(number) for number in counts if number is not None]
    if len(known) == len(counts):
        return known
    num_rest = outcome.num_output_tokens - (outcome.num_tokens[0] or 1)
    return [max(num_rest / len(counts), 1.0)] * len(counts)
