"""Answers shared by endpoints: JSON fields, usage, choices (streamed or complete), and logprobs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol, Self

from pydantic_core import to_json
from starlette.responses import Response

from splitserve_gateway.generation import (
    Delta,
    PromptScores,
    TextRequest,
    Totals,
    gathered,
    stream_choices,
)
from splitserve_gateway.http import event_stream, invalid
from splitserve_gateway.schemas import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    StreamOptions,
)
from splitserve_text import (
    Detokenizer,
    Tokenizer,
    TokenLogprob,
    TopLogprob,
)

Json = dict[str, object]

_IGNORED_HEADER = "x-splitserve-ignored-fields"
_MAX_IGNORED_NAMES = 64


def head(prefix: str, kind: str, request: TextRequest) -> Json:
    """Returns the fields that every answer and every event begins with."""
    return {
        "id": f"{prefix}-{request.answer_id}",
        "object": kind,
        "created": request.origin.created_s,
        "model": request.model_name,
        "system_fingerprint": f"fp_{request.served.model.digest[:12]}",
    }


def usage(totals: Totals) -> Json:
    """Returns the field `usage`."""
    return {
        "prompt_tokens": totals.num_prompt_tokens,
        "completion_tokens": totals.num_output_tokens,
        "total_tokens": totals.num_prompt_tokens + totals.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.num_cached_tokens},
    }


def identified(
    events: AsyncGenerator[object, None], request: TextRequest
) -> AsyncGenerator[object, None]:
    """Returns the events of an answer with ids by which the stream can be resumed, if it can be."""
    return events if request.place is None else request.place.identified(events)


class StreamUsage:
    """Token counts in a stream, as `stream_options` asks for them."""

    def __init__(self, options: StreamOptions | None, num_prompt_tokens: int) -> None:
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._is_wanted = options is not None and options.include_usage
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0

    def of_event(self, num_tokens: int) -> Json:
        """Returns the usage field of an event with `num_tokens` new tokens; empty if not wanted."""
        self._num_output_tokens += num_tokens
        if self._is_continuous:
            return {"usage": usage(Totals(self._num_prompt_tokens, self._num_output_tokens))}
        return {"usage": None} if self._is_wanted else {}

    def last(self, totals: Totals) -> Json | None:
        """Returns the usage event after all choices; None if not wanted."""
        return {"choices": [], "usage": usage(totals)} if self._is_wanted else None


async def listed_answer(start: Json, name: str, items: Iterable[Json], more: Json) -> Response:
    """Returns the answer with a field `name` of `items`, and the fields `more`.

    `start`, `more`: not empty. Encodes one item at a time, so the event loop runs in between: items
    may have megabytes of logprobs, or be thousands of vectors.
    """
    pieces = [to_json(start)[:-1], f',"{name}":['.encode()]
    for number, item in enumerate(items):
        pieces += [b"," if number else b"", to_json(item)]
        await asyncio.sleep(0)
    pieces += [b"],", to_json(more)[1:]]
    return Response(b"".join(pieces), media_type="application/json")


def with_notes(response: Response, body: ApiRequest) -> Response:
    """Adds a header to `response` that lists the ignored fields of `body`; returns `response`."""
    if ignored := body.ignored:
        more = ["..."] if len(ignored) > _MAX_IGNORED_NAMES else []
        response.headers[_IGNORED_HEADER] = ", ".join(ignored[:_MAX_IGNORED_NAMES] + more)
    return response


# -- Answers of choices (chats and completions), streamed or complete ------------------------------


def check_streaming(body: ChatRequest | CompletionRequest) -> None:
    """Raises ApiError for fields that exclude `stream`, or that need it."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options requires stream", "stream_options")


