"""Step times: how long the executor takes for a step, learned from the steps it has executed.

The duration is a sum of four parts: a fixed one, and parts that grow with the decodes, with the
prompt tokens, and with the tokens that prompt tokens attend to. After each step the difference to
the measured time is divided among the parts, in proportion to their shares in the estimate. So all
rates stay positive, and a rate changes only by steps that it matters for.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

import numpy as np

from scheduler_service.scheduler.values import StepOutcome, StepPlan

# The first measurement of decodes, and of a prompt, is divided in these ratios, roughly those of a
# model of 160M parameters on two CPU cores.
_DECODE_RATIO, _ATTEND_RATIO = 0.05, 2e-4
# Least part of the first prompt's time that its tokens are taken to account for.
_LEAST_PART = 0.02
# Part of a difference that is corrected. At first more, since the ratios are assumed.
_WEIGHT, _FIRST_WEIGHT, _NUM_FIRST = 0.2, 0.5, 8
# Largest relative difference that counts: a step may have waited for the machine.
_MOST_BELOW, _MOST_ABOVE = -0.75, 1.0
_GAIN_BESIDE_PROMPTS = 0.1
# Smaller prompts say little about the time of a prompt token.
_LEAST_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Amount of work of a step.

    `num_attended`: sum over the prompt tokens of the number of tokens before each.
    """

    num_decodes: int
    num_prompt_tokens: int = 0
    num_attended: float = 0.0

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        """Returns the size of a step or of each of its passes; rows with one token are decodes."""
        work = plan.work
        num_rows = len(work.row_ids)
        if plan.num_tokens == num_rows:
            return cls(num_rows)
        is_prompt = work.num_new_tokens > 1
        chunks = work.num_new_tokens[is_prompt].astype(np.float64)
        attended = chunks * (work.num_computed_tokens[is_prompt] + chunks / 2)
        return cls(num_rows - len(chunks), int(chunks.sum()), float(attended.sum()))


class StepTimeModel:
    """Estimated duration of steps, in us, without block moves.

    `has_decodes`, `has_prompts`: a step of decodes only, and one with a prompt, were measured.
    """

    def __init__(self) -> None:
        # Of a step, of each decode, prompt token, and token that a prompt token attends to.
        self._rates_us: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        # Measurements of decodes alone, and of prompts, after the first one of each.
        self._num_decodes, self._num_prompts = 0, 0
        self._first_prompt = StepLoad(0), 0.0
        self.has_decodes = self.has_prompts = False

    def observe(self, plan: StepPlan, outcome: StepOutcome, interval_us: float) -> None:
        """Learns from an executed step; uses `interval_us` if the executor reports no times."""
        work, took_us = plan.work, outcome.compute_us or interval_us
        if len(work.row_ids) == 0 or took_us <= 0 or work.drafts is not None:
            return
        if outcome.token_counts is not None:
            took_us /= max(int(outcome.token_counts.max()), 1)
        self.learn(StepLoad.of(plan), took_us)

    def learn(self, size: StepLoad, took_us: float) -> None:
        """Corrects the estimate by a measured pass of this size."""
        sizes = 1.0, float(size.num_decodes), float(size.num_prompt_tokens), size.num_attended
        parts_us = tuple(map(mul, self._rates_us, sizes))
        estimate_us = sum(parts_us)
        is_known = self.has_prompts if size.num_prompt_tokens else self.has_decodes
        if not is_known:
            self._take_first(size, took_us)
            return
        if size.num_prompt_tokens:
            self._num_prompts = num_before = self._num_prompts + 1
        else:
            self._num_decodes = num_before = self._num_decodes + 1
        off = min(max(took_us / estimate_us - 1.0, _MOST_BELOW), _MOST_ABOVE)
        weight = _FIRST_WEIGHT if num_before <= _NUM_FIRST else _WEIGHT
        gains = parts_us
        if size.num_prompt_tokens and self.has_decodes:
            # The first two are known better by steps of decodes.
            gains = *(_GAIN_BESIDE_PROMPTS * part_us for part_us in parts_us[:2]), *parts_us[2:]
        step = weight * off * estimate_us / sum(map(mul, gains, parts_us))
        self._rates_us = tuple(
            rate_us * max(1.0 + step * gain, 0.1)
            for rate_us, gain in zip(self._rates_us, gains, strict=True)
        )

    def _take_first(self, size: StepLoad, took_us: float) -> None:
        """Derives the rates of decodes, or of prompts, from the first measurement alone."""
        fixed_us, decode_us, token_us, attend_us = self._rates_us
        if not size.num_prompt_tokens:
            self.has_decodes = True
            fixed_us = took_us / (1.0 + _DECODE_RATIO * size.num_decodes)
            decode_us = _DECODE_RATIO * fixed_us
            # Of the first prompt it was not known what part of its time is fixed.
            size, took_us = self._first_prompt
        else:
            self.has_prompts = size.num_prompt_tokens >= _LEAST_PROMPT_TOKENS
            self._first_prompt = size, took_us
        if size.num_prompt_tokens and self._num_prompts <= _NUM_FIRST:
            prompt_us = max(
                took_us - fixed_us - decode_us * size.num_decodes, _LEAST_PART * took_us
            )
            token_us = prompt_us / (size.num_prompt_tokens + _ATTEND_RATIO * size.num_attended)
            attend_us = _ATTEND_RATIO * token_us
        self._rates_us = fixed_us, decode_us, token_us, attend_us

    def decodes_us(self, num_decodes: int) -> float:
        """Returns the estimated duration of a pass of decodes."""
        fixed_us, decode_us = self._rates_us[:2]
        return fixed_us + num_decodes * decode_us

    def prompt_us(self, num_tokens: int) -> float:
        """Returns the estimated time that the first tokens of a prompt add to steps."""
        token_us, attend_us = self._rates_us[2:]
        return num_tokens * (token_us + attend_us * num_tokens / 2)

    def num_prompt_tokens(self, left_us: float, num_before: int) -> int:
        """Returns how many prompt tokens, behind `num_before`, add `left_us` to a step."""
        token_us, attend_us = self._rates_us[2:]
        num_most = left_us / (token_us + attend_us * num_before)
        return int(left_us / (token_us + attend_us * (num_before + num_most / 2)))
