"""Runner whose rows run on by speculation: one pass of the model verifies several draft tokens.

Rows that may run on (`num_run_on_tokens`) get their tokens in fewer passes, or by the inner runner
alone where guesses would not pay. The tokens are those of the inner runner; speculation only
decides how many come in how much time. The module also chooses the number of guesses and measures
passes.

Shape letter: K rows of a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from executor_service.speculation.draft_model import Proposer, RowStates
from executor_service.speculation.draft_totals import DraftTotals
from executor_service.steps import (
    FinishedStep,
    Int32Array,
    PendingStep,
    Runner,
    StepInput,
    StepOutput,
    TokenRuns,
    execute_step,
    run_on,
    verify_drafts,
)


class SpeculatingRunner:
    """Runner that adds speculation to another one, whose steps finish as they begin."""

    def __init__(
        self,
        runner: Runner,
        proposer: Proposer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Adds speculation to `runner`, with guesses by `proposer`. `clock`: in seconds."""
        self._runner = runner
        self._proposer = proposer
        self._clock = clock
        self.totals = DraftTotals()
        self._lengths = DraftLengths()
        self._acceptance = RowStates(lambda _position: AcceptanceRate())

    def begin(self, step: StepInput) -> PendingStep | None:
        self._proposer.catch_up()
        if step.num_run_on_tokens is not None and step.drafts is None:
            return FinishedStep(run_on(step, self._execute, self._take_turn))
        pending = self._runner.begin(step)
        if pending is not None and step.num_run_on_tokens is None:
            self._proposer.follow(step, None)
        elif pending is not None:
            output = pending.finish()
            self._proposer.follow(step, output.runs)
            return FinishedStep(output)
        return pending

    def _execute(self, step: StepInput) -> StepOutput:
        return execute_step(self._runner, step)

    def _take_turn(self, turn: StepInput) -> StepOutput:
        """Runs a draft-and-verify turn: each unfinished row gets at least one token if possible."""
        acceptance = [self._acceptance.of(turn, index) for index in range(turn.num_rows)]
        lengths = self._lengths.choose(acceptance, _most_guesses(turn))
        if lengths.any():
            self._proposer.prepare(turn, lengths)
            started_s = self._clock()
            guesses = self._proposer.propose(turn, lengths)
            proposed_s = self._clock()
            if len(guesses.token_ids):
                output = verify_drafts(replace(turn, drafts=guesses), self._execute)
                self._learn(acceptance, guesses, output)
                counts = guesses.counts
                self._lengths.guessing.add(int(counts.max()), proposed_s - started_s)
                num_tokens = len(turn.token_ids) + int(counts.sum())
                self._lengths.verifying.add(num_tokens, self._clock() - proposed_s)
                self._proposer.follow(turn, output.runs)
                return output
        return self._go_on_alone(turn, acceptance)

    def _go_on_alone(self, turn: StepInput, acceptance: list[AcceptanceRate]) -> StepOutput:
        started_s = self._clock()
        output = self._execute(turn)
        elapsed_s = self._clock() - started_s
        if output.runs is not None and (num_passes := int(output.runs.counts.max(initial=0))):
            self._lengths.plain.add(len(turn.token_ids), elapsed_s / num_passes)
        self._lengths.fade()
        for each in acceptance:
            each.fade()
        self._proposer.follow(turn, output.runs)
        return output

    def _learn(
        self, acceptance: list[AcceptanceRate], guesses: TokenRuns, output: StepOutput
    ) -> None:
        for index, (row, num_guesses) in enumerate(
            zip(acceptance, guesses.counts.tolist(), strict=True)
        ):
            if num_guesses:
                num_right = max(0, len(output.token_ids_of(index)) - 1)
                self.totals.add(num_guesses, num_right)
                row.add(num_guesses, num_right)
                self._lengths.all_rows.add(num_guesses, num_right)


def _most_guesses(turn: StepInput) -> Int32Array:
    """Returns the most guesses of each row, [K]; none for rows that compute a prompt."""
    assert turn.num_run_on_tokens is not None, "the step has run-on rows"
    can_be_guessed = turn.samples & (turn.num_new_tokens == 1)
    return np.where(can_be_guessed, turn.num_run_on_tokens, 0).astype(np.int32)


# -- Number of guesses, by acceptance rates and measured times -------------------------------------
#
# A row with acceptance rate p gets 1 + p + .. + p^d tokens from d guesses. A turn takes the time to
# guess, which depends on the longest row, and the time to verify, which depends on all tokens. The
# chosen numbers bring most tokens per second; none are made if plain steps bring more. All rates
# and times are measured.
#
# Shape letter: K rows of a turn.

