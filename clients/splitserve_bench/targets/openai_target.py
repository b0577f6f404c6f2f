"""Whatever speaks OpenAI's API over HTTP: ours, or another engine's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import httpx2

from splitserve_bench.targets.openai_answer import AnswerReader, error_message
from splitserve_bench.targets.openai_prompts import NUM_WORDS, ChatPrompts, TokenPrompts
from splitserve_bench.targets.options import AskOptions
from splitserve_bench.targets.target import Answered, AskFailed, Part, Tokens
from splitserve_bench.workloads.conversation import Piece, Turn
from splitserve_bench.workloads.prompt_tokens import PromptTokens
from splitserve_rpc.json_text import parse_json

_MOST_ERROR_BYTES = 64 * 1024
# Texts of so many words are asked for first, to learn how many tokens a word has.
_PROBE_WORDS = (8, 72)


class OpenAiTarget:
    """Asks by completions, with token ids, or by chat, with words. `client` has the base URL."""

    def __init__(self, client: httpx2.AsyncClient, options: AskOptions) -> None:
        self._client = client
        self._options = options
        self._model = options.model or ""
        self._tokens_per_word = 1.0
        low, high = (0, NUM_WORDS) if options.endpoint == "chat" else options.token_range
        # Conversations of a round share what pieces they have.
        self._tokens_of = lru_cache(maxsize=2)(lambda salt: PromptTokens(salt, low, high))

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    async def get_ready(self) -> str:
        if not self._model:
            self._model = await self._first_model()
        if self._options.endpoint == "chat":
            self._tokens_per_word = await self._measure_words()
        return self._model

    async def _first_model(self) -> str:
        try:
            response = await self._client.get("models")
        except httpx2.HTTPError as error:
            raise _lost(error) from error
        if response.status_code == 404:
            raise AskFailed("http_404", f"there is no {response.url}; most URLs end with /v1")
        if response.status_code != 200:
            raise _refused(response.status_code, response.content)
        try:
            name = parse_json(response.content)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise AskFailed("bad_answer", "/models names no model; give --model") from error
        return str(name)

    async def _measure_words(self) -> float:
        """Tokens of a word, by two prompts: what the template adds is in both."""
        counts = []
        for num_words in _PROBE_WORDS:
            prompts = ChatPrompts(self._tokens_of(0), 1.0)
            exchange = self._exchange(prompts, Turn((Piece(0, num_words),), 1))
            parts = [part async for part in exchange.send()]
            assert isinstance(parts[-1], Answered), "it ends so"
            counts.append(parts[-1].num_prompt_tokens)
        few, many = counts
        if few is None or many is None:
            return 1.0
        return max((many - few) / (_PROBE_WORDS[1] - _PROBE_WORDS[0]), 0.1)

    def begin(self, salt: int) -> _Dialog:
        prompts: ChatPrompts | TokenPrompts
        if self._options.endpoint == "chat":
            prompts = ChatPrompts(self._tokens_of(salt), self._tokens_per_word)
        else:
            prompts = TokenPrompts(self._tokens_of(salt))
        return _Dialog(prompts, self._exchange)

    def _exchange(self, prompts: ChatPrompts | TokenPrompts, turn: Turn) -> _Exchange:
        options = self._options
        usage: dict[str, bool] = {"include_usage": True}
        if options.counts_tokens:
            usage["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": self._model,
            **prompts.add(turn),
            "max_tokens": turn.num_output_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": usage,
            **({"ignore_eos": True} if options.ignores_eos else {}),
            **options.extra_body,
        }
        return _Exchange(self._client, prompts.path, body, prompts.remember)


class _Dialog:
    def __init__(
        self,
        prompts: ChatPrompts | TokenPrompts,
        exchange: Callable[[ChatPrompts | TokenPrompts, Turn], _Exchange],
    ) -> None:
        self._prompts = prompts
        self._make_exchange = exchange

    def prepare(self, turn: Turn) -> _Exchange:
        return self._make_exchange(self._prompts, turn)


class _Exchange:
    def __init__(
        self,
        client: httpx2.AsyncClient,
        path: str,
        body: Mapping[str, Any],
        remember: Callable[[str, int], None],
    ) -> None:
        # Encoded now, not when it is due.
        self._request = client.build_request("POST", path, json=body)
        self._client = client
        self._num_wanted = int(body["max_tokens"])
        self._remember = remember

    async def send(self) -> AsyncGenerator[Part, None]:
        reader = AnswerReader()
        try:
            response = await self._client.send(self._request, stream=True)
            try:
                if response.status_code != 200:
                    raise _refused(response.status_code, await _beginning(response))
                async for data in response.aiter_raw():
                    came, num_tokens = reader.feed(data)
                    if came:
                        yield Tokens(num_tokens)
            finally:
                await response.aclose()
        except httpx2.HTTPError as error:
            raise _lost(error) from error
        answered = reader.finish()
        self._remember(reader.text, answered.num_output_tokens or self._num_wanted)
        yield answered


async def _beginning(response: httpx2.Response) -> bytes:
    content = b""
    async for data in response.aiter_raw():
        content += data
        if len(content) > _MOST_ERROR_BYTES:
            break
    return content[:_MOST_ERROR_BYTES]


def _refused(status: int, content: bytes) -> AskFailed:
    try:
        message = error_message(parse_json(content))
    except ValueError:
        message = content.decode(errors="replace")
    return AskFailed(f"http_{status}", message)


def _lost(error: httpx2.HTTPError) -> AskFailed:
    kind = "connection_lost"
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        kind = "unreachable"
    elif isinstance(error, httpx2.TimeoutException):
        kind = "timeout"
    return AskFailed(kind, str(error) or type(error).__name__)
