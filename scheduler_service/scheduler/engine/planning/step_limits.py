"""Step limits: how many tokens a step may have, by the executor's limit, by time and by tenants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.step_time_model import StepTimeModel
from scheduler_service.scheduler.values import SchedulerConfig

# Prompt tokens of a step before any step was measured.
_FIRST_TOKENS = 256
# Least time for prompts as a multiple of the time that the decodes of the step take alone, so that
# no prompt starves. The first one also limits how much time goes into the fixed cost of steps.
_LEAST_BESIDE_DECODES = 3.0
_LEAST_WITHIN_TARGET = 1 / 3

# Where tenants share a step, it has few prompt tokens, so that it is short: a new request waits for
# the steps in flight, which are as long as their prompts. The rest of a prompt is computed by later
# steps, so only the fixed cost of a step is paid more often. Preempted requests are recomputed in
# even smaller chunks: they have had tokens for a while, and their tenant, which holds most, would
# make others wait for room that it took too much of.
#
# Smaller steps would compute prompts more slowly than the device can.
_LEAST_SHARED_TOKENS = 512
_SHARED_PART = 4
# One part in this many of the prompt tokens is for recomputed requests. Half as much would cost a
# flood of long outputs an eighth of its tokens, because rows hold blocks while they wait; this
# much costs a fortieth.
_PART_OF_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Limit of prompt tokens in a step that tenants share.

    `num_most`: for all prompts together, but for one that begins out of turn and has as much for
    itself. `num_again`: for rows that were preempted before.
    """

    num_most: int
    num_again: int


@dataclass(frozen=True, slots=True)
class _Limits:
    num_tokens: int
    prompts: PromptTokens | None


class StepLimits:
    """Limits of the step that is planned, found out when they are first asked for.

    Prompts that may be split are computed in chunks that fit into the time of a step. It takes
    `step_time_ms`, or four times as long as its decodes alone if that is more. If it has decodes,
    and this is longer than `target_itl_ms`, it takes as long as that target says, or four thirds of
    the time of its decodes alone.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement, times: StepTimeModel) -> None:
        self._config = config
        self._placement = placement
        self._times = times
        num_most = max(_LEAST_SHARED_TOKENS, config.max_num_batched_tokens // _SHARED_PART)
        self._num_shared = min(config.max_num_batched_tokens, num_most)
        self._splits_prompts = False
        self._found: _Limits | None = None

    def begin(self, *, splits_prompts: bool) -> None:
        """Begins a step, of which prompts may be split or not."""
        self._splits_prompts = splits_prompts
        self._found = None

    @property
    def num_tokens(self) -> int:
        """Limit of all tokens of the step."""
        return self._limits.num_tokens

    @property
    def prompts(self) -> PromptTokens | None:
        """Limit of prompt tokens, in a step that tenants share; None for no limit."""
        return self._limits.prompts

    @property
    def _limits(self) -> _Limits:
        if self._found is None:
            self._found = self._find()
        return self._found

    def _find(self) -> _Limits:
        num_tokens = self._config.max_num_batched_tokens
        if not self._splits_prompts:
            return _Limits(num_tokens, None)
        shares, num_most = self._placement.queue.shares, self._num_shared
        is_shared = shares is not None and shares.is_shared
        if self._config.step_time_ms:
            num_decodes, num_in_time = self._num_in_time()
            num_most = min(num_most, num_in_time)
            # A prompt that begins out of turn has as much for itself.
            num_tokens = min(num_tokens, num_decodes + num_in_time * (2 if is_shared else 1))
        if not is_shared:
            return _Limits(num_tokens, None)
        return _Limits(num_tokens, PromptTokens(num_most, max(1, num_most // _PART_OF_PROMPTS)))

    def _num_in_time(self) -> tuple[int, int]:
        """Returns the number of decodes, and of prompt tokens there is time for: a block or more.

        Tokens of a prompt take the longer, the more come before them: those of the prompt that has
        got furthest count.
        """
        rows, order = self._placement.rows, self._placement.rows.order
        num_computed = rows.num_computed[order]
        num_pending = rows.num_tokens[order] - num_computed
        num_decodes = int(np.count_nonzero(num_pending == 1))
        if not self._times.has_prompts:
            return num_decodes, _FIRST_TOKENS
        decodes_us = self._times.decodes_us(num_decodes)
        step_us, target_us = self._config.step_time_ms * 1000, self._config.target_itl_ms * 1000
        left_us = max(step_us - decodes_us, _LEAST_BESIDE_DECODES * decodes_us)
        if num_decodes and target_us:
            left_us = min(left_us, max(target_us - decodes_us, _LEAST_WITHIN_TARGET * decodes_us))
        num_before = int(num_computed[num_pending > 1].max(initial=0))
        num_prompt_tokens = self._times.num_prompt_tokens(left_us, num_before)
        return num_decodes, max(num_prompt_tokens, self._config.block_size)
