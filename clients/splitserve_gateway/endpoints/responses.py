"""Responses endpoint, `POST /v1/responses`. Stateless: the server stores no responses."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import string
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve_client import (
    SplitserveError,
)
from splitserve_gateway.endpoints.chat import start_chat
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import (
    Json,
    TokenNames,
    chat_logprobs,
    identified,
    with_notes,
)
from splitserve_gateway.generation import (
    Delta,
    Event,
    TextRequest,
    Totals,
    chat_request,
    gathered,
    renamed,
    response_fields,
    stream_choices,
    tokenizer_of,
)
from splitserve_gateway.grammars import AnswerPlan
from splitserve_gateway.http import NAMED_EVENTS, ApiError, error_of, event_stream, invalid
from splitserve_gateway.schemas import ResponsesRequest
from splitserve_text import (
    ContentDelta,
    Detokenizer,
    Draw,
    ReasoningDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStart,
)
from splitserve_text import (
    Delta as Part,
)

router = APIRouter()

_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answers the input."""
    gateway = gateway_of(request)
    async with gateway.reading(request, ResponsesRequest) as body:
        answer = await _answer(gateway, body)
    if body.stream:
        response = await event_stream(identified(_events(answer), answer.request), NAMED_EVENTS)
    else:
        response = JSONResponse(await _whole(answer))
    return with_notes(response, body)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Text request of a response, and its output so far. `head`: fields known from the start."""

    request: TextRequest
    output: ResponseOutput
    head: Json

    def shape(self, status: str, totals: Totals | None = None, **changes: object) -> Json:
        """Returns the response as JSON in its present state.

        `changes`: fields that replace others.
        """
        return {
            **self.head,
            "status": status,
            "output": list(self.output.items),
            "usage": None if totals is None else _usage(totals, self.output.num_reasoning_tokens),
            **changes,
        }

    async def ended(self, totals: Totals) -> Json:
        """Returns the ended response as JSON, completed or incomplete."""
        found = await self.output.finding.fields()
        reason = self.output.end_reason
        if reason == "stop":
            return self.shape("completed", totals, completed_at=int(time.time()), **found)
        details = {"reason": "max_output_tokens" if reason == "length" else reason}
        return self.shape("incomplete", totals, incomplete_details=details, **found)


async def _answer(gateway: Gateway, body: ResponsesRequest) -> _Answer:
    if body.top_logprobs is not None and not body.wants_logprobs:
        message = "top_logprobs requires message.output_text.logprobs in include"
        raise invalid(message, "top_logprobs")
    chat = await asyncio.to_thread(chat_request, body)
    fields = response_fields(body, chat)
    generation = await start_chat(gateway, chat, fields)
    body.add_ignored([renamed(path, fields) for path in generation.plan.ignored])
    request = generation.request
    tokenizer = tokenizer_of(request.served)
    output = ResponseOutput(
        generation.plan,
        TokenNames(tokenizer),
        tokenizer.detokenizer(skip_special_tokens=request.rules.skip_special_tokens),
        wants_logprobs=body.wants_logprobs,
        draw=request.origin.draw(0),
    )
    return _Answer(request, output, _head(body, request))


def _head(body: ResponsesRequest, request: TextRequest) -> Json:
    choice = body.tool_choice
    return {
        "id": f"resp_{request.answer_id}",
        "object": "response",
        "created_at": request.origin.created_s,
        "completed_at": None,
        "model": request.model_name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": _or_1(request.params.temperature),
        "top_p": _or_1(request.params.top_p),
        "presence_penalty": request.params.presence_penalty or 0.0,
        "frequency_penalty": request.params.frequency_penalty or 0.0,
        "tool_choice": (choice or "auto")
        if isinstance(choice, str | None)
        else choice.model_dump(),
        "tools": [tool.model_dump(include=_TOOL_FIELDS) for tool in body.own_tools.values()],
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
    # Bounded, since the last event repeats the whole output.
    async with aclosing(gathered(stream_choices(answer.request), "top_logprobs")) as events:
        # A refusal must come before the first event.
        event: Event | None = await anext(events)
        for name in ("created", "in_progress"):
            yield _numbered(numbers, name, response=answer.shape("in_progress"))
        try:
            while event is not None:
                match event:
                    case Delta():
                        for item in answer.output.push(event):
                            yield {**item, "sequence_number": next(numbers)}
                    case Totals():
                        whole = await answer.ended(event)
                        yield _numbered(numbers, str(whole["status"]), response=whole)
                event = await anext(events, None)
        except (SplitserveError, ApiError) as error:
            failure = {"code": "server_error", "message": error_of(error).message}
            yield _numbered(numbers, "failed", response=answer.shape("failed", error=failure))


def _numbered(numbers: Iterator[int], name: str, **fields: object) -> Json:
    return {"type": f"response.{name}", **fields, "sequence_number": next(numbers)}


async def _whole(answer: _Answer) -> Json:
    totals = Totals()
    async with aclosing(gathered(stream_choices(answer.request), "top_logprobs")) as events:
        async for event in events:
            match event:
                case Delta():
                    for _ in answer.output.push(event):
                        pass
                case Totals():
                    totals = event
    return await answer.ended(totals)


# -- Output items of a response, and their events --------------------------------------------------


class ResponseOutput:
    """Output of a response. `items`: ended items; events report each item from its first token on.

    `finding`: check of the output. `detokenizer`: finds where in the text each token begins. Which
    tokens are reasoning, and which have logprobs, does not depend on how many tokens arrived at
    once. `draw`: chooses the characters of ids.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        names: TokenNames,
        detokenizer: Detokenizer,
        *,
        wants_logprobs: bool,
        draw: Draw = secrets.choice,
    ) -> None:
        self._parser = plan.new_parser(draw)
        self._draw = draw
        self._names = names
        self._detokenizer = detokenizer
        self._wants_logprobs = wants_logprobs
        self._item: _Item | None = None
        self._scores: list[tuple[int, TokenLogprob]] = []
        self._starts: list[int] = []  # character offsets of tokens that may be reasoning
        self._num_chars = 0
        self.items: list[Json] = []
        self.finding = plan.new_finding()
        self.end_reason = ""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens that begin in the reasoning or its marks.

        0 until reasoning has ended.
        """
        end = self._parser.num_reasoning_chars
        return 0 if end is None else sum(start < end for start in self._starts)

    def push(self, delta: Delta) -> Iterator[Json]:
        """Yields the events for `delta`. Output changes only as the events are consumed."""
        starts = self._starts_of(delta.token_ids)
        if self._wants_logprobs:
            self._scores.extend(zip(starts, delta.logprobs, strict=True))
        parts = self._parser.push(delta.text) if delta.text else []
        if delta.end is not None:
            parts += self._parser.finish()
            self.end_reason = delta.end.reason
        self.finding.add(parts)
        for part in parts:
            yield from self._take(part)
        if delta.end is not None:
            if self._item is None and not self.items:
                yield from self._begin(_Text(0, self._draw))
            yield from self._end("completed" if delta.end.reason == "stop" else "incomplete")

    def _starts_of(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the character offset of each token, exact until the reasoning ends.

        Later tokens get the offset of the reasoning's end.
        """
        end = self._parser.num_reasoning_chars
        if end is not None:
            return [end] * len(token_ids)
        starts = []
        for token_id in token_ids:
            starts.append(self._num_chars)
            self._num_chars += len(self._detokenizer.push((token_id,)))
        self._starts += starts
        return starts

    def _take(self, part: Part) -> Iterator[Json]:
        match part:
            case ContentDelta(text):
                if not isinstance(self._item, _Text):
                    yield from self._begin(_Text(self._next_index, self._draw))
                scores = self._shaped_scores()
                assert isinstance(self._item, _Text), "it has begun"
                yield self._item.add(text, scores)
            case ReasoningDelta(text):
                if not isinstance(self._item, _Reasoning):
                    yield from self._begin(_Reasoning(self._next_index, self._draw))
                assert isinstance(self._item, _Reasoning), "it has begun"
                yield self._item.add(text)
            case ToolCallStart(_, call_id, name):
                yield from self._begin(_Call(self._next_index, self._draw, call_id, name))
                self._scores.clear()
            case ToolCallArguments(_, text):
                assert isinstance(self._item, _Call), "a call has begun"
                self._scores.clear()
                yield self._item.add(text)

    @property
    def _next_index(self) -> int:
        return len(self.items) + (self._item is not None)

    def _shaped_scores(self) -> list[Json]:
        reasoned = self._parser.num_reasoning_chars or 0
        scores = [score for start, score in self._scores if start >= reasoned]
        self._scores.clear()
        return chat_logprobs(scores, self._names)

    def _begin(self, item: _Item) -> Iterator[Json]:
        yield from self._end("completed")
        self._item = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Json]:
        if self._item is not None:
            yield from self._item.end(status)
            self.items.append(self._item.shape(status))
            self._item = None


