"""`POST /v1/responses`: the Responses API, without anything that a server would have to keep."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve_client import SplitserveError
from splitserve_gateway.endpoints.chat import start_chat
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.logprobs import TokenNames
from splitserve_gateway.endpoints.response_output import ResponseOutput
from splitserve_gateway.endpoints.shapes import Json, with_notes
from splitserve_gateway.generation.choices import Delta, Event, TextRequest, Totals, stream_choices
from splitserve_gateway.generation.field_names import response_fields
from splitserve_gateway.generation.request_ids import answer_id
from splitserve_gateway.generation.response_chats import chat_request
from splitserve_gateway.generation.scores import gathered
from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.http.errors import ApiError, error_of, invalid
from splitserve_gateway.http.event_stream import NAMED_EVENTS, event_stream
from splitserve_gateway.schemas.responses import ResponsesRequest

router = APIRouter()

_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answers the input."""
    gateway = gateway_of(request)
    async with gateway.reading(request, ResponsesRequest) as body:
        answer = await _answer(gateway, body)
    if body.stream:
        response = await event_stream(_events(answer), NAMED_EVENTS)
    else:
        response = JSONResponse(await _whole(answer))
    return with_notes(response, body)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is asked, and what comes of it. `head`: what is known from the start."""

    asked: TextRequest
    output: ResponseOutput
    head: Json

    def shape(self, status: str, totals: Totals | None = None, **changes: object) -> Json:
        """The response as it is now."""
        return {
            **self.head,
            "status": status,
            "output": list(self.output.items),
            "usage": None if totals is None else _usage(totals, self.output.num_reasoning_tokens),
            **changes,
        }

    def ended(self, totals: Totals) -> Json:
        """The response once it has ended."""
        reason = self.output.end_reason
        if reason == "stop":
            return self.shape("completed", totals, completed_at=int(time.time()))
        details = {"reason": "max_output_tokens" if reason == "length" else reason}
        return self.shape("incomplete", totals, incomplete_details=details)


async def _answer(gateway: Gateway, body: ResponsesRequest) -> _Answer:
    if body.top_logprobs is not None and not body.wants_logprobs:
        raise invalid("top_logprobs needs message.output_text.logprobs in include", "top_logprobs")
    chat = await asyncio.to_thread(chat_request, body)
    generation = await start_chat(gateway, chat, response_fields(chat))
    asked = generation.asked
    tokenizer = tokenizer_of(asked.served)
    output = ResponseOutput(
        generation.plan,
        TokenNames(tokenizer),
        tokenizer.detokenizer(skip_special_tokens=asked.rules.skip_special_tokens),
        wants_logprobs=body.wants_logprobs,
    )
    return _Answer(asked, output, _head(body, asked))


def _head(body: ResponsesRequest, asked: TextRequest) -> Json:
    choice = body.tool_choice
    return {
        "id": f"resp_{answer_id(body.request_id)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": asked.served.model.name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": _or_1(asked.params.temperature),
        "top_p": _or_1(asked.params.top_p),
        "presence_penalty": asked.params.presence_penalty or 0.0,
        "frequency_penalty": asked.params.frequency_penalty or 0.0,
        "tool_choice": (choice or "auto")
        if isinstance(choice, str | None)
        else choice.model_dump(),
        "tools": [tool.model_dump(include=_TOOL_FIELDS) for tool in body.tools or ()],
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "auto",
        "store": False,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _or_1(value: float | None) -> float:
    return 1.0 if value is None else value


def _usage(totals: Totals, num_reasoning_tokens: int) -> Json:
    return {
        "input_tokens": totals.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": totals.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": totals.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": totals.num_prompt_tokens + totals.num_output_tokens,
    }


async def _events(answer: _Answer) -> AsyncGenerator[object, None]:
    numbers = itertools.count()
    # The last event has all of it.
    async with aclosing(gathered(stream_choices(answer.asked), "top_logprobs")) as events:
        # What is refused is refused before anything is told.
        event: Event | None = await anext(events)
        for name in ("created", "in_progress"):
            yield _numbered(numbers, name, response=answer.shape("in_progress"))
        try:
            while event is not None:
                match event:
                    case Delta():
                        for told in answer.output.push(event):
                            yield {**told, "sequence_number": next(numbers)}
                    case Totals():
                        whole = answer.ended(event)
                        yield _numbered(numbers, str(whole["status"]), response=whole)
                event = await anext(events, None)
        except (SplitserveError, ApiError) as error:
            failure = {"code": "server_error", "message": error_of(error).message}
            yield _numbered(numbers, "failed", response=answer.shape("failed", error=failure))


def _numbered(numbers: Iterator[int], name: str, **fields: object) -> Json:
    return {"type": f"response.{name}", **fields, "sequence_number": next(numbers)}


async def _whole(answer: _Answer) -> Json:
    totals = Totals()
    async with aclosing(gathered(stream_choices(answer.asked), "top_logprobs")) as events:
        async for event in events:
            match event:
                case Delta():
                    for _ in answer.output.push(event):
                        pass
                case Totals():
                    totals = event
    return answer.ended(totals)
