"""Completions as text: the pieces of each as they come, and the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from splitserve_client.detokenizer import Detokenizer, StopStrings
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

    `token_ids`: the prompt instead of the text: encoded already, or there is no tokenizer.
    """

    text: str = ""
    system: str = ""
    is_raw: bool = False
    token_ids: tuple[int, ...] = ()

    def encode(self, tokenizer: Tokenizer | None) -> list[int]:
        """Its token ids. Raises ChatTemplateFailed."""
        if tokenizer is None or self.token_ids:
            return list(self.token_ids)
        if not self.is_chat(tokenizer):
            return tokenizer.encode(self.text)
        messages = [{"role": "user", "content": self.text}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return tokenizer.encode_chat(messages)

    def is_chat(self, tokenizer: Tokenizer | None) -> bool:
        """Whether the answer is a new message rather than a continuation."""
        return tokenizer is not None and tokenizer.has_chat_template and not self.is_raw


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


class TokenSource(Protocol):
    """Where tokens come from: `AsyncClient`, or what submits to a session."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        scheduling: SchedulingParams | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Tokens | Finish, None]: ...


async def stream_text(
    source: TokenSource,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    params: SamplingParams,
    *,
    stop_strings: Sequence[str] = (),
    bad_words: Sequence[str] = (),
    request_id: str = "",
    scheduling: SchedulingParams | None = None,
    timeout_s: float | None = None,
) -> AsyncGenerator[Piece | End, None]:
    """Streams the text of the completions; the last event is an End. Raises SplitserveError.

    A completion ends before the first of `stop_strings`, which are looked for from the token after
    the first `min_tokens` on: one that ends within those stays in the text, one that only begins
    there ends the completion. No part of one that ends a completion is ever streamed. `bad_words`
    are kept out as far as `Tokenizer.bad_words_token_ids` can say them.

    Without a `tokenizer` the prompt is its token ids, and so is the text; `bad_words` need one.
    """
    if bad_words:
        assert tokenizer is not None, "words are text"
        encoded = tokenizer.bad_words_token_ids(bad_words)
        params = replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *encoded))
    prompt_token_ids = prompt.encode(tokenizer)
    context = () if prompt.is_chat(tokenizer) else prompt_token_ids
    texts = [
        _Text(index, params, _detokenizer(tokenizer, context), StopStrings(stop_strings))
        for index in range(params.num_completions)
    ]
    events = source.generate(
        prompt_token_ids,
        params,
        request_id=request_id,
        scheduling=scheduling,
        timeout_s=timeout_s,
    )
    async with aclosing(events):
        async for event in events:
            for part in _receive(event, texts, len(prompt_token_ids)):
                yield part
                if isinstance(part, End):
                    return


def _detokenizer(tokenizer: Tokenizer | None, context: Sequence[int]) -> Detokenizer:
    if tokenizer is not None:
        return tokenizer.detokenizer(context)
    return Detokenizer(lambda token_ids: " ".join(map(str, token_ids)))


def _receive(
    event: Tokens | Finish, texts: Sequence[_Text], num_prompt_tokens: int
) -> list[Piece | End]:
    """What `event` adds to `texts`."""
    if isinstance(event, Finish):
        rest = [text.rest() for text in texts]
        end = texts[0].end(event.reason, event.usage)
        return [*(piece for piece in rest if piece is not None), end]
    piece = texts[event.index].push(event)
    if all(text.has_ended for text in texts) and not all(text.is_computed for text in texts):
        # Stop strings are not known to the server: that the stream is closed ends the request.
        num_output_tokens = sum(text.num_output_tokens for text in texts)
        usage = Usage(num_prompt_tokens, num_output_tokens, 0, 0)
        end = texts[0].end(FinishReason.STOP, usage)
        return [end] if piece is None else [piece, end]
    return [] if piece is None else [piece]


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
        text = self._read(tokens.token_ids)
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

    def _read(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` add. Nothing ends within the first `min_tokens`."""
        num_early = max((self._params.min_tokens or 0) - self.num_output_tokens, 0)
        self.num_output_tokens += len(token_ids)
        early, late = token_ids[:num_early], token_ids[num_early:]
        text = self._stops.push(self._detokenizer.push(early), may_end=False)
        return text + self._stops.push(self._detokenizer.push(late))

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
