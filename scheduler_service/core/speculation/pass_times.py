"""What a pass through the model takes by its number of tokens, and a step beside its passes."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from scheduler_service.core.plan import StepOutcome, StepPlan
from scheduler_service.core.request import Int64Array

Float64Array = npt.NDArray[np.float64]

_NEWEST_WEIGHT = 0.2
# Sizes up to this are told apart; of larger ones, those of about a quarter of a power of two.
_MOST_EXACT = 16
# A size that was not seen in so many steps is forgotten: what was slow may be so no longer.
_FORGOTTEN_STEPS = 256


class PassTimes:
    """Running averages of what executed steps took, by the executor's measure or by the clock.

    Of sizes between those seen, times lie between theirs. Larger ones than any are taken to take
    as long as the largest: whoever tries one learns what it takes.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._us: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}
        self._num_steps = 0
        # Beside its passes, a step that was guessed for, and another one; None if not known.
        self._overhead_us: dict[bool, float] = {}

    def observe(self, plan: StepPlan, outcome: StepOutcome, interval_us: float) -> None:
        """Learns from a step of decodes; `interval_us`: since the last result, or its plan."""
        work = plan.work
        compute_us = outcome.compute_us or interval_us
        num_passes = 1
        if work.num_run_on_tokens is not None:
            # A pass that brings drafts is no more than one.
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
            # However long one took: it may have waited for the machine.
            pass_us = min(pass_us, 2 * self._us[size])
            self._us[size] += _NEWEST_WEIGHT * (pass_us - self._us[size])
        self._seen_at[size] = self._num_steps
        for old in [
            s for s in self._sizes if self._num_steps - self._seen_at[s] > _FORGOTTEN_STEPS
        ]:
            self._sizes.remove(old)
            del self._us[old], self._seen_at[old]

    def passes_us(self, num_tokens: Int64Array) -> Float64Array | None:
        """What passes of so many tokens take; None as long as no size is known that is no larger.

        What takes longer than in proportion was disturbed when it was measured.
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
        """What a step takes beside its passes, 0 if that is not known."""
        return self._overhead_us.get(is_drafted, 0.0)


def _rounded(num_tokens: int) -> int:
    if num_tokens <= _MOST_EXACT:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 3)
    return num_tokens // unit * unit
