"""Requests with text: encoded, made with a client or a session, and read as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, Unpack

from splitserve_client.chat_template import Message, TemplateOptions
from splitserve_client.errors import ModelChanged, TokenizerUnavailable
from splitserve_client.output_text import TextRules
from splitserve_client.prompt import Prompt
from splitserve_client.text_stream import End, Piece, RequestTexts
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import Finish, SamplingParams, SchedulingParams, Tokens


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
        model_digest: str = "",
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
    model_digest: str = "",
) -> AsyncGenerator[Piece | End, None]:
    """Streams the text of the completions; the last event is an End. Raises SplitserveError.

    A completion ends before the stop string that ends first, or after it with
    `include_stop_string`. They are looked for from the token after the first `min_tokens` on: one
    that ends within those stays in the text, one that only begins there ends the completion. No
    part of one that ends a completion is ever streamed. `bad_words` are kept out as far as
    `Tokenizer.bad_words_token_ids` can say them.

    Without a `tokenizer` the prompt is its token ids, and so is the text; `bad_words` need one.
    `model_digest`: of the model that the tokenizer is of; raise ModelChanged if it is another.
    """
    params = _with_bad_words(params, tokenizer, bad_words)
    prompt_token_ids = await prompt.encode_async(tokenizer)
    rules = TextRules(tuple(stop_strings), include_stop_string, skip_special_tokens)
    continues_prompt = not prompt.is_chat(tokenizer)
    texts = RequestTexts(
        tokenizer, params, prompt_token_ids, rules, continues_prompt=continues_prompt
    )
    events = client.generate(
        prompt_token_ids,
        params,
        request_id=request_id,
        scheduling=scheduling,
        timeout_s=timeout_s,
        model_digest=model_digest,
    )
    async with aclosing(events):
        async for part in texts.read(events):
            yield part


def _with_bad_words(
    params: SamplingParams, tokenizer: Tokenizer | None, bad_words: Sequence[str]
) -> SamplingParams:
    """`params` that keep these words out, too."""
    if not bad_words:
        return params
    assert tokenizer is not None, "words are text"
    encoded = tokenizer.bad_words_token_ids(bad_words)
    return replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *encoded))


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """The tokenizer of the model with this digest; None if it has none."""

    tokenizer: Tokenizer | None
    model_digest: str


class TextCalls:
    """Requests with text by the tokenizer of the model that is served.

    That is read when it is first needed, and again when another model turns out to be served.
    """

    def __init__(
        self, read: Callable[[], Awaitable[ModelTokenizer]], clock: Callable[[], float]
    ) -> None:
        self._read = read
        self._clock = clock
        self._known: ModelTokenizer | None = None
        self._reading = asyncio.Lock()

    async def tokenizer(self) -> ModelTokenizer:
        """The one that was read last. Raises what `read` raises."""
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
        """As `stream_text`. A request of a model that is no longer served is encoded anew, once.

        A prompt of token ids needs no tokenizer, unless the request says something of its text.

        Raises ModelChanged where that cannot be: after anything has come, and where the caller
        gave token ids.
        """
        began_s, timeout_s = self._clock(), options.get("timeout_s")
        may_go_on = not _has_token_ids(prompt, params)
        while True:
            known = await self._tokenizer_for(prompt, options)
            if timeout_s is not None:
                options["timeout_s"] = timeout_s - (self._clock() - began_s)
            tokenizer, digest = known.tokenizer, known.model_digest
            events = stream_text(client, tokenizer, prompt, params, model_digest=digest, **options)
            try:
                async with aclosing(events):
                    async for event in events:
                        may_go_on = False
                        yield event
                return
            except ModelChanged:
                if self._known is known:
                    self._known = None
                if not may_go_on:
                    raise
                may_go_on = False

    async def _tokenizer_for(self, prompt: Prompt, options: TextOptions) -> ModelTokenizer:
        """The model's tokenizer; none where the model has none and tokens are all that is asked.

        Raises what `tokenizer` raises.
        """
        try:
            return await self.tokenizer()
        except TokenizerUnavailable:
            has_text = options.get("stop_strings") or options.get("bad_words")
            if has_text or not prompt.token_ids:
                raise
            return ModelTokenizer(None, "")


def _has_token_ids(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether it says something in the vocabulary of one model."""
    return bool(
        prompt.token_ids
        or params.stop_token_ids
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    )
