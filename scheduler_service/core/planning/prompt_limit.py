"""How many tokens of prompts a step has where tenants share it: few, so that it is soon over.

Whoever comes waits for the steps in flight, and these are as long as their prompts. What does not
fit is computed by the next step, so only the fixed cost of a step is paid more often.
"""

from __future__ import annotations

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Request

# Smaller steps would compute prompts slower than the device can.
_LEAST_TOKENS = 512
_PART_OF_STEP = 4


def most_prompt_tokens(config: SchedulerConfig) -> int:
    """Tokens of prompts in a step that tenants share."""
    num_tokens = config.max_num_batched_tokens
    return min(num_tokens, max(_LEAST_TOKENS, num_tokens // _PART_OF_STEP))


class PromptLimit:
    """What is left of those of one step for prompts that are yet to be admitted.

    A tenant that is next and has none in this step is admitted even if running prompts have taken
    all: it was served less than whoever has them, and does not wait until their prompts are done.
    """

    def __init__(self, num_most: int, num_running_tokens: int, running_tenants: set[str]) -> None:
        self._num_most = num_most
        self._num_left = num_most - num_running_tokens
        self._tenants = running_tenants
        # Whether nobody has been left out, nor has got what others might have got.
        self._is_in_turn = bool(running_tenants)

    def num_for(self, request: Request, *, is_overdue: bool) -> int:
        """Tokens for a waiting request, asked in turn. `is_overdue`: it was passed too often."""
        is_newcomer = self._is_in_turn and request.scheduling.tenant not in self._tenants
        if is_newcomer or is_overdue:
            return self._num_most
        self._is_in_turn = False
        return max(self._num_left, 0)

    def take(self, request: Request, num_tokens: int) -> None:
        """These tokens of `request` are in the step."""
        self._num_left -= num_tokens
        self._tenants.add(request.scheduling.tenant)
