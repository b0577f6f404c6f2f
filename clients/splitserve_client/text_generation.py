"""Complete result of a text request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from splitserve_client.errors import ServerUnreachable
from splitserve_client.text_stream import End, Piece
from splitserve_client.types import (
    FinishReason,
    SequenceFinish,
    TokenLogprob,
    Usage,
)


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
