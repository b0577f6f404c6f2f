"""Parts of answers that several endpoints have."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol, Self

from pydantic_core import to_json
from starlette.responses import Response

from splitserve_client import Detokenizer, Tokenizer, TokenLogprob, TopLogprob
from splitserve_gateway.generation.choices import (
    Delta,
    PromptScores,
    TextRequest,
    Totals,
    answer_id,
    stream_choices,
)
from splitserve_gateway.generation.text_requests import gathered
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.http.exchange import event_stream
from splitserve_gateway.schemas.base import ApiRequest, StreamOptions
from splitserve_gateway.schemas.chat import ChatRequest, CompletionRequest
from splitserve_gateway.schemas.sampling import SamplingFields
from splitserve_gateway.upstreams.upstream import Served

Json = dict[str, object]

_IGNORED_HEADER = "x-splitserve-ignored-fields"


def head(prefix: str, kind: str, body: SamplingFields, served: Served) -> Json:
    """What every answer, and every event of one, begins with."""
    return {
        "id": f"{prefix}-{answer_id(body.request_id)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.model.name,
        "system_fingerprint": f"fp_{served.model.digest[:12]}",
    }


def usage(totals: Totals) -> Json:
    """`usage`."""
    return {
        "prompt_tokens": totals.num_prompt_tokens,
        "completion_tokens": totals.num_output_tokens,
        "total_tokens": totals.num_prompt_tokens + totals.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.num_cached_tokens},
    }


class StreamUsage:
    """What `stream_options` asks to be told of token counts in a stream."""

    def __init__(self, options: StreamOptions | None, num_prompt_tokens: int) -> None:
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._is_wanted = options is not None and options.include_usage
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0

    def of_event(self, num_tokens: int) -> Json:
        """What an event that brings `num_tokens` has besides its choices."""
        self._num_output_tokens += num_tokens
        if self._is_continuous:
            return {"usage": usage(Totals(self._num_prompt_tokens, self._num_output_tokens))}
        return {"usage": None} if self._is_wanted else {}

    def last(self, totals: Totals) -> Json | None:
        """What the event after all choices has; None if there is to be none."""
        return {"choices": [], "usage": usage(totals)} if self._is_wanted else None


class WholeChoice(Protocol):
    """A choice, once all of it is there."""

    def whole(self) -> Json:
        """As JSON."""


async def whole_answer(start: Json, choices: Sequence[WholeChoice], more: Json) -> Response:
    """The answer with all its choices, and `more`, which is not empty.

    One choice after the other: they may have megabytes of logprobs.
    """
    pieces = [to_json(start)[:-1], b',"choices":[']
    for number, choice in enumerate(choices):
        pieces += [b"," if number else b"", to_json(choice.whole())]
        await asyncio.sleep(0)
    pieces += [b"],", to_json(more)[1:]]
    return Response(b"".join(pieces), media_type="application/json")


def with_notes(response: Response, body: ApiRequest) -> Response:
    """`response`, saying in a header which fields of `body` changed nothing."""
    if ignored := body.ignored:
        response.headers[_IGNORED_HEADER] = ", ".join(ignored)
    return response


# -- Answers that are choices, those of chats and of completions: streamed, or whole ---------------


def check_streaming(body: ChatRequest | CompletionRequest) -> None:
    """Raises ApiError for fields that do not go together with `stream`, or without it."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not streamed", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for stream only", "stream_options")


class Choice(Protocol):
    """One choice, told piece by piece (`first_chunk`, `chunk`) or gathered (`add`, `whole`).

    `prompt_scores`: of the prompt's tokens but the first, once they are known.
    """

    prompt_scores: tuple[TokenLogprob, ...]

    def first_chunk(self) -> Json | None:
        """The event that begins it; None if nothing does."""

    def chunk(self, delta: Delta) -> Json | None:
        """The event that tells `delta`; None if there is nothing to tell."""

    def add(self, delta: Delta) -> None:
        """Notes `delta` for the whole."""

    def whole(self) -> Json:
        """All that was noted."""

    def beside(self) -> Json:
        """What the answer has beside its choices, where this is the first of them."""


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """How answers of an endpoint, and events of these, are called.

    `scores_field`: the field that asks for scores of what is answered.
    """

    id_prefix: str
    whole: str
    event: str
    scores_field: str


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """What is asked, and the choices that come of it.

    `drops_output`: a token is computed only for the scores of the prompt.
    """

    kind: AnswerKind
    body: SamplingFields
    asked: TextRequest
    choices: Sequence[Choice]
    drops_output: bool = False

    async def response(self) -> Response:
        """Streamed if that is asked for. Raises ApiError and SplitserveError."""
        response = await (event_stream(self._chunks()) if self.body.stream else self._whole())
        return with_notes(response, self.body)

    def _head(self, kind: str) -> Json:
        return head(self.kind.id_prefix, kind, self.body, self.asked.served)

    async def _chunks(self) -> AsyncGenerator[object, None]:
        start = self._head(self.kind.event)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.asked.prompts)
        counts = StreamUsage(self.body.stream_options, num_prompt_tokens)
        async with aclosing(self._events()) as events:
            # What is refused is refused before anything is told.
            event: Delta | Totals | None = await anext(events)
            beside = self.choices[0].beside()
            for choice in self.choices:
                if (first := choice.first_chunk()) is not None:
                    yield {**start, "choices": [first], **counts.of_event(0), **beside}
                    beside = {}
            while event is not None:
                if isinstance(event, Delta):
                    told = self.choices[event.index].chunk(event)
                    count = counts.of_event(len(event.token_ids))
                    if told is not None:
                        yield {**start, "choices": [told], **count}
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
        more = {"usage": usage(totals), **self.choices[0].beside()}
        return await whole_answer(self._head(self.kind.whole), self.choices, more)

    async def _events(self) -> AsyncGenerator[Delta | Totals, None]:
        """What the choices gain; scores of prompts go to those it concerns."""
        num_each = self.asked.params.num_completions
        async with aclosing(stream_choices(self.asked)) as events:
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


# --------------------------------------------------------------------------------------------------
# Scores of tokens in the shapes of completions, of chats, and of vLLM's `prompt_logprobs`.

# What JSON has no number for.
_LEAST_LOGPROB = -9999.0


class TokenNames:
    """What tokens are called: their text, or `token_id:N`, as all are without a tokenizer."""

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
    """`logprobs` of one choice of a completion, piece by piece.

    `detokenizer`: says where in the choice's text each token begins; None where there is no text.
    """

    def __init__(self, names: TokenNames, detokenizer: Detokenizer | None, offset: int = 0) -> None:
        self._names = names
        self._detokenizer = detokenizer
        self._offset = offset

    def fork(self) -> Self:
        """Those of another choice that begins here."""
        other = copy(self)
        if self._detokenizer is not None:
            other._detokenizer = self._detokenizer.fork()
        return other

    def unscored(self, token_id: int) -> dict[str, list[object]]:
        """Of a prompt's first token, which nothing comes before."""
        shape: dict[str, list[object]] = {
            "tokens": [self._names.name(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._advance(token_id)
        return shape

    def shape(self, scores: Iterable[TokenLogprob]) -> dict[str, list[object]]:
        """Of the tokens that come next."""
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
        """The token itself and the best; of tokens with one text, the more probable."""
        own = TopLogprob(score.token_id, score.logprob)
        top: dict[str, float] = {}
        for entry in (own, *score.top):
            name = self._names.name(entry.token_id)
            top[name] = max(top.get(name, -math.inf), finite(entry.logprob))
        return top


def joined(shapes: Sequence[dict[str, list[object]]]) -> dict[str, list[object]]:
    """One shape of several that follow each other."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [entry for shape in shapes for entry in shape[key]] for key in keys}


def chat_logprobs(scores: Iterable[TokenLogprob], names: TokenNames) -> list[dict[str, object]]:
    """`logprobs.content` of a chat."""

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
    """The `prompt_logprobs` of vLLM: null for the first token, then by token id."""

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
    """`logprob` as JSON can say it."""
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB
