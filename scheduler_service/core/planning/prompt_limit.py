"""How many tokens of prompts a step has where tenants share it: few, so that it is soon over.

Whoever comes waits for the steps in flight, and these are as long as their prompts. What does not
fit is computed by the next step, so only the fixed cost of a step is paid more often. What yielded
is computed again in smaller parts yet: it has been answered for a while, and its tenant, which has
most, would have others wait for what it took too much of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Request

# Smaller steps would compute prompts slower than the device can.
_LEAST_TOKENS = 512
_PART_OF_STEP = 4


# Of those, what is computed again. Half as much costs a flood of long outputs an eighth of its
# tokens, as rows have their blocks and wait; this much costs it a fortieth.
_PART_OF_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of prompts in a step that tenants share; `num_again`: of rows that had yielded."""

    num_most: int
    num_again: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> PromptTokens:
        """For steps of so many tokens."""
        num_tokens = config.max_num_batched_tokens
        num_most = min(num_tokens, max(_LEAST_TOKENS, num_tokens // _PART_OF_STEP))
        return cls(num_most, max(1, num_most // _PART_OF_PROMPTS))


def is_again(request: Request) -> bool:
    """Whether what a request computes before its next token was computed before."""
    return request.num_preemptions > 0


class PromptLimit:
    """What is left of those of one step for prompts that are yet to be admitted.

    A tenant that is next and has none in this step is admitted even if running prompts have taken
    all: it was served less than whoever has them, and does not wait until their prompts are done.
    """

    def __init__(self, tokens: PromptTokens, running: Iterable[tuple[Request, int]]) -> None:
        """`running`: prompts that are in the step already, and how many tokens of each."""
        self._num_most = tokens.num_most
        self._num_left = tokens.num_most
        self._num_again_left = tokens.num_again
        self._tenants: set[str] = set()
        for request, num_tokens in running:
            self.take(request, num_tokens)
        # Whether nobody has been left out, nor has got what others might have got.
        self._is_in_turn = bool(self._tenants)

    def num_for(self, request: Request, *, is_overdue: bool) -> int:
        """Tokens for a waiting request, asked in turn. `is_overdue`: it was passed too often."""
        if is_again(request):
            return max(min(self._num_left, self._num_again_left), int(is_overdue))
        is_newcomer = self._is_in_turn and request.scheduling.tenant not in self._tenants
        if is_newcomer or is_overdue:
            return self._num_most
        self._is_in_turn = False
        return max(self._num_left, 0)

    def take(self, request: Request, num_tokens: int) -> None:
        """These tokens of `request` are in the step."""
        self._num_left -= num_tokens
        self._num_again_left -= num_tokens * is_again(request)
        self._tenants.add(request.scheduling.tenant)