MAX_GUESSES = 16
# Prior acceptance rate, and its weight in verified guesses.
_ASSUMED_RATIO, _ASSUMED_WEIGHT = 0.7, 2.0
# Decay of older turns with each turn, and with each turn without guesses, which forgets less: such
# turns bring a row's rate a little nearer to that of all rows.
_KEPT, _KEPT_WITHOUT = 0.9, 0.995
# Least expected gain of guesses: less is within the noise of measurements.
_LEAST_GAIN = 1.03
# Least time in seconds that a clock can measure.
_LEAST_S = 1e-9


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance rate of guesses, from counts in which older guesses count less.

    `num_tried`: verified guesses. `num_right`: the right ones among them.
    """

    num_right: float = 0.0
    num_tried: float = 0.0

    def add(self, num_guesses: int, num_right: int) -> None:
        """Counts the guesses of a turn, of which the first `num_right` were right.

        Guesses after the first wrong one were not tried.
        """
        tried = min(num_guesses, num_right + 1)
        self.num_right = _KEPT * self.num_right + num_right
        self.num_tried = _KEPT * self.num_tried + tried

    def fade(self) -> None:
        """Forgets a little, after a turn without guesses."""
        self.num_right *= _KEPT_WITHOUT
        self.num_tried *= _KEPT_WITHOUT

    def ratio(self, assumed: float) -> float:
        """Returns the probability that a guess is right. `assumed`: the prior, that of all rows."""
        right = self.num_right + _ASSUMED_WEIGHT * assumed
        return right / (self.num_tried + _ASSUMED_WEIGHT)


class DraftLengths:
    """Chooses how many guesses rows get. Deterministic: measured times are passed in."""

    def __init__(self) -> None:
        self.all_rows = AcceptanceRate()
        # Times of plain passes (one token a row) and of verifying passes, by their tokens; times of
        # guessing, by the guesses of the longest row.
        self.plain = PassTimes()
        self.verifying = PassTimes()
        self.guessing = PassTimes()

    def fade(self) -> None:
        """Forgets a little of rates and times of guesses, after a turn without guesses."""
        for each in (self.all_rows, self.verifying, self.guessing):
            each.fade()

    def choose(self, acceptance: Sequence[AcceptanceRate], most: Int32Array) -> Int32Array:
        """Returns the number of guesses of each row, [K], at most `most` [K]."""
        num_rows = len(acceptance)
        limit = min(int(most.max(initial=0)), MAX_GUESSES)
        none = np.zeros(num_rows, np.int32)
        if not limit or not self.plain.is_known:
            # The first turn measures the plain passes that guesses are compared with.
            return none
        verifying = self.verifying if self.verifying.is_known else self.plain
        of_all = self.all_rows.ratio(_ASSUMED_RATIO)
        ratios = np.array([each.ratio(of_all) for each in acceptance])
        best, best_rate = none, _LEAST_GAIN * num_rows / max(self.plain.of(num_rows), _LEAST_S)
        # [K, D]: expected tokens of the guess at each depth; 0 if the guess is not allowed.
        gains = ratios[:, None] ** np.arange(1, limit + 1)
        gains *= np.arange(limit) < most[:, None]
        # Drops guesses that bring less than their own time is worth.
        gains[gains < best_rate * verifying.line[1]] = 0
        lengths = (gains > 0).sum(axis=1)
        for depth in range(1, limit + 1):
            chosen = np.minimum(lengths, depth)
            if chosen.max(initial=0) < depth:
                break
            tokens = num_rows + gains[:, :depth].sum()
            seconds = self.guessing.of(depth) + verifying.of(num_rows + chosen.sum())
            if tokens / max(seconds, _LEAST_S) > best_rate:
                best, best_rate = chosen.astype(np.int32), tokens / max(seconds, _LEAST_S)
        return best


# -- Time of a pass by its size: a line through recent measurements --------------------------------

# Decay of older measurements with each new one.
_KEPT_MEASURED = 0.95
# Prior slope until two sizes were measured, as a share of the mean time per unit; and its weight.
_ASSUMED_SLOPE_RATIO = 0.1
_ASSUMED_SLOPE_WEIGHT = 0.1
# Decay without new measurements, and the weight below which a line counts as unknown: the machine
# may have changed.
_KEPT_UNSEEN, _LEAST_WEIGHT = 0.998, 0.05


class PassTimes:
    """Expected seconds of a pass of n units: a + b n with a, b >= 0, by decaying least squares."""

    def __init__(self) -> None:
        # Sums over measurements of n units in y seconds: 1, n, n^2, y, n y.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        """Whether enough was measured recently."""
        return self._sums[0] >= _LEAST_WEIGHT

    def add(self, size: int, seconds: float) -> None:
        """Adds the measurement of a pass of `size` units."""
        weight, sizes, squares, times, products = self._sums
        self._sums = (
            _KEPT_MEASURED * weight + 1,
            _KEPT_MEASURED * sizes + size,
            _KEPT_MEASURED * squares + size * size,
            _KEPT_MEASURED * times + seconds,
            _KEPT_MEASURED * products + size * seconds,
        )

    def fade(self) -> None:
        """Decays old measurements after a turn without such a pass."""
        weight, sizes, squares, times, products = (_KEPT_UNSEEN * each for each in self._sums)
        self._sums = (weight, sizes, squares, times, products)

    @property
    def line(self) -> tuple[float, float]:
        """Coefficients (a, b); zeros before the first measurement."""
        weight, size, square, time, product = self._sums
        if not weight:
            return 0.0, 0.0
        mean_size, mean_time = size / weight, time / weight
        spread = max(square / weight - mean_size**2, 0.0)
        together = product / weight - mean_size * mean_time
        # A prior with little weight, for passes that all have the same size.
        assumed = _ASSUMED_SLOPE_RATIO * mean_time / max(mean_size, 1.0)
        slope = (together + _ASSUMED_SLOPE_WEIGHT * assumed) / (spread + _ASSUMED_SLOPE_WEIGHT)
        slope = min(max(slope, 0.0), mean_time / max(mean_size, 1.0))
        return mean_time - slope * mean_size, slope

    def of(self, size: float) -> float:
        """Returns the expected seconds of a pass of `size` units."""
        a, b = self.line
        return a + b * size
