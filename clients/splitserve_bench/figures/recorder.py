"""Recorder of one target's requests over all rounds: latencies, SLO, timeline, counts, rates."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from splitserve_bench.figures.log_histogram import LogHistogram, Parts
from splitserve_bench.load import LoadAbandoned, Outcome

# -- Latencies of one answer -----------------------------------------------------------------------

# Metrics in the order of reports, defined in docs/benchmarking.md.
METRICS = ("ttft", "tpot", "itl", "gap", "e2e", "send_delay")


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Latencies of one request, in seconds.

    `gaps`: times between arrivals, each with the number of tokens of the later arrival.
    """

    ttft: float
    e2e: float
    send_delay: float
    tpot: float | None
    gaps: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, outcome: Outcome) -> RequestFigures:
        """Computes the latencies of a complete answer."""
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
        """Returns metric, value and weight of each latency.

        The tokens of a gap share its time equally.
        """
        found = [("ttft", self.ttft, 1.0), ("e2e", self.e2e, 1.0)]
        found.append(("send_delay", self.send_delay, 1.0))
        if self.tpot is not None:
            found.append(("tpot", self.tpot, 1.0))
        for gap, num_tokens in self.gaps:
            found.append(("gap", gap, 1.0))
            found.append(("itl", gap / num_tokens, num_tokens))
        return found

    def worst(self, metric: str) -> float:
        """Returns the largest value of `metric` in the request; 0 without one."""
        return max((value for name, value, _ in self.values() if name == metric), default=0.0)


def _tokens_after_gaps(outcome: Outcome) -> list[float]:
    """Returns the number of tokens after each gap; an equal share of the rest if not counted."""
    counts = outcome.num_tokens[1:]
    known = [float(number) for number in counts if number is not None]
    if len(known) == len(counts):
        return known
    num_rest = outcome.num_output_tokens - (outcome.num_tokens[0] or 1)
    return [max(num_rest / len(counts), 1.0)] * len(counts)


# -- Service level objective of a request ----------------------------------------------------------

_ALLOWED = ("ttft", "tpot", "itl", "gap", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on metrics, in seconds, that every value of a good request meets."""

    limits_s: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses `ttft=200ms,itl=50ms`. Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, separator, value = part.strip().partition("=")
            if name not in _ALLOWED or not separator or name in limits:
                raise ValueError(
                    f"{part.strip()!r} is not a limit; allowed: METRIC=TIME with each of"
                    f" {', '.join(_ALLOWED)} once"
                )
            limits[name] = parse_seconds(value)
        return cls(tuple(limits.items()))

    def is_met(self, figures: RequestFigures) -> bool:
        """Returns whether the request exceeds no limit."""
        return all(figures.worst(name) <= limit_s for name, limit_s in self.limits_s)


# -- Timeline in bounded memory: spans become longer as the run does -------------------------------

_MOST_SPANS = 512
_FIRST_WIDTH_S = 0.25


@dataclass(slots=True)
class Span:
    """Counts of a span of time. `open_s`, `waiting_s`: summed over requests, within the span.

    A request waits (`waiting_s`) until its first token.
    """

    num_sent: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_tokens: float = 0
    open_s: float = 0.0
    waiting_s: float = 0.0

    def absorb(self, other: Span) -> None:
        """Adds the counts of `other`."""
        self.num_sent += other.num_sent
        self.num_completed += other.num_completed
        self.num_failed += other.num_failed
        self.num_tokens += other.num_tokens
        self.open_s += other.open_s
        self.waiting_s += other.waiting_s


class Timeline:
    """Timeline of spans of equal width, from `begin_s` on. Requests may come in any order."""

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._width_s = _FIRST_WIDTH_S
        self._spans: list[Span] = []

    def add(self, outcome: Outcome) -> None:
        """Adds a request, from its sending to its end."""
        sent_s, ended_s = outcome.sent_s - self._begin_s, outcome.ended_s - self._begin_s
        # First, since it may change the width, which must stay the same for the rest.
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
        """Returns the spans that overlap a time, with the overlap in seconds."""
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
        """Returns columns for a report: counts, and mean numbers of open and waiting requests."""
        counts = ("num_sent", "num_completed", "num_failed", "num_tokens")
        columns: dict[str, list[float]] = {
            name: [getattr(span, name) for span in self._spans] for name in counts
        }
        columns["num_open"] = [span.open_s / self._width_s for span in self._spans]
        columns["num_waiting"] = [span.waiting_s / self._width_s for span in self._spans]
        return {"width_s": self._width_s, **columns}


# -- Times in human-readable form ------------------------------------------------------------------

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|)")


def parse_seconds(text: str) -> float:
    """Parses a time such as `200ms`, `1.5s`, `2m` or `3`. Raises ValueError."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time; allowed: a number with us, ms, s, m or h")
    return float(found[1]) * _UNITS_S[found[2]]


def seconds_text(value_s: float | None) -> str:
    """Returns a time with three digits and a fitting unit; "-" if unknown."""
    if value_s is None or not math.isfinite(value_s):
        return "-"
    value_s = float(f"{value_s:.3g}")
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value_s >= size:
            return f"{_digits(value_s / size)} {unit}"
    return f"{_digits(value_s * 1e6)} us"


