"""`POST /v1/chat/completions`: the next message of a chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.chat_choices import ChatChoice
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.logprobs import TokenNames, prompt_logprobs
from splitserve_gateway.endpoints.shapes import StreamUsage, head, usage, whole_answer, with_notes
from splitserve_gateway.generation.chat_requests import ChatGeneration, chat_generation
from splitserve_gateway.generation.choices import (
    Delta,
    Event,
    PromptScores,
    TextRequest,
    Totals,
    stream_choices,
)
from splitserve_gateway.generation.sampling import sampling_params
from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.http.event_stream import event_stream
from splitserve_gateway.schemas.chat import ChatRequest

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a chat."""
    gateway = gateway_of(request)
    body = await gateway.read(request, ChatRequest)
    answer = await _answer(gateway, body)
    if body.stream:
        response = await event_stream(_chunks(answer))
    else:
        response = await _whole(answer)
    return with_notes(response, body)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is asked, and the choices that come of it."""

    body: ChatRequest
    asked: TextRequest
    choices: list[ChatChoice]
    names: TokenNames

    def head(self, kind: str) -> dict[str, object]:
        return head("chatcmpl", kind, self.body, self.asked.served)


async def _answer(gateway: Gateway, body: ChatRequest) -> _Answer:
    _check(body)
    generation = await start_chat(gateway, body)
    tokenizer = tokenizer_of(generation.asked.served)
    names = TokenNames(tokenizer, as_ids=body.return_tokens_as_token_ids)
    return _Answer(body, generation.asked, _choices(body, generation, names), names)


async def start_chat(gateway: Gateway, body: ChatRequest) -> ChatGeneration:
    """The generation that `body` asks for. Raises ApiError and SplitserveError."""
    serving = gateway.choose(body.model)
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    params = sampling_params(
        body,
        serving.served,
        max_tokens=max_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    return await chat_generation(serving, body, params)


def _choices(body: ChatRequest, generation: ChatGeneration, names: TokenNames) -> list[ChatChoice]:
    prefix = generation.final_message if body.echo else ""
    return [
        ChatChoice(index, body, generation.plan, names, prefix)
        for index in range(generation.asked.params.num_completions)
    ]


def _check(body: ChatRequest) -> None:
    """Raises ApiError for fields that do not go together."""
    if (body.messages is None) == (body.prompt_token_ids is None):
        raise invalid("one of messages and prompt_token_ids is required", "messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not streamed", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for stream only", "stream_options")


async def _chunks(answer: _Answer) -> AsyncGenerator[object, None]:
    start = answer.head("chat.completion.chunk")
    prompt_token_ids = answer.asked.prompts[0].token_ids
    counts = StreamUsage(answer.body.stream_options, len(prompt_token_ids))
    async with aclosing(stream_choices(answer.asked)) as events:
        # What is refused is refused before anything is told.
        event: Event | None = await anext(events)
        for number, choice in enumerate(answer.choices):
            chunk = {**start, "choices": [choice.first_chunk()], **counts.of_event(0)}
            if number == 0 and answer.body.return_token_ids:
                chunk["prompt_token_ids"] = prompt_token_ids
            yield chunk
        while event is not None:
            if isinstance(event, Delta):
                told = answer.choices[event.index].chunk(event)
                count = counts.of_event(len(event.token_ids))
                if told is not None:
                    yield {**start, "choices": [told], **count}
            elif isinstance(event, Totals) and (last := counts.last(event)) is not None:
                yield {**start, **last}
            event = await anext(events, None)


async def _whole(answer: _Answer) -> Response:
    more: dict[str, object] = {}
    async with aclosing(stream_choices(answer.asked)) as events:
        async for event in events:
            match event:
                case Delta():
                    answer.choices[event.index].add(event)
                case PromptScores(scores=scores) if answer.body.prompt_logprobs is not None:
                    more["prompt_logprobs"] = prompt_logprobs(scores, answer.names)
                case Totals():
                    more["usage"] = usage(event)
    if answer.body.return_token_ids:
        more["prompt_token_ids"] = answer.asked.prompts[0].token_ids
    return await whole_answer(answer.head("chat.completion"), answer.choices, more)
