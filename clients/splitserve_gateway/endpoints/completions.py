"""`POST /v1/completions`: text that continues a prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.completion_choices import ChoiceShape, new_choices
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import StreamUsage, head, usage, whole_answer, with_notes
from splitserve_gateway.generation.answers import checked_grammar
from splitserve_gateway.generation.choices import (
    Delta,
    Event,
    PromptScores,
    TextRequest,
    Totals,
    stream_choices,
)
from splitserve_gateway.generation.prompts import encode_prompts
from splitserve_gateway.generation.sampling import sampling_params
from splitserve_gateway.generation.text_requests import text_request
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.http.event_stream import event_stream
from splitserve_gateway.schemas.completions import CompletionRequest

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 4096


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues a prompt, or each of several."""
    gateway = gateway_of(request)
    body = await gateway.read(request, CompletionRequest)
    answer = await _answer(gateway, body)
    if body.stream:
        response = await event_stream(_chunks(answer))
    else:
        response = await _whole(answer)
    return with_notes(response, body)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is asked, and the choices that come of it."""

    body: CompletionRequest
    asked: TextRequest
    choices: list[ChoiceShape]

    def head(self) -> dict[str, object]:
        return head("cmpl", "text_completion", self.body, self.asked.served)


async def _answer(gateway: Gateway, body: CompletionRequest) -> _Answer:
    _check(body)
    serving = gateway.choose(body.model)
    prompts = await encode_prompts(body, serving.served)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    params = sampling_params(
        body,
        serving.served,
        # Nothing is computed without a token to be sampled; that of an echo alone is dropped.
        max_tokens=max(max_tokens, 1) if body.echo else max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    params = replace(params, grammar=await checked_grammar(serving.checker, body))
    if len(prompts) * params.num_completions > _MAX_CHOICES:
        message = f"{len(prompts)} prompts with n = {params.num_completions}; allowed: at most "
        raise invalid(f"{message}{_MAX_CHOICES} choices", "n")
    asked = await text_request(serving, body, params, prompts)
    return _Answer(body, asked, new_choices(body, asked))


def _check(body: CompletionRequest) -> None:
    """Raises ApiError for fields that do not go together."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise invalid("one of prompt and prompt_token_ids is required", "prompt")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not streamed", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for stream only", "stream_options")


async def _chunks(answer: _Answer) -> AsyncGenerator[object, None]:
    start = answer.head()
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in answer.asked.prompts)
    counts = StreamUsage(answer.body.stream_options, num_prompt_tokens)
    async with aclosing(_events(answer)) as events:
        async for event in events:
            if isinstance(event, Delta):
                choice = answer.choices[event.index].chunk(event)
                count = counts.of_event(len(event.token_ids))
                if choice is not None:
                    yield {**start, "choices": [choice], **count}
            elif isinstance(event, Totals) and (last := counts.last(event)) is not None:
                yield {**start, **last}


async def _whole(answer: _Answer) -> Response:
    totals = Totals()
    async with aclosing(_events(answer)) as events:
        async for event in events:
            if isinstance(event, Delta):
                answer.choices[event.index].add(event)
            elif isinstance(event, Totals):
                totals = event
    return await whole_answer(answer.head(), answer.choices, {"usage": usage(totals)})


async def _events(answer: _Answer) -> AsyncGenerator[Delta | Totals, None]:
    """What the choices gain; scores of prompts go to those it concerns."""
    is_echo_alone = answer.body.echo and answer.body.max_tokens == 0
    num_each = answer.asked.params.num_completions
    async with aclosing(stream_choices(answer.asked)) as events:
        async for event in events:
            if isinstance(event, PromptScores):
                first = event.prompt_index * num_each
                for choice in answer.choices[first : first + num_each]:
                    choice.prompt_scores = event.scores
            else:
                yield _without_output(event) if is_echo_alone else event


def _without_output(event: Event) -> Delta | Totals:
    match event:
        case Delta(index=index, end=end):
            return Delta(index, "", end=end)
        case Totals(num_prompt_tokens=prompt, num_cached_tokens=cached):
            return Totals(prompt, 0, cached)
        case PromptScores():
            raise AssertionError("it goes to the choices")