def _digits(value: float) -> str:
    value = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(value))) if value >= 1 else 2
    return f"{value:.{decimals}f}"


# -- Recorder --------------------------------------------------------------------------------------

# Limit on kinds of errors, as servers can add kinds.
_MOST_KINDS = 32
_OTHERS = "others"
_MOST_MESSAGE = 300


@dataclass(slots=True)
class Counts:
    """Counts of measured requests and their tokens. `num_good`: complete and within the SLO.

    `num_held`: requests that waited because the maximum number was open. `num_interrupted`:
    requests without an end when the run was stopped; no other count includes them.
    """

    num_completed: int = 0
    num_failed: int = 0
    num_good: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_wanted_tokens: int = 0
    num_preemptions: int = 0
    num_warm_up: int = 0
    num_held: int = 0
    num_interrupted: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """Rates of one round. `duration_s`: from its first measured due time to its last end."""

    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    good_requests_per_s: float


@dataclass(slots=True)
class _RoundSoFar:
    begin_s: float
    first_due_s: float | None = None
    last_end_s: float = 0.0
    num_completed: int = 0
    num_good: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class Recorder:
    """Watcher that measures one target.

    Excludes requests due in the first `warm_up_s` of a round.
    """

    slo: Slo
    warm_up_s: float
    progress: Callable[[int], None] = lambda _num_tokens: None
    warn: Callable[[LoadAbandoned], None] = lambda _given_up: None
    counts: Counts = field(default_factory=Counts)
    errors: Counter[str] = field(default_factory=Counter)
    # The first message of each kind.
    messages: dict[str, str] = field(default_factory=dict)
    parts: Parts = field(default_factory=lambda: Parts(METRICS))
    rounds: list[Round] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    # Busy ratio of each generator, sampled every second.
    busy: LogHistogram = field(default_factory=LogHistogram)
    # Rounds with an incomplete load, by number.
    given_up: dict[int, LoadAbandoned] = field(default_factory=dict)
    _round: _RoundSoFar = field(default_factory=lambda: _RoundSoFar(0.0))

    def begin_round(self, now_s: float) -> None:
        """Starts a round, which following requests belong to."""
        self._round = _RoundSoFar(now_s)
        self.timelines.append(Timeline(now_s))

    def end_round(self) -> None:
        """Ends a round, after all of its requests; stores its rates."""
        so_far = self._round
        if so_far.first_due_s is None:
            return
        seconds = max(so_far.last_end_s - so_far.first_due_s, 1e-9)
        self.rounds.append(
            Round(
                seconds,
                so_far.num_completed / seconds,
                so_far.num_output_tokens / seconds,
                so_far.num_prompt_tokens / seconds,
                so_far.num_good / seconds,
            )
        )

    # -- events of a load --------------------------------------------------------------------------

    def worked(self, busy_ratio: float) -> None:
        self.busy.record(busy_ratio)

    def gave_up(self, given_up: LoadAbandoned) -> None:
        number = len(self.timelines) - 1
        other = self.given_up.get(number)
        if other is None:
            self.given_up[number] = given_up
            self.warn(given_up)
            return
        # Several processes share the load: merges their reports.
        self.given_up[number] = LoadAbandoned(
            max(other.behind_s, given_up.behind_s),
            max(other.after_s, given_up.after_s),
            other.num_begun + given_up.num_begun,
        )

    def ended(self, outcome: Outcome) -> None:
        self.timelines[-1].add(outcome)
        if outcome.is_interrupted:
            self.counts.num_interrupted += 1
            return
        has_failed = outcome.failed is not None
        self.progress(outcome.num_output_tokens)
        if outcome.due_s - self._round.begin_s < self.warm_up_s:
            self.counts.num_warm_up += 1
            return
        self.counts.num_held += outcome.held_s > 0
        so_far = self._round
        first_due_s = outcome.due_s if so_far.first_due_s is None else so_far.first_due_s
        so_far.first_due_s = min(first_due_s, outcome.due_s)
        so_far.last_end_s = max(so_far.last_end_s, outcome.ended_s)
        if has_failed:
            self._count_failed(outcome)
        else:
            self._count_completed(outcome)

    def _count_failed(self, outcome: Outcome) -> None:
        self.counts.num_failed += 1
        kind = outcome.failed or _OTHERS
        if kind not in self.errors and len(self.errors) >= _MOST_KINDS:
            kind = _OTHERS
        self.errors[kind] += 1
        self.messages.setdefault(kind, outcome.message[:_MOST_MESSAGE])

    def _count_completed(self, outcome: Outcome) -> None:
        figures = RequestFigures.of(outcome)
        self.parts.add(figures.values())
        answered, counts, so_far = outcome.answered, self.counts, self._round
        is_good = self.slo.is_met(figures)
        counts.num_completed += 1
        counts.num_good += is_good
        counts.num_prompt_tokens += answered.num_prompt_tokens or 0
        counts.num_cached_tokens += answered.num_cached_tokens or 0
        counts.num_preemptions += answered.num_preemptions or 0
        counts.num_output_tokens += outcome.num_output_tokens
        counts.num_wanted_tokens += outcome.num_wanted_tokens
        so_far.num_completed += 1
        so_far.num_good += is_good
        so_far.num_output_tokens += outcome.num_output_tokens
        so_far.num_prompt_tokens += answered.num_prompt_tokens or 0
