"""Takes what happens with one target, over all rounds, and keeps what reports need of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve_bench.figures.log_histogram import LogHistogram
from splitserve_bench.figures.parts import Parts
from splitserve_bench.figures.request_figures import METRICS, RequestFigures
from splitserve_bench.figures.slo import Slo
from splitserve_bench.figures.timeline import Timeline
from splitserve_bench.load.outcome import Outcome
from splitserve_bench.load.watcher import GivenUp

# Kinds come from servers, too.
_MOST_KINDS = 32
_OTHERS = "others"
_MOST_MESSAGE = 300


@dataclass(slots=True)
class Counts:
    """Of requests that were measured, and their tokens. `num_good`: complete and within the SLO.

    `num_held`: those that waited since as many as may be were open. `num_interrupted`: those that
    had no end yet when the run was stopped, which are in no other number.
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
    """One round's rates: those of `duration_s`, from its first measured request to its last end."""

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
    """A Watcher. Requests that are due in the first `warm_up_s` of a round are not measured."""

    slo: Slo
    warm_up_s: float
    progress: Callable[[int], None] = lambda _num_tokens: None
    warn: Callable[[GivenUp], None] = lambda _given_up: None
    counts: Counts = field(default_factory=Counts)
    errors: Counter[str] = field(default_factory=Counter)
    # The first message of each kind.
    messages: dict[str, str] = field(default_factory=dict)
    parts: Parts = field(default_factory=lambda: Parts(METRICS))
    rounds: list[Round] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    # Of generators: how much of each second they were computing.
    busy: LogHistogram = field(default_factory=LogHistogram)
    # By round, of those that were not put on as they should have been.
    given_up: dict[int, GivenUp] = field(default_factory=dict)
    _round: _RoundSoFar = field(default_factory=lambda: _RoundSoFar(0.0))

    def begin_round(self, now_s: float) -> None:
        """Requests from here on belong to another round."""
        self._round = _RoundSoFar(now_s)
        self.timelines.append(Timeline(now_s))

    def end_round(self) -> None:
        """All of its requests have ended."""
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

    # -- what happens ------------------------------------------------------------------------------

    def worked(self, busy_ratio: float) -> None:
        self.busy.record(busy_ratio)

    def gave_up(self, given_up: GivenUp) -> None:
        number = len(self.timelines) - 1
        other = self.given_up.get(number)
        if other is None:
            self.given_up[number] = given_up
            self.warn(given_up)
            return
        # Several processes share the load.
        self.given_up[number] = GivenUp(
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
