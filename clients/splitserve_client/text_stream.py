"""Completions as text: the pieces of each as they come, and the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from splitserve_client.chat_template import Message, TemplateOptions
from splitserve_client.detokenizer import Detokenizer
from splitserve_client.stop_strings import StopStrings
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import (
    Finish,
    FinishReason,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    TokenLogprob,
    Tokens,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text. `is_raw`: no chat template; otherwise one is used if the model has one.

    `messages`: a chat instead of the text, rendered with the options of `template`. `token_ids`:
    the prompt itself, instead of either; the answer then continues it.
    """

    text: str = ""
    system: str = ""
    is_raw: bool = False
    token_ids: tuple[int, ...] = ()
    messages: Sequence[Message] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)

    def encode(self, tokenizer: Tokenizer | None) -> list[int]:
        """Its token ids. Raises ChatTemplateFailed, InvalidRequest."""
        if tokenizer is None or self.token_ids:
            return list(self.token_ids)
        if not self.is_chat(tokenizer):
            return tokenizer.encode(self.text)
        return tokenizer.encode_chat(self._chat(), **self.template)

    async def encode_async(self, tokenizer: Tokenizer | None) -> list[int]:
        """As `encode`; what takes its time is done in a thread."""
        if tokenizer is None or self.token_ids:
            return list(self.token_ids)
        if not self.is_chat(tokenizer):
            return await tokenizer.encode_async(self.text)
        return await tokenizer.encode_chat_async(self._chat(), **self.template)

    def is_chat(self, tokenizer: Tokenizer | None) -> bool:
        """Whether the answer is a new message rather than a continuation."""
        if tokenizer is None or self.token_ids:
            return False
        return bool(self.messages) or (tokenizer.has_chat_template and not self.is_raw)

    def _chat(self) -> Sequence[Message]:
        if self.messages:
            return self.messages
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.text}]


# A text is continued as it is, messages are a chat, and a Prompt says what it is.
AnyPrompt: TypeAlias = str | Prompt | Sequence[Mapping[str, Any]]


def as_prompt(prompt: AnyPrompt) -> Prompt:
    """The same as a Prompt."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, is_raw=True)
    return Prompt(messages=prompt)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text with the tokens received since the last piece; the text may lag behind them.

    `index`: which of several completions. `finish`: how that one ended, if this is its end, and
    `stop_string` what ended it, if it was one; a single plain completion has both None.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish: SequenceFinish | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end; `stop_string` is what ended it, if it was one, and is not part of the text.

    Of several completions both `reason` and `stop_string` are the first one's.
    """

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None


class Generates(Protocol):
    """What a request is made with; an AsyncClient, say."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        scheduling: SchedulingParams | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """See `AsyncClient.generate`."""


async def stream_text(
    client: Generates,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    params: SamplingParams,
    *,
    stop_strings: Sequence[str] = (),
    include_stop_string: bool = False,
    bad_words: Sequence[str] = (),
    skip_special_tokens: bool = True,
    request_id: str = "",
    scheduling: SchedulingParams | None = None,
    timeout_s: float | None = None,
) -> AsyncGenerator[Piece | End, None]:
    """Streams the text of the completions; the last event is an End. Raises SplitserveError.

    A completion ends before the stop string that ends first, or after it with
    `include_stop_string`. They are looked for from the token after the first `min_tokens` on: one
    that ends within those stays in the text, one that only begins there ends the completion. No
    part of one that ends a completion is ever streamed. `bad_words` are kept out as far as
    `Tokenizer.bad_words_token_ids` can say them.

    Without a `tokenizer` the prompt is its token ids, and so is the text; `bad_words` need one.
    """
    params = with_bad_words(params, tokenizer, bad_words)
    prompt_token_ids = await prompt.encode_async(tokenizer)
    texts = RequestTexts(
        tokenizer,
        params,
        prompt_token_ids,
        continues_prompt=not prompt.is_chat(tokenizer),
        stop_strings=stop_strings,
        include_stop_string=include_stop_string,
        skip_special_tokens=skip_special_tokens,
    )
    events = client.generate(
        prompt_token_ids,
        params,
        request_id=request_id,
        scheduling=scheduling,
        timeout_s=timeout_s,
    )
    async with aclosing(events):
        async for part in texts.read(events):
            yield part


def with_bad_words(
    params: SamplingParams, tokenizer: Tokenizer | None, bad_words: Sequence[str]
) -> SamplingParams:
    """`params` that keep these words out, too."""
    if not bad_words:
        return params
    assert tokenizer is not None, "words are text"
    encoded = tokenizer.bad_words_token_ids(bad_words)
    return replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *encoded))


class RequestTexts:
    """The texts of all completions of one request, from its events as they come.

    `continues_prompt`: the text goes on where that of `prompt_token_ids` ends; it does not in a
    chat. For the other options see `stream_text`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        continues_prompt: bool = False,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._num_prompt_tokens = len(prompt_token_ids)
        context = prompt_token_ids if continues_prompt else ()

        def detokenizer() -> Detokenizer:
            if tokenizer is None:
                return _Numbers()
            return tokenizer.detokenizer(context, skip_special_tokens=skip_special_tokens)

        self._texts = [
            _Text(
                index, params, detokenizer(), StopStrings(stop_strings, include=include_stop_string)
            )
            for index in range(params.num_completions)
        ]

    def receive(self, event: Tokens | Finish) -> list[Piece | End]:
        """What `event` adds. After an End nothing more does, and the request may be aborted."""
        if isinstance(event, Finish):
            rest = [text.rest() for text in self._texts]
            end = self._texts[0].end(event.reason, event.usage)
            return [*(piece for piece in rest if piece is not None), end]
        piece = self._texts[event.index].push(event)
        if self._texts[event.index].has_ended and self._may_be_aborted():
            # Stop strings are not known to the server: that the stream is closed ends the request.
            num_output_tokens = sum(text.num_output_tokens for text in self._texts)
            usage = Usage(self._num_prompt_tokens, num_output_tokens, 0, 0)
            end = self._texts[0].end(FinishReason.STOP, usage)
            return [end] if piece is None else [piece, end]
        return [] if piece is None else [piece]

    async def read(
        self, events: AsyncIterator[Tokens | Finish]
    ) -> AsyncGenerator[Piece | End, None]:
        """Reads `events` up to the End."""
        async for event in events:
            for part in self.receive(event):
                yield part
                if isinstance(part, End):
                    return

    def _may_be_aborted(self) -> bool:
        """Whether all texts have ended, and not all tokens have."""
        has_ended = all(text.has_ended for text in self._texts)
        return has_ended and not all(text.is_computed for text in self._texts)


