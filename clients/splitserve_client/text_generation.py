"""All the text that a request brought, at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from splitserve_client.chat_template import Message, TemplateOptions
from splitserve_client.errors import ServerUnreachable
from splitserve_client.text_stream import End, Piece, Prompt
from splitserve_client.types import (
    FinishReason,
    SchedulingParams,
    SequenceFinish,
    TokenLogprob,
    Usage,
)


class TextOptions(TypedDict, total=False):
    """The options of `stream_text`, which explains them."""

    stop_strings: Sequence[str]
    include_stop_string: bool
    bad_words: Sequence[str]
    skip_special_tokens: bool
    request_id: str
    scheduling: SchedulingParams | None
    timeout_s: float | None


class ChatOptions(TextOptions, TemplateOptions, total=False):
    """The options of a chat: those of its text, and how it is rendered."""


def chat_prompt(messages: Sequence[Message], options: ChatOptions) -> tuple[Prompt, TextOptions]:
    """The prompt that `messages` and their part of `options` are, and the rest of these."""
    names = TemplateOptions.__annotations__.keys()
    template: Any = {name: value for name, value in options.items() if name in names}
    others: Any = {name: value for name, value in options.items() if name not in names}
    return Prompt(messages=messages, template=template), others


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """One completion. `stop_string`: what ended it, if it was one.

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
    """The completions of a request by index; with `best_of` and beam search the best is first."""

    completions: tuple[TextCompletion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first completion, or the only one."""
        return self.completions[0].text


async def collect_text(
    events: AsyncIterator[Piece | End], num_completions: int = 1
) -> TextGeneration:
    """Reads `events` to their End. Raises what they raise."""
    parts = [GrowingText() for _ in range(num_completions)]
    prompt_logprobs: list[TokenLogprob] = []
    async for event in events:
        if isinstance(event, End):
            completions = tuple(part.completion(index, event) for index, part in enumerate(parts))
            return TextGeneration(completions, event.usage, tuple(prompt_logprobs))
        prompt_logprobs.extend(event.prompt_logprobs)
        parts[event.index].add(event)
    raise ServerUnreachable("the stream ended without a finish")


@dataclass(slots=True)
class GrowingText:
    """One completion in the making."""

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

    def completion(self, index: int, end: End) -> TextCompletion:
        """`end` is that of the request: what there is of a request with one plain sequence."""
        finish = self.finish
        content = (index, "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs))
        if finish is None:
            stop_string = end.stop_string if index == 0 else None
            return TextCompletion(*content, end.reason, stop_string)
        return TextCompletion(
            *content, finish.reason, self.stop_string, finish.cumulative_logprob, finish.score
        )
