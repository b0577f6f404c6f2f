"""Draft lengths: the number of draft tokens per row that brings the most tokens per time.

A draft token counts only if all before it are accepted, so its value is the probability of that.
The most probable draft tokens of all rows are taken first, for as long as the expected tokens grow
faster than the duration of the step. `PassTimes` estimates that duration, and `DraftTotals` counts
results.

Shape letters: K rows that have guesses, D guesses of each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.scheduler.values import Drafts, Int32Array, Int64Array, StepOutcome, StepPlan

# Estimates are inexact: a smaller expected gain counts as none.
_LEAST_GAIN = 1.02
# A row whose first draft token is less probable gets none, and is not held back.
_LEAST_CHANCE = 0.2


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """Number of draft tokens of each row.

    `counts`: [K] int32. `runs_on`: rows run on behind their draft tokens.
    """

    counts: Int32Array
    runs_on: bool


def choose_lengths(
    chances: Float64Array, most: Int32Array, num_rows: int, num_run_on: int, times: PassTimes
) -> DraftLengths | None:
    """Chooses the number of draft tokens of K rows in a step of `num_rows`; None if none pay.

    `chances`: [K, D] float64, element d is the probability that the first d + 1 guesses of a row
    are all right. `most`: [K] int32, limit of each row. The alternative is a step without draft
    tokens in which rows run on for `num_run_on` tokens.

    Draft tokens need known tokens. So between a step with draft tokens and the next one either the
    other rows go on, or, where all rows have draft tokens, no row runs until the result is there.
    """
    num_each = chances.shape[1]
    is_none = (np.arange(num_each) >= most[:, None]) | (chances[:, :1] < _LEAST_CHANCE)
    flat = np.where(is_none, 0.0, chances).ravel()
    ranked = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    passes_us = times.passes_us(num_rows + np.arange(len(ranked) + 1))
    if passes_us is None or not len(ranked):
        return None
    pass_us, beside_us = passes_us[0], times.overhead_us(is_drafted=False)
    runs_us, num_run_tokens = num_run_on * pass_us, num_rows * num_run_on
    plain_rate = (num_rows + num_run_tokens) / (pass_us + runs_us + beside_us)
    # Element i: a step with the i + 1 most probable draft tokens.
    passes_us, tokens = passes_us[1:], num_rows + np.cumsum(flat[ranked])
    num_others = num_rows - np.cumsum(ranked % num_each == 0)
    alone_us = passes_us + times.overhead_us(is_drafted=True)
    rates = np.where(
        num_others > 0,
        (tokens + num_others) / (passes_us + pass_us + 2 * beside_us),
        tokens / alone_us,
    )
    with_runs = np.where(num_others > 0, 0.0, (tokens + num_run_tokens) / (alone_us + runs_us))
    runs_on = bool(with_runs.max() > rates.max())
    rates = with_runs if runs_on else rates
    if rates.max() < _LEAST_GAIN * plain_rate:
        return None
    chosen = ranked[: int(rates.argmax()) + 1]
    counts = np.bincount(chosen // num_each, minlength=len(most))
    return DraftLengths(counts.astype(np.int32), runs_on)


# -- Durations of passes and steps -----------------------------------------------------------------

Float64Array = npt.NDArray[np.float64]

_NEWEST_WEIGHT = 0.2
# Sizes up to this are kept exactly; larger ones are rounded down to a quarter of a power of two.
_MOST_EXACT = 16
# A size not seen in this many steps is forgotten: a slow size may have become fast.
_FORGOTTEN_STEPS = 256


class PassTimes:
    """Running averages of pass durations by number of tokens, and of the rest of a step.

    Durations come from the executor, or else from the clock. Between two observed sizes, durations
    are interpolated. A size larger than all observed ones is assumed to take as long as the
    largest: a step that tries it measures it.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._us: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}
        self._num_steps = 0
        # Duration of a step beside its passes in us, by whether it has draft tokens.
        self._overhead_us: dict[bool, float] = {}

    def observe(self, plan: StepPlan, outcome: StepOutcome, interval_us: float) -> None:
        """Learns from a step of decodes.

        `interval_us`: time since the previous result, or since the step was planned if that is
        later.
        """
        work = plan.work
        compute_us = outcome.compute_us or interval_us
        num_passes = 1
        if work.num_run_on_tokens is not None:
            # A pass verifies all draft tokens at once.
            num_drafts = 0 if work.drafts is None else work.drafts.counts
            num_passes = max(int((outcome.counts - num_drafts).max()), 1)
        if compute_us <= 0:
            return
        self._num_steps += 1
        is_drafted = work.drafts is not None
        if num_passes == 1 or not is_drafted:
            self._take(plan.num_tokens, compute_us / num_passes)
        beside_us = max(interval_us - compute_us, 0.0)
        average = self._overhead_us.get(is_drafted, beside_us)
        beside_us = min(beside_us, max(2 * average, compute_us))
        self._overhead_us[is_drafted] = average + _NEWEST_WEIGHT * (beside_us - average)

    def _take(self, num_tokens: int, pass_us: float) -> None:
        size = _rounded(num_tokens)
        if size not in self._us:
            self._us[size] = pass_us
            insort(self._sizes, size)
        else:
            # A pass may have waited for the machine: limits the effect of one slow pass.
            pass_us = min(pass_us, 2 * self._us[size])
            self._us[size] += _NEWEST_WEIGHT * (pass_us - self._us[size])
        self._seen_at[size] = self._num_steps
        for old in [
            s for s in self._sizes if self._num_steps - self._seen_at[s] > _FORGOTTEN_STEPS
        ]:
            self._sizes.remove(old)
            del self._us[old], self._seen_at[old]

    def passes_us(self, num_tokens: Int64Array) -> Float64Array | None:
        """Returns the durations of passes of `num_tokens` tokens, in us, [len(num_tokens)] float64.

        `num_tokens` rises. Returns None while no size up to its first element is known. A duration
        that grows more than in proportion was disturbed when it was measured, and is cut to that.
        """
        if not self._sizes or self._sizes[0] > int(num_tokens[0]):
            return None
        times = np.array([self._us[size] for size in self._sizes])
        least = self._sizes[max(bisect_left(self._sizes, int(num_tokens[0]) + 1) - 1, 0)]
        in_proportion = num_tokens * (self._us[least] / least)
        passes_us: Float64Array = np.minimum(
            np.interp(num_tokens, self._sizes, times), in_proportion
        )
        return passes_us

    def overhead_us(self, *, is_drafted: bool) -> float:
        """Returns the fixed overhead of a step, without passes, in us; 0 before measurement."""
        return self._overhead_us.get(is_drafted, 0.0)


def _rounded(num_tokens: int) -> int:
    if num_tokens <= _MOST_EXACT:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 3)
    return num_tokens // unit * unit


# -- Totals ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class DraftTotals:
    """Counts of draft tokens since the engine began.

    `num_steps`: steps with draft tokens. `num_drafts`: draft tokens verified. `num_accepted`: draft
    tokens accepted.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def take(self, drafts: Drafts, outcome: StepOutcome) -> None:
        """Counts the draft tokens of an executed step. Tokens of rows that ran on do not count."""
        self.num_steps += 1
        self.num_drafts += len(drafts.token_ids)
        num_taken, start = 0, 0
        for index, count in enumerate(drafts.counts.tolist()):
            if not count:
                continue
            guesses = drafts.token_ids[start : start + count].tolist()
            start += count
            tokens = outcome.tokens_of(index)
            is_same = [guess == token for guess, token in zip(guesses, tokens, strict=False)]
            num_taken += is_same.index(False) if False in is_same else len(is_same)
        self.num_accepted += num_taken