class _Item:
    """Output item that has begun. `index`: its position in the output. `draw`: as of the output."""

    prefix = ""

    def __init__(self, index: int, draw: Draw) -> None:
        self.item_id = f"{self.prefix}_" + "".join(draw(string.hexdigits[:16]) for _ in range(32))
        self.place: Json = {"item_id": self.item_id, "output_index": index}
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self) -> Iterator[Json]:
        item = self.shape("in_progress")
        yield _event("output_item.added", output_index=self.place["output_index"], item=item)

    def end(self, status: str) -> Iterator[Json]:
        item = self.shape(status)
        yield _event("output_item.done", output_index=self.place["output_index"], item=item)

    def shape(self, status: str) -> Json:
        """Returns the item as JSON."""
        raise NotImplementedError


class _Text(_Item):
    prefix = "msg"

    def __init__(self, index: int, draw: Draw) -> None:
        super().__init__(index, draw)
        self._scores: list[Json] = []
        self._where = {**self.place, "content_index": 0}

    def begin(self) -> Iterator[Json]:
        yield from super().begin()
        yield _event("content_part.added", **self._where, part=self._part())

    def add(self, text: str, scores: list[Json]) -> Json:
        self.pieces.append(text)
        self._scores.extend(scores)
        return _event("output_text.delta", **self._where, delta=text, logprobs=scores)

    def end(self, status: str) -> Iterator[Json]:
        yield _event("output_text.done", **self._where, text=self.text, logprobs=self._scores)
        yield _event("content_part.done", **self._where, part=self._part())
        yield from super().end(status)

    def shape(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self._part()],
        }

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._scores),
        }