class Choice(Protocol):
    """Choice of an answer, streamed (`first_chunk`, `chunks`) or complete (`add`, `whole`).

    `prompt_scores`: logprobs of the prompt's tokens except the first; set once known.
    """

    prompt_scores: tuple[TokenLogprob, ...]

    def first_chunk(self) -> Json | None:
        """Returns the opening event of the choice; None if the format defines no opening event."""

    def chunks(self, delta: Delta) -> Sequence[Json]:
        """Returns the events for `delta`; empty if `delta` has nothing to report."""

    def add(self, delta: Delta) -> None:
        """Adds `delta` to the complete choice."""

    def whole(self) -> Json:
        """Returns the complete choice as JSON."""

    async def end_fields(self) -> Json:
        """Returns further fields of the ended choice, which take time to find."""

    def extra_fields(self) -> Json:
        """Returns the answer's further fields. Called for the first choice only."""


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """Names of an endpoint's answers and events.

    `scores_field`: the field that asks for logprobs of output tokens.
    """

    id_prefix: str
    whole: str
    event: str
    scores_field: str


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """Answer that consists of the choices of a text request.

    `drops_output`: the output token was computed only for the prompt's logprobs.
    """

    kind: AnswerKind
    body: SamplingFields
    request: TextRequest
    choices: Sequence[Choice]
    drops_output: bool = False

    async def response(self) -> Response:
        """Returns the response, streamed if the body asks for it.

        Raises ApiError and SplitserveError.
        """
        if self.body.stream:
            response = await event_stream(identified(self._chunks(), self.request))
        else:
            response = await self._whole()
        return with_notes(response, self.body)

    def _head(self, kind: str) -> Json:
        return head(self.kind.id_prefix, kind, self.request)

    async def _chunks(self) -> AsyncGenerator[object, None]:
        start = self._head(self.kind.event)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.request.prompts)
        counts = StreamUsage(self.body.stream_options, num_prompt_tokens)
        async with aclosing(self._events()) as events:
            # A refusal must come before the first event.
            event: Delta | Totals | None = await anext(events)
            extra = self.choices[0].extra_fields()
            for choice in self.choices:
                if (first := choice.first_chunk()) is not None:
                    yield {**start, "choices": [first], **counts.of_event(0), **extra}
                    extra = {}
            while event is not None:
                if isinstance(event, Delta):
                    count = counts.of_event(len(event.token_ids))
                    chunks = self.choices[event.index].chunks(event)
                    if event.end is not None:
                        chunks[-1] |= await self.choices[event.index].end_fields()
                    for chunk in chunks:
                        yield {**start, "choices": [chunk], **count}
                elif (last := counts.last(event)) is not None:
                    yield {**start, **last}
                event = await anext(events, None)

    async def _whole(self) -> Response:
        totals = Totals()
        async with aclosing(gathered(self._events(), self.kind.scores_field)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    self.choices[event.index].add(event)
                else:
                    totals = event
        more = {"usage": usage(totals), **self.choices[0].extra_fields()}
        ends = [await choice.end_fields() for choice in self.choices]
        whole = (choice.whole() | end for choice, end in zip(self.choices, ends, strict=True))
        return await listed_answer(self._head(self.kind.whole), "choices", whole, more)

    async def _events(self) -> AsyncGenerator[Delta | Totals, None]:
        """Yields deltas and totals. Sets the prompt scores of the choices they belong to."""
        num_each = self.request.params.num_completions
        async with aclosing(stream_choices(self.request)) as events:
            async for event in events:
                if isinstance(event, PromptScores):
                    first = event.prompt_index * num_each
                    for choice in self.choices[first : first + num_each]:
                        choice.prompt_scores = event.scores
                else:
                    yield _without_output(event) if self.drops_output else event


def _without_output(event: Delta | Totals) -> Delta | Totals:
    if isinstance(event, Delta):
        return Delta(event.index, "", end=event.end)
    return replace(event, num_output_tokens=0)


# -- Logprobs in the formats of completions, of chats, and of vLLM's `prompt_logprobs` -------------

# Stands for minus infinity and NaN, which JSON cannot express.
_LEAST_LOGPROB = -9999.0


class TokenNames:
    """Names of tokens in logprobs: the text, or `token_id:N` on request or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


class CompletionLogprobs:
    """Field `logprobs` of one choice of a completion, built incrementally.

    `detokenizer`: finds where in the choice's text each token begins; None without text.
    """

    def __init__(self, names: TokenNames, detokenizer: Detokenizer | None, offset: int = 0) -> None:
        self._names = names
        self._detokenizer = detokenizer
        self._offset = offset

    def fork(self) -> Self:
        """Returns a copy for another choice that continues from here."""
        other = copy(self)
        if self._detokenizer is not None:
            other._detokenizer = self._detokenizer.fork()
        return other

    def unscored(self, token_id: int) -> dict[str, list[object]]:
        """Returns the entry of a prompt's first token, which has no logprob."""
        shape: dict[str, list[object]] = {
            "tokens": [self._names.name(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._advance(token_id)
        return shape

    def shape(self, scores: Iterable[TokenLogprob]) -> dict[str, list[object]]:
        """Returns the entries of the next tokens."""
        tokens: list[object] = []
        logprobs: list[object] = []
        tops: list[object] = []
        offsets: list[object] = []
        for score in scores:
            tokens.append(self._names.name(score.token_id))
            logprobs.append(finite(score.logprob))
            tops.append(self._top(score))
            offsets.append(self._offset)
            self._advance(score.token_id)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _advance(self, token_id: int) -> None:
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push((token_id,)))

    def _top(self, score: TokenLogprob) -> dict[str, float]:
        """Returns the logprobs of the token and its alternatives by name.

        Of tokens with the same name the more probable counts.
        """
        own = TopLogprob(score.token_id, score.logprob)
        top: dict[str, float] = {}
        for entry in (own, *score.top):
            name = self._names.name(entry.token_id)
            top[name] = max(top.get(name, -math.inf), finite(entry.logprob))
        return top


def joined(shapes: Sequence[dict[str, list[object]]]) -> dict[str, list[object]]:
    """Concatenates the entries of consecutive `shapes`."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [entry for shape in shapes for entry in shape[key]] for key in keys}


def chat_logprobs(scores: Iterable[TokenLogprob], names: TokenNames) -> list[dict[str, object]]:
    """Returns the field `logprobs.content` of a chat."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": names.name(token_id),
            "logprob": finite(logprob),
            "bytes": names.bytes_of(token_id),
        }

    return [
        {
            **entry(score.token_id, score.logprob),
            "top_logprobs": [entry(top.token_id, top.logprob) for top in score.top],
        }
        for score in scores
    ]


def prompt_logprobs(scores: Iterable[TokenLogprob], names: TokenNames) -> list[object]:
    """Returns vLLM's field `prompt_logprobs`: null for the first token, others by token id."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        name = names.name(token_id)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": name}

    shapes: list[object] = [None]
    for score in scores:
        shape = {str(score.token_id): entry(score.token_id, score.logprob, score.rank)}
        for rank, top in enumerate(score.top, 1):
            shape.setdefault(str(top.token_id), entry(top.token_id, top.logprob, rank))
        shapes.append(shape)
    return shapes


def finite(logprob: float) -> float:
    """Returns `logprob` as a number that JSON can express."""
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB
