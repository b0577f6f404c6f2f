"""Answers that are choices, those of chats and of completions: streamed, or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.responses import Response

from splitserve_client import TokenLogprob
from splitserve_gateway.endpoints.shapes import (
    Json,
    StreamUsage,
    head,
    usage,
    whole_answer,
    with_notes,
)
from splitserve_gateway.generation.choices import (
    Delta,
    PromptScores,
    TextRequest,
    Totals,
    stream_choices,
)
from splitserve_gateway.generation.scores import gathered
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.http.event_stream import event_stream
from splitserve_gateway.schemas.chat import ChatRequest
from splitserve_gateway.schemas.completions import CompletionRequest
from splitserve_gateway.schemas.sampling import SamplingFields


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