class _Numbers:
    """Token ids as they are, for where there is no tokenizer."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The numbers, with a space between two."""
        if not token_ids:
            return ""
        separator, self._separator = self._separator, " "
        return separator + " ".join(map(str, token_ids))

    def finish(self) -> str:
        """Nothing is held back."""
        return ""


class _Text:
    """The text of one completion.

    `has_ended`: no more of it is of interest. `is_computed`: no more of it comes.
    """

    def __init__(
        self, index: int, params: SamplingParams, detokenizer: Detokenizer, stops: StopStrings
    ) -> None:
        self._index = index
        self._params = params
        self._detokenizer = detokenizer
        self._stops = stops
        self._finish: SequenceFinish | None = None
        self.num_output_tokens = 0
        self.is_computed = False

    @property
    def has_ended(self) -> bool:
        return self._finish is not None

    def push(self, tokens: Tokens) -> Piece | None:
        """What `tokens` add; None after the end."""
        self.is_computed |= tokens.finish is not None
        if self.has_ended:
            return None
        if self._stops.found is not None:
            tokens = replace(tokens, token_ids=(), logprobs=())
        text, num_read = self._read(tokens.token_ids)
        if num_read < len(tokens.token_ids):
            logprobs = tokens.logprobs[:num_read]
            tokens = replace(tokens, token_ids=tokens.token_ids[:num_read], logprobs=logprobs)
        if tokens.finish is not None:
            text += self._flush()
        self._finish = self._end_of_text(tokens.finish)
        piece = Piece(text, tokens.token_ids, tokens.logprobs, tokens.prompt_logprobs, self._index)
        if self._finish is None or not self._params.has_several_sequences:
            return piece
        return replace(piece, finish=self._finish, stop_string=self._stops.found)

    def rest(self) -> Piece | None:
        """What was held back, if the request ends before the text did."""
        text = "" if self.has_ended else self._flush()
        return Piece(text, index=self._index) if text else None

    def end(self, reason: FinishReason, usage: Usage) -> End:
        """The end of the request, if this is its first completion."""
        if reason is not FinishReason.ABORTED:
            if self._finish is not None:
                reason = self._finish.reason
            elif self._stops.found is not None:
                reason = FinishReason.STOP
        return End(reason, usage, self._stops.found)

    def _read(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text that `token_ids` add, and how many of them: none after a stop string.

        Nothing ends within the first `min_tokens`.
        """
        if not self._stops:
            self.num_output_tokens += len(token_ids)
            return self._detokenizer.push(token_ids), len(token_ids)
        min_tokens = self._params.min_tokens or 0
        pieces: list[str] = []
        # One by one: where it ends does not depend on how many tokens come together.
        for number, token_id in enumerate(token_ids):
            may_end = self.num_output_tokens >= min_tokens
            self.num_output_tokens += 1
            text = self._detokenizer.push((token_id,))
            pieces.append(self._stops.push(text, may_end=may_end))
            if self._stops.found is not None:
                return "".join(pieces), number + 1
        return "".join(pieces), len(token_ids)

    def _flush(self) -> str:
        may_end = self.num_output_tokens > (self._params.min_tokens or 0)
        return self._stops.push(self._detokenizer.finish(), may_end=may_end) + self._stops.finish()

    def _end_of_text(self, finish: SequenceFinish | None) -> SequenceFinish | None:
        """How the text ends here, if it does. `finish`: how its sequence does."""
        if self._stops.found is None:
            return finish
        if finish is None:
            # Where the best are chosen at the end, that end is near and brings the scores.
            if not self._params.is_streamed:
                return None
            finish = SequenceFinish(self._index, FinishReason.STOP, None, 0)
        finish = replace(finish, num_output_tokens=self.num_output_tokens)
        return replace(finish, reason=FinishReason.STOP, stop_token_id=None)
