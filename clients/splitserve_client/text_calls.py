"""Text requests: encoding of the prompt, the request, and its output as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from splitserve_client.errors import ModelChanged
from splitserve_client.scheduler_info import Encoder
from splitserve_text import (
    End,
    Finish,
    InvalidRequest,
    Message,
    Piece,
    Prompt,
    RequestTexts,
    SamplingParams,
    SchedulingParams,
    TemplateOptions,
    TextRules,
    Tokenizer,
    TokenizerUnavailable,
    Tokens,
)

T = TypeVar("T")


class TextOptions(TypedDict, total=False):
    """Options of `stream_text`, which explains them."""

    stop_strings: Sequence[str]
    include_stop_string: bool
    bad_words: Sequence[str]
    skip_special_tokens: bool
    request_id: str
    scheduling: SchedulingParams | None
    timeout_s: float | None


class ChatOptions(TextOptions, TemplateOptions, total=False):
    """Options of a chat: those of `stream_text` and of rendering."""


def chat_prompt(messages: Sequence[Message], options: ChatOptions) -> tuple[Prompt, TextOptions]:
    """Splits `options`; returns the prompt for `messages` and the options of `stream_text`."""
    names = TemplateOptions.__annotations__.keys()
    template: Any = {name: value for name, value in options.items() if name in names}
    others: Any = {name: value for name, value in options.items() if name not in names}
    return Prompt(messages=messages, template=template), others


class Generates(Protocol):
    """Client that makes requests, such as an AsyncClient."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        scheduling: SchedulingParams | None = None,
        encoder_token_ids: Sequence[int] = (),
        timeout_s: float | None = None,
        model_digest: str = "",
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """Makes a request; see `AsyncClient.generate`."""


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
    model_digest: str = "",
    encoder: Encoder | None = None,
) -> AsyncGenerator[Piece | End, None]:
    """Streams the text of the completions; the last event is an End. Raises SplitserveError.

    A completion ends before the stop string that ends first, or after it with
    `include_stop_string`. Stop strings count after the first `min_tokens` tokens: one that ends
    within those stays in the text, one that only begins there ends the completion. No part of a
    stop string that ends a completion is ever streamed. `bad_words` are avoided as far as
    `Tokenizer.bad_words_token_ids` can express them.

    Without a `tokenizer` the prompt must be token ids, the text consists of token ids, and
    `bad_words` are not allowed. `model_digest`: of the model of the tokenizer; raises ModelChanged
    if another model is served. `encoder`: of the model; it reads the prompt then, and the decoder
    begins as the model's configuration says; raises InvalidRequest if that says nothing.
    """
    params = _with_bad_words(params, tokenizer, bad_words)
    prompt_token_ids, encoder_token_ids = await prompt.encode_async(tokenizer), []
    if encoder is not None:
        prompt_token_ids, encoder_token_ids = _decoder_prompt(encoder), prompt_token_ids
    rules = TextRules(tuple(stop_strings), include_stop_string, skip_special_tokens)
    continues_prompt = encoder is None and not prompt.is_chat(tokenizer)
    texts = RequestTexts(
        tokenizer, params, prompt_token_ids, rules, continues_prompt=continues_prompt
    )
    events = client.generate(
        prompt_token_ids,
        params,
        request_id=request_id,
        scheduling=scheduling,
        encoder_token_ids=encoder_token_ids,
        timeout_s=timeout_s,
        model_digest=model_digest,
    )
    async with aclosing(events):
        async for part in texts.read(events):
            yield part


def _decoder_prompt(encoder: Encoder) -> list[int]:
    if not encoder.decoder_token_ids:
        raise InvalidRequest(
            "the model's configuration does not say how its decoder begins; call generate with"
            " prompt_token_ids and encoder_token_ids"
        )
    return list(encoder.decoder_token_ids)


def _with_bad_words(
    params: SamplingParams, tokenizer: Tokenizer | None, bad_words: Sequence[str]
) -> SamplingParams:
    """Returns `params` with the token ids of `bad_words` added."""
    if not bad_words:
        return params
    assert tokenizer is not None, "bad words need a tokenizer"
    encoded = tokenizer.bad_words_token_ids(bad_words)
    return replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *encoded))


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Tokenizer, None if the model has none, with the digest and the encoder of its model."""

    tokenizer: Tokenizer | None
    model_digest: str
    encoder: Encoder | None = None


class TextCalls:
    """Makes text requests with the tokenizer of the served model.

    Reads the tokenizer when it is first needed, and again when the served model has changed.
    """

    def __init__(
        self, read: Callable[[], Awaitable[ModelTokenizer]], clock: Callable[[], float]
    ) -> None:
        self._read = read
        self._clock = clock
        self._known: ModelTokenizer | None = None
        self._reading = asyncio.Lock()

    async def tokenizer(self) -> ModelTokenizer:
        """Returns the last read tokenizer, or reads it. Raises the errors of `read`."""
        async with self._reading:
            if self._known is None:
                self._known = await self._read()
            return self._known

    async def stream(
        self,
        client: Generates,
        prompt: Prompt,
        params: SamplingParams,
        **options: Unpack[TextOptions],
    ) -> AsyncGenerator[Piece | End, None]:
        """Streams text like `stream_text`.

        Encodes the prompt again, once, if the served model changed.

        A prompt of token ids needs no tokenizer, unless the request has stop strings or bad words.

        Raises ModelChanged if encoding again is impossible: after the first event, or if the caller
        gave token ids.
        """
        began_s, timeout_s = self._clock(), options.get("timeout_s")
        can_retry = not _has_token_ids(prompt, params)
        while True:
            known = await self._tokenizer_for(prompt, options)
            if timeout_s is not None:
                options["timeout_s"] = timeout_s - (self._clock() - began_s)
            tokenizer, digest = known.tokenizer, known.model_digest
            events = stream_text(
                client,
                tokenizer,
                prompt,
                params,
                model_digest=digest,
                encoder=known.encoder,
                **options,
            )
            try:
                async with aclosing(events):
                    async for event in events:
                        can_retry = False
                        yield event
                return
            except ModelChanged:
                if self._known is known:
                    self._known = None
                if not can_retry:
                    raise
                can_retry = False

    async def with_tokenizer(self, work: Callable[[ModelTokenizer], Awaitable[T]]) -> T:
        """Returns the result of `work`, which is done again, once, if the served model changed.

        Raises the errors of `tokenizer` and of `work`.
        """
        known = await self.tokenizer()
        try:
            return await work(known)
        except ModelChanged:
            if self._known is known:
                self._known = None
        return await work(await self.tokenizer())

    async def _tokenizer_for(self, prompt: Prompt, options: TextOptions) -> ModelTokenizer:
        """Returns the model's tokenizer.

        An empty one if the model has none and no text is involved.

        Raises the errors of `tokenizer`.
        """
        try:
            return await self.tokenizer()
        except TokenizerUnavailable:
            has_text = options.get("stop_strings") or options.get("bad_words")
            if has_text or not prompt.token_ids:
                raise
            return ModelTokenizer(None, "")


def _has_token_ids(prompt: Prompt, params: SamplingParams) -> bool:
    """Returns whether the request contains token ids, which are valid for one model only."""
    return bool(
        prompt.token_ids
        or params.stop_token_ids
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    )
