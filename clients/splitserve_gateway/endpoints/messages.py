"""Messages endpoints of Anthropic's API, `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve_gateway.endpoints.chat import start_chat
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import Json, identified, with_notes
from splitserve_gateway.generation import (
    ChoiceEnd,
    Delta,
    Event,
    TextRequest,
    Totals,
    chat_of_messages,
    check_generates,
    encode_chat,
    generates,
    message_fields,
    naming,
    renamed,
    stream_choices,
    tools_of,
)
from splitserve_gateway.grammars import AnswerPlan
from splitserve_gateway.http import MESSAGE_EVENTS, ApiError, event_stream
from splitserve_gateway.schemas import CountTokensRequest, MessagesRequest
from splitserve_text import (
    ContentDelta,
    Draw,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from splitserve_text import (
    Delta as Part,
)

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answers a chat in the form of Anthropic's API."""
    gateway = gateway_of(request)
    async with gateway.reading(request, MessagesRequest) as body:
        answer = await _answer(gateway, body)
    if body.stream:
        response = await event_stream(identified(_events(answer), answer.request), MESSAGE_EVENTS)
    else:
        response = JSONResponse(await _whole(answer))
    return with_notes(response, body)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a chat, without an answer."""
    gateway = gateway_of(request)
    async with gateway.reading(request, CountTokensRequest) as body:
        num_tokens = await _count(gateway, body)
    return with_notes(JSONResponse({"input_tokens": num_tokens}), body)


async def _count(gateway: Gateway, body: CountTokensRequest) -> int:
    chat = await asyncio.to_thread(chat_of_messages, body, None)
    with naming(message_fields(body)):
        served = (await gateway.listed(body.model, generates)).served
        check_generates(served.model)
        async with gateway.tokenizer_turn(is_small=False):
            use = await tools_of(chat)
            return (await encode_chat(chat, served, use.template_tools)).num_tokens


@dataclass(frozen=True, slots=True)
class _Answer:
    """Text request of a message, and its content so far. `head`: fields known from the start."""

    request: TextRequest
    content: MessageContent
    head: Json

    def message(self, totals: Totals) -> Json:
        """Returns the message as JSON in its present state, without what a check finds."""
        blocks = {"content": self.content.blocks}
        return {**self.head, **blocks, **self.content.stop(), "usage": _usage(totals)}


async def _answer(gateway: Gateway, body: MessagesRequest) -> _Answer:
    chat = await asyncio.to_thread(chat_of_messages, body, body.max_tokens)
    fields = message_fields(body)
    generation = await start_chat(gateway, chat, fields)
    body.add_ignored([renamed(path, fields) for path in generation.plan.ignored])
    head: Json = {
        "id": f"msg_{generation.request.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": generation.request.model_name,
    }
    draw = generation.request.origin.draw(0)
    return _Answer(generation.request, MessageContent(generation.plan, draw), head)


def _usage(totals: Totals) -> Json:
    return {
        "input_tokens": totals.num_prompt_tokens - totals.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.num_cached_tokens,
        "output_tokens": totals.num_output_tokens,
    }


async def _events(answer: _Answer) -> AsyncGenerator[object, None]:
    async with aclosing(stream_choices(answer.request)) as events:
        # A refusal must come before the first event.
        event: Event | None = await anext(events)
        # Which tokens are cached is known at the end.
        num_prompt_tokens = sum(prompt.num_tokens for prompt in answer.request.prompts)
        message = answer.message(Totals(num_prompt_tokens))
        yield {"type": "message_start", "message": message}
        while event is not None:
            match event:
                case Delta():
                    for each in answer.content.push(event):
                        yield each
                case Totals():
                    stop = answer.content.stop() | await answer.content.finding.fields()
                    yield {"type": "message_delta", "delta": stop, "usage": _usage(event)}
                    yield {"type": "message_stop"}
            event = await anext(events, None)


async def _whole(answer: _Answer) -> Json:
    totals = Totals()
    async with aclosing(stream_choices(answer.request)) as events:
        async for event in events:
            match event:
                case Delta():
                    for _ in answer.content.push(event):
                        pass
                case Totals():
                    totals = event
    return answer.message(totals) | await answer.content.finding.fields()


# -- Content blocks of a message, and their events -------------------------------------------------


class MessageContent:
    """Content of a message. `blocks`: ended blocks; events report each block from its first token.

    `finding`: check of the content. Input of a tool call that was cut is what a client of the
    stream reads from it. `draw`: chooses the characters of ids.
    """

    def __init__(self, plan: AnswerPlan, draw: Draw = secrets.choice) -> None:
        self._parser = plan.new_parser(draw)
        self._block: _Block | None = None
        self._end: ChoiceEnd | None = None
        self.blocks: list[Json] = []
        self.finding = plan.new_finding()

    def push(self, delta: Delta) -> Iterator[Json]:
        """Yields the events for `delta`. Content changes only as the events are consumed.

        Raises ApiError if an operator ended the request.
        """
        parts = self._parser.push(delta.text) if delta.text else []
        if delta.end is not None:
            parts += self._parser.finish()
        self.finding.add(parts)
        for part in parts:
            yield from self._take(part)
        if delta.end is not None:
            self._end = delta.end
            yield from self._end_block()
            if delta.end.reason == "abort":
                message = "an operator ended the request"
                raise ApiError(422, "invalid_request_error", message, code="aborted")

    def stop(self) -> Json:
        """Returns the fields about the end: null before it."""
        sequence = None if self._end is None else self._end.stop_reason
        return {
            "stop_reason": self._reason(),
            # A stop token is no text.
            "stop_sequence": sequence if isinstance(sequence, str) else None,
        }

    def _reason(self) -> str | None:
        if self._end is None:
            return None
        if self._end.reason == "length":
            return "max_tokens"
        if isinstance(self._end.stop_reason, str):
            return "stop_sequence"
        has_calls = any(block["type"] == "tool_use" for block in self.blocks)
        return "tool_use" if has_calls else "end_turn"

    def _take(self, part: Part) -> Iterator[Json]:
        match part:
            case ContentDelta(text):
                yield from self._continue("text", text)
            case ReasoningDelta(text):
                yield from self._continue("thinking", text)
            case ToolCallStart(_, call_id, name):
                yield from self._begin("tool_use", {"id": call_id, "name": name})
            case ToolCallArguments(_, text):
                assert self._block is not None, "a call has begun"
                yield self._block.add(text)
            case _:
                assert_never(part)

    def _continue(self, kind: _Kind, text: str) -> Iterator[Json]:
        if self._block is None or self._block.kind != kind:
            yield from self._begin(kind, {})
        assert self._block is not None, "it has begun"
        yield self._block.add(text)

    def _begin(self, kind: _Kind, head: Json) -> Iterator[Json]:
        yield from self._end_block()
        self._block = _Block(len(self.blocks), kind, head)
        yield self._block.start()

    def _end_block(self) -> Iterator[Json]:
        if self._block is not None:
            yield from self._block.end()
            self.blocks.append(self._block.whole())
            self._block = None


_Kind = Literal["text", "thinking", "tool_use"]
# Type and field of a block's increments.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(frozen=True, slots=True)
class _Block:
    """Block that has begun. `index`: its position. `head`: further fields of its kind."""

    index: int
    kind: _Kind
    head: Json
    pieces: list[str] = field(default_factory=list)

    def start(self) -> Json:
        block = self._shape("", "")
        return {"type": "content_block_start", "index": self.index, "content_block": block}

    def add(self, text: str) -> Json:
        """Adds `text`; returns its event."""
        self.pieces.append(text)
        kind, name = _DELTAS[self.kind]
        return self._delta({"type": kind, name: text})

    def end(self) -> Iterator[Json]:
        if self.kind == "thinking":
            signature = _signature("".join(self.pieces))
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": self.index}

    def whole(self) -> Json:
        """Returns the block as JSON."""
        text = "".join(self.pieces)
        return self._shape(text, _signature(text))

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def _shape(self, text: str, signature: str) -> Json:
        match self.kind:
            case "text":
                return {"type": "text", "text": text}
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": signature}
            case "tool_use":
                return {"type": "tool_use", **self.head, "input": _input(text)}
            case _:
                assert_never(self.kind)


def _signature(thinking: str) -> str:
    """Returns a signature of reasoning: clients drop blocks without one. Nobody checks it."""
    return hashlib.sha256(thinking.encode(errors="surrogatepass")).hexdigest()


def _input(arguments: str) -> Json:
    """Returns the arguments of a call as an object; of cut JSON, what is complete.

    Text that is no JSON object is wrapped, as Anthropic advises for results of such calls.
    """
    try:
        parsed: Any = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
        json.dumps(parsed, allow_nan=False)  # 1e999 is infinite, which JSON cannot say
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}