class _Reasoning(_Item):
    prefix = "rs"

    def __init__(self, index: int, draw: Draw) -> None:
        super().__init__(index, draw)
        self._where = {**self.place, "content_index": 0}

    def begin(self) -> Iterator[Json]:
        yield from super().begin()
        yield _event("content_part.added", **self._where, part=self._part())

    def add(self, text: str) -> Json:
        self.pieces.append(text)
        return _event("reasoning_text.delta", **self._where, delta=text)

    def end(self, status: str) -> Iterator[Json]:
        yield _event("reasoning_text.done", **self._where, text=self.text)
        yield _event("content_part.done", **self._where, part=self._part())
        yield from super().end(status)

    def shape(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "reasoning",
            "summary": [],
            "content": [] if status == "in_progress" else [self._part()],
            "status": status,
        }

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class _Call(_Item):
    prefix = "fc"

    def __init__(self, index: int, draw: Draw, call_id: str, name: str) -> None:
        super().__init__(index, draw)
        self._call_id = call_id
        self._name = name

    def add(self, text: str) -> Json:
        self.pieces.append(text)
        return _event("function_call_arguments.delta", **self.place, delta=text)

    def end(self, status: str) -> Iterator[Json]:
        done = {"name": self._name, "arguments": self.text}
        yield _event("function_call_arguments.done", **self.place, **done)
        yield from super().end(status)

    def shape(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }


def _event(kind: str, **fields: object) -> Json:
    return {"type": f"response.{kind}", **fields}
