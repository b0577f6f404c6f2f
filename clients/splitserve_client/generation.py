"""Complete results of token requests and text requests."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from splitserve_client.errors import RequestFailed, ServerUnreachable
from splitserve_text import (
    End,
    Finish,
    FinishReason,
    Piece,
    ResumeTokenIds,
    SchedulingParams,
    SequenceFinish,
    TokenLogprob,
    Tokens,
    TraceContext,
    Usage,
)


class RequestOptions(TypedDict, total=False):
    """Options of `AsyncClient.generate`, which explains them."""

    request_id: str
    resume_token_ids: ResumeTokenIds
    scheduling: SchedulingParams | None
    encoder_token_ids: Sequence[int]
    encoder_features: bytes
    timeout_s: float | None
    model_digest: str
    trace_context: TraceContext


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion; `token_ids` excludes the tokens that the request was resumed with.

    `cumulative_logprob` and `score`: as in SequenceFinish.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Completions of a request by index; with `best_of` and beam search the best comes first."""

    completions: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first or only completion."""
        return self.completions[0].token_ids


async def collect_generation(
    events: AsyncIterator[Tokens | Finish], num_completions: int = 1
) -> Generation:
    """Reads `events` up to their Finish and returns the result. Raises the errors of `events`.

    A completion that was unfinished when the request was aborted is returned so far, as ABORTED.
    """
    parts = [_Parts() for _ in range(num_completions)]
    prompt_logprobs: list[TokenLogprob] = []
    async for event in events:
        if isinstance(event, Finish):
            completions = tuple(part.completion(index, event) for index, part in enumerate(parts))
            return Generation(completions, event.usage, tuple(prompt_logprobs))
        prompt_logprobs.extend(event.prompt_logprobs)
        parts.extend(_Parts() for _ in range(len(parts), event.index + 1))
        parts[event.index].add(event)
    raise ServerUnreachable("the stream ended without a finish")


@dataclass(slots=True)
class _Parts:
    """Completion under construction."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: SequenceFinish | None = None

    def add(self, tokens: Tokens) -> None:
        self.token_ids.extend(tokens.token_ids)
        self.logprobs.extend(tokens.logprobs)
        self.finish = tokens.finish or self.finish

    def completion(self, index: int, end: Finish) -> Completion:
        """Builds the completion.

        `end`: end of the request, which also is that of its only plain sequence.
        """
        finish = self.finish
        content = (index, tuple(self.token_ids), tuple(self.logprobs))
        if finish is None:
            return Completion(*content, end.reason, end.stop_token_id)
        return Completion(
            *content, finish.reason, finish.stop_token_id, finish.cumulative_logprob, finish.score
        )


@dataclass(frozen=True, slots=True)
class Pooled:
    """Vector of a text: float32 numbers."""

    vector: array[float]
    usage: Usage


async def collect_vector(events: AsyncIterator[Tokens | Finish]) -> Pooled:
    """Reads `events` up to their Finish and returns the vector.

    Raises the errors of `events`, and RequestFailed if the request was aborted.
    """
    async for event in events:
        if isinstance(event, Finish):
            if event.vector is None:
                raise RequestFailed(f"the request ended without a vector: {event.reason.value}")
            return Pooled(event.vector, event.usage)
    raise ServerUnreachable("the stream ended without a finish")


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """Completion. `stop_string`: the stop string that ended it, if any.

    `cumulative_logprob` and `score`: as in SequenceFinish.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    stop_string: str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class TextGeneration:
    """Completions of a request by index; with `best_of` and beam search the best comes first."""

    completions: tuple[TextCompletion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """Text of completion 0."""
        return self.completions[0].text


async def collect_text(
    events: AsyncIterator[Piece | End], num_completions: int = 1
) -> TextGeneration:
    """Reads `events` up to their End and returns the result. Raises the errors of `events`."""
    parts = [GrowingText() for _ in range(num_completions)]
    prompt_logprobs: list[TokenLogprob] = []
    async for event in events:
        if isinstance(event, End):
            completions = tuple(part.completion(index) for index, part in enumerate(parts))
            return TextGeneration(completions, event.usage, tuple(prompt_logprobs))
        prompt_logprobs.extend(event.prompt_logprobs)
        parts[event.index].add(event)
    raise ServerUnreachable("the stream ended without a finish")


@dataclass(slots=True)
class GrowingText:
    """Completion under construction."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: SequenceFinish | None = None
    stop_string: str | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.finish = piece.finish or self.finish
        self.stop_string = piece.stop_string or self.stop_string

    def completion(self, index: int) -> TextCompletion:
        finish = self.finish
        assert finish is not None, "every completion ends before its request does"
        return TextCompletion(
            index,
            "".join(self.texts),
            tuple(self.token_ids),
            tuple(self.logprobs),
            finish.reason,
            self.stop_string,
            finish.cumulative_logprob,
            finish.score,
        )
