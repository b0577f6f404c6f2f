"""Step limits: how many tokens a step may have, by the executor's limit, by time and by tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.step_time_model import StepTimeModel
from scheduler_service.scheduler.queue import Key, OpenLanes, Waiting
from scheduler_service.scheduler.values import BoolArray, Request, SchedulerConfig

# Prompt tokens of a step before any step was measured.
_FIRST_TOKENS = 256
# Least time for prompts as a multiple of the time that the decodes of the step take alone, so that
# no prompt starves. The first one also limits how much time goes into the fixed cost of steps.
_LEAST_BESIDE_DECODES = 3.0
_LEAST_WITHIN_TARGET = 1 / 3
# One part in this many of the prompt tokens is for the shortest prompt, if others want all of them:
# it does not wait for a long one, which takes at most a third longer.
_PART_FOR_SHORTEST = 4

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
class ShortPart:
    """Part of a step for a waiting request that is short beside the prompts that run.

    `num_tokens`: size of the part. `max_pending`: most tokens that the request may have to compute,
    now and later. `step_class`: that of the first running prompt; the request's may not be greater.
    """

    num_tokens: int
    max_pending: int
    step_class: Key


@dataclass(frozen=True, slots=True)
class _Limits:
    num_tokens: int
    prompts: PromptTokens | None


class StepLimits:
    """Limits of the step that is planned, found out when they are first asked for.

    Prompts that may be split are computed in chunks that fit into the time of a step. It takes
    `step_time_ms`, or four times as long as its decodes alone if that is more. If it has decodes,
    and this is longer than `target_itl_ms` or a target of their requests, it takes as long as the
    shortest target says, or four thirds of the time of its decodes alone.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement, times: StepTimeModel) -> None:
        self._config = config
        self._placement = placement
        self._times = times
        num_most = max(_LEAST_SHARED_TOKENS, config.max_num_batched_tokens // _SHARED_PART)
        self._num_shared = min(config.max_num_batched_tokens, num_most)
        self._splits_prompts = False
        self._waiting: Waiting | None = None
        self._found: _Limits | None = None

    def begin(self, waiting: Waiting, *, splits_prompts: bool) -> None:
        """Begins a step, of which prompts may be split or not."""
        self._waiting, self._splits_prompts = waiting, splits_prompts
        self._found = None

    @property
    def num_tokens(self) -> int:
        """Limit of all tokens of the step."""
        return self._limits.num_tokens

    @property
    def prompts(self) -> PromptTokens | None:
        """Limit of prompt tokens, in a step that tenants share; None for no limit."""
        return self._limits.prompts

    def num_for_shortest(self, num_prompt_tokens: int) -> int:
        """Returns how many of a step's prompt tokens the shortest prompt may take out of turn.

        0 where tenants share the step, because they have rules of their own, and where prompts are
        not split.
        """
        if not self._splits_prompts or self._config.is_uncached or self.prompts is not None:
            return 0
        return max(num_prompt_tokens, 0) // _PART_FOR_SHORTEST

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
        is_decode, is_prompt = num_pending == 1, num_pending > 1
        num_decodes = int(np.count_nonzero(is_decode))
        if not self._times.has_prompts:
            return num_decodes, _FIRST_TOKENS
        decodes_us = self._times.decodes_us(num_decodes)
        step_us = self._config.step_time_ms * 1000
        left_us = max(step_us - decodes_us, _LEAST_BESIDE_DECODES * decodes_us)
        target_us = self._target_ms(is_decode, is_prompt) * 1000 if num_decodes else 0
        if target_us:
            left_us = min(left_us, max(target_us - decodes_us, _LEAST_WITHIN_TARGET * decodes_us))
        num_before = int(num_computed[is_prompt].max(initial=0))
        num_prompt_tokens = self._times.num_prompt_tokens(left_us, num_before)
        return num_decodes, max(num_prompt_tokens, self._config.block_size)

    def _target_ms(self, is_decode: BoolArray, is_prompt: BoolArray) -> int:
        """Returns the shortest wanted time between tokens of the step's decodes; 0 for none.

        Targets of requests count if no prompt is more urgent. `is_decode`, `is_prompt`: [R], in the
        order of rows.
        """
        target_ms, rows = self._config.target_itl_ms, self._placement.rows
        if not rows.num_with_target or not self._placement.queue.keeps_targets:
            return target_ms
        priorities, targets_ms = rows.priority[rows.order], rows.target_itl_ms[rows.order]
        first = (request.scheduling.priority for request in self._first_to_begin())
        most_urgent = min((*priorities[is_prompt].tolist(), *first), default=None)
        counts = is_decode & (targets_ms > 0)
        if most_urgent is not None:
            counts &= priorities <= most_urgent
        found_ms = targets_ms[counts].tolist()
        return min(found_ms if target_ms == 0 else [target_ms, *found_ms], default=0)

    def _first_to_begin(self) -> Iterator[Request]:
        """Yields the first preempted and the first waiting request."""
        yield from self._placement.preempted[:1]
        if self._waiting is not None and not self._waiting.is_empty:
            yield from islice(self._waiting.candidates(OpenLanes()), 1)


# -- What is left of a step ---------------------------------------------------------------------


def is_again(request: Request) -> bool:
    """Returns whether a request was preempted, so that it recomputes tokens before its next one."""
    return request.num_preemptions > 0


class PromptLimit:
    """Prompt tokens of one step that are left for requests yet to be admitted.

    The next tenant in turn that has no prompt tokens in this step is admitted even if running
    prompts have taken all of them: that tenant was served less than theirs, and does not wait until
    those prompts are done.
    """

    def __init__(self, tokens: PromptTokens, running: Iterable[tuple[Request, int]]) -> None:
        """Subtracts `running`: prompts already in the step, and the number of tokens of each."""
        self._num_most = tokens.num_most
        self._num_left = tokens.num_most
        self._num_again_left = tokens.num_again
        self._tenants: set[str] = set()
        for request, num_tokens in running:
            self.take(request, num_tokens)
        # Whether running prompts have tokens, and no request asked so far was limited to the rest.
        self._is_in_turn = bool(self._tenants)

    def num_for(self, request: Request, *, is_overdue: bool) -> int:
        """Returns the tokens for a waiting request, asked in turn.

        `is_overdue`: the request was passed too often.
        """
        if is_again(request):
            return max(min(self._num_left, self._num_again_left), int(is_overdue))
        is_newcomer = self._is_in_turn and request.scheduling.tenant not in self._tenants
        if is_newcomer or is_overdue:
            return self._num_most
        self._is_in_turn = False
        return max(self._num_left, 0)

    def take(self, request: Request, num_tokens: int) -> None:
        """Subtracts tokens of `request` that are now part of the step."""
        self._num_left -= num_tokens
        self._num_again_left -= num_tokens * is_again(request)
        self._tenants.add(request.scheduling.tenant)


@dataclass(slots=True)
class StepBudget:
    """Token budget left in a step, with the rules for admission to spend it.

    `splits_prompts`: a prompt may be computed in chunks. `is_untouched`: the step has no tokens
    yet. `num_reserved`: tokens for running rows that go before the request to be admitted.
    `may_preempt`: running requests may be preempted for a waiting one. `prompts`: limit of prompt
    tokens in the step; None for no limit. `num_encoded`: encoder tokens that the step encodes.
    `is_beside`: a request to be admitted is a short prompt that begins beside long ones.
    """

    num_tokens: int
    splits_prompts: bool
    is_untouched: bool = True
    num_reserved: int = 0
    may_preempt: bool = True
    prompts: PromptLimit | None = None
    num_encoded: int = 0
    is_beside: bool = False

    @property
    def num_left(self) -> int:
        """Tokens left for requests to be admitted."""
        return self.num_tokens - self.num_reserved

    def spend(self, num_tokens: int) -> None:
        """Subtracts tokens that are now part of the step."""
        self.num_tokens -= num_tokens
        self.is_untouched = self.is_untouched and num_tokens == 0
