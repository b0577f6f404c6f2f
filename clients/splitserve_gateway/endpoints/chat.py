"""`POST /v1/chat/completions`: the next message of a chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import StreamUsage, head, usage, with_notes
from splitserve_gateway.generation.chat_prompts import encode_chat
from splitserve_gateway.generation.choices import Delta, Event, TextRequest, Totals, stream_choices
from splitserve_gateway.generation.sampling import sampling_params
from splitserve_gateway.generation.text_requests import text_request
from splitserve_gateway.http.event_stream import event_stream
from splitserve_gateway.schemas.chat import ChatRequest

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a chat."""
    gateway = gateway_of(request)
    body = await gateway.read(request, ChatRequest)
    asked = await _text_request(gateway, body)
    events = stream_choices(asked)
    if body.stream:
        response = await event_stream(_chunks(body, asked, events))
    else:
        response = JSONResponse(await _whole(body, asked, events))
    return with_notes(response, body)


async def _text_request(gateway: Gateway, body: ChatRequest) -> TextRequest:
    upstream, served = gateway.fleet.choose(body.model)
    prompt = await encode_chat(body, served)
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = sampling_params(
        body,
        served,
        max_tokens=max_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return await text_request(gateway.config, upstream, served, body, params, [prompt])


async def _chunks(
    body: ChatRequest, asked: TextRequest, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[object, None]:
    start = head("chatcmpl", "chat.completion.chunk", body, asked.served)
    counts = StreamUsage(body.stream_options, len(asked.prompts[0].token_ids))
    async with aclosing(events):
        first = await anext(events)
        for index in range(asked.params.num_completions):
            delta: dict[str, object] = {"role": "assistant", "content": ""}
            yield {**start, "choices": [_chunk_choice(index, delta)], **counts.of_event(0)}
        event: Event | None = first
        while event is not None:
            if isinstance(event, Delta):
                for choice in _choices_of(event):
                    yield {**start, "choices": [choice], **counts.of_event(len(event.token_ids))}
            elif isinstance(event, Totals) and (last := counts.last(event)) is not None:
                yield {**start, **last}
            event = await anext(events, None)


def _choices_of(event: Delta) -> list[dict[str, object]]:
    choices = []
    if event.text:
        choices.append(_chunk_choice(event.index, {"content": event.text}))
    if event.end is not None:
        choices.append(_chunk_choice(event.index, {}, event.end.reason))
    return choices


def _chunk_choice(
    index: int, delta: dict[str, object], finish_reason: str | None = None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


async def _whole(
    body: ChatRequest, asked: TextRequest, events: AsyncGenerator[Event, None]
) -> dict[str, object]:
    texts: list[list[str]] = [[] for _ in range(asked.params.num_completions)]
    reasons: list[str | None] = [None] * len(texts)
    totals = Totals()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                texts[event.index].append(event.text)
                if event.end is not None:
                    reasons[event.index] = event.end.reason
            elif isinstance(event, Totals):
                totals = event
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(pieces), "refusal": None},
            "logprobs": None,
            "finish_reason": reasons[index],
        }
        for index, pieces in enumerate(texts)
    ]
    start = head("chatcmpl", "chat.completion", body, asked.served)
    return {**start, "choices": choices, "usage": usage(totals)}
