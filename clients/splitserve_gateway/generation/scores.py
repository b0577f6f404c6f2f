"""How many scores of tokens an answer may have that is gathered before it is sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from splitserve_client import SamplingParams
from splitserve_gateway.generation.choices import Delta, Event
from splitserve_gateway.generation.prompts import EncodedPrompt
from splitserve_gateway.http.errors import ApiError, invalid

E = TypeVar("E", bound=Event)

# Each takes half a KiB until it is JSON.
MAX_SCORES = 2**20


def check_prompt_scores(
    prompts: Sequence[EncodedPrompt], params: SamplingParams, param: str
) -> None:
    """Raises ApiError where prompts have too many. `param`: the field that asks for them."""
    if params.num_prompt_logprobs is None:
        return
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    num_scores = num_tokens * (1 + params.num_prompt_logprobs) * params.num_completions
    if num_scores > MAX_SCORES:
        what = f"the choices have {num_scores} logprobs of prompts"
        raise _too_many(param, what)


async def gathered(events: AsyncGenerator[E, None], param: str) -> AsyncGenerator[E, None]:
    """`events`, which become one answer. Raises ApiError where outputs have too many scores.

    `param`: the field that asks for them. Closes `events`.
    """
    num_scores = 0
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                num_scores += sum(1 + len(score.top) for score in event.logprobs)
                if num_scores > MAX_SCORES:
                    raise _too_many(param, "the answer has too many logprobs")
            yield event


def _too_many(param: str, what: str) -> ApiError:
    message = f"{what}; allowed: at most {MAX_SCORES}, alternatives included"
    return invalid(message, param, "too_many_logprobs")
