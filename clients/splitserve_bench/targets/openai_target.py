"""Server of OpenAI's API as a target over HTTP: requests, streamed answers and prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import httpx2

from splitserve_bench.targets.target import (
    AnswerSummary,
    AskFailed,
    AskOptions,
    EventLines,
    Part,
    Tokens,
)
from splitserve_bench.workloads import PromptPiece, PromptTokens, Turn
from splitserve_common import parse_json

_MOST_ERROR_BYTES = 64 * 1024
# Numbers of words of two probe prompts, which show how many tokens a word has.
_PROBE_WORDS = (8, 72)


class OpenAiTarget:
    """OpenAI server as a target: completions by token ids, or chats by words.

    `client` has the base URL.
    """

    def __init__(self, client: httpx2.AsyncClient, options: AskOptions) -> None:
        self._client = client
        self._options = options
        self._model = options.model or ""
        self._tokens_per_word = 1.0
        low, high = (0, NUM_WORDS) if options.endpoint == "chat" else options.token_range
        # Conversations of a round share the cached tokens of pieces.
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
            raise AskFailed("http_404", f"{response.url} does not exist; most URLs end with /v1")
        if response.status_code != 200:
            raise _refused(response.status_code, response.content)
        try:
            name = parse_json(response.content)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise AskFailed("bad_answer", "/models lists no model; give --model") from error
        return str(name)

    async def _measure_words(self) -> float:
        """Measures tokens per word. The difference of two prompts cancels the template's tokens."""
        counts = []
        for num_words in _PROBE_WORDS:
            prompts = ChatPrompts(self._tokens_of(0), 1.0)
            exchange = self._exchange(prompts, Turn((PromptPiece(0, num_words),), 1))
            parts = [part async for part in exchange.send()]
            assert isinstance(parts[-1], AnswerSummary), "the last part of an exchange"
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
        # Encoded before the request is due.
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


# -- Events of streamed answers --------------------------------------------------------------------

_MOST_TOKENS = 2**31 - 1
# Keys of text in events of completions and chats.
_TEXTS = ("content", "reasoning_content", "reasoning", "text")


class AnswerReader:
    """Reads the events of a completion or chat with one choice. `text`: answer so far."""

    def __init__(self) -> None:
        self._lines = EventLines()
        self._texts: list[str] = []
        self._num_counted = 0
        self._answered: AnswerSummary | None = None
        self._is_over = False

    @property
    def text(self) -> str:
        """Text received so far."""
        return "".join(self._texts)

    def feed(self, data: bytes) -> tuple[bool, int | None]:
        """Returns whether `data` brought tokens, and how many if the server counts them, else None.

        Raises AskFailed.
        """
        came, before = False, self._num_counted
        for line in self._lines.feed(data):
            if line == b"[DONE]":
                self._is_over = True
            else:
                came |= self._read(line)
        return came, (self._num_counted - before) or None

    def finish(self) -> AnswerSummary:
        """Returns the counts at the end of the response. Raises AskFailed if the stream was cut."""
        if not self._is_over:
            raise AskFailed("stream_cut", "the stream ended without a finish")
        return self._answered or AnswerSummary()

    def _read(self, line: bytes) -> bool:
        try:
            event = parse_json(line)
        except ValueError as error:
            raise AskFailed("bad_answer", "an event is not JSON") from error
        if not isinstance(event, dict):
            raise AskFailed("bad_answer", "an event is not an object")
        if event.get("error"):
            raise AskFailed("failed_in_stream", error_message(event))
        choices = _objects(event.get("choices") or [])
        self._read_usage(event.get("usage"), is_running=bool(choices))
        came = False
        for choice in choices:
            # Marks the end of a stream without [DONE].
            self._is_over |= choice.get("finish_reason") is not None
            (source,) = _objects([choice.get("delta") or choice])
            texts = [source[name] for name in _TEXTS if isinstance(source.get(name), str)]
            self._texts += texts
            came |= any(texts) or bool(source.get("tool_calls"))
        return came

    def _read_usage(self, usage: object, is_running: bool) -> None:
        """Reads token counts.

        `is_running`: the usage counts tokens so far, not those of the whole answer.
        """
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        num_output_tokens = _count(usage.get("completion_tokens"))
        if is_running:
            self._num_counted = max(num_output_tokens or 0, self._num_counted)
        self._answered = AnswerSummary(
            _count(usage.get("prompt_tokens")), num_output_tokens, _count(cached)
        )


def _objects(values: object) -> list[dict[str, Any]]:
    """Returns `values` as a list of objects. Raises AskFailed for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise AskFailed("bad_answer", "an event has choices that are not objects")
    return values


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else None


def error_message(body: object) -> str:
    """Returns the message in the body of an error."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message: Any = error.get("message") if isinstance(error, Mapping) else None
    return str(message or error)


# -- Prompts of a dialog for OpenAI's endpoints ----------------------------------------------------

# Short common words: most vocabularies have one token for each, with the space before it.
_TEXT = """
apple arm ball bath bear bed bell bird boat book box bread brother car cat chair clock cloud coat
corn cow cup day dog door dress ear egg eye face farm feather fire fish flag floor flower foot
fruit garden girl glass gold grass ground hair hand hat head hill home horse house ice key king
lake lamp leaf leg letter light map milk money moon mother mouth name neck night nose paper party
path picture rain ring river road rock room rose school sea seed ship shoe sister sky snow song
spring star stone street sugar summer sun table tail time town toy train tree wall watch water
wheel wind window wing winter wood world year
"""
_WORDS = _TEXT.split()
NUM_WORDS = len(_WORDS)


class TokenPrompts:
    """Prompts of completions: token ids, so that their number is exact.

    Answers are text, so the next prompt has as many other tokens in place of an answer.
    """

    path = "completions"

    def __init__(self, tokens: PromptTokens) -> None:
        self._tokens = tokens
        self._token_ids: list[int] = []
        self._num_answers = 0

    def add(self, turn: Turn) -> dict[str, Any]:
        """Returns the prompt field with the pieces of this turn added."""
        self._token_ids += self._tokens.of(turn.pieces)
        return {"prompt": self._token_ids}

    def remember(self, _text: str, num_tokens: int) -> None:
        """Adds a stand-in for the answer, of `num_tokens` tokens, to the next prompt."""
        # Unused keys: those of workloads count up from 0 and down from -1.
        self._num_answers += 1
        self._token_ids += self._tokens.of([PromptPiece(2**62 + self._num_answers, num_tokens)])


class ChatPrompts:
    """Prompts of chats: words, about as many as make the wanted number of tokens."""

    path = "chat/completions"

    def __init__(self, words: PromptTokens, tokens_per_word: float) -> None:
        """Starts an empty chat. `words`: draws numbers below NUM_WORDS."""
        self._words = words
        self._tokens_per_word = tokens_per_word
        self._messages: list[dict[str, str]] = []

    def add(self, turn: Turn) -> dict[str, Any]:
        """Returns the messages with a user message for this turn added."""
        words = self._words.of(PromptPiece(each.key, self._num_words(each)) for each in turn.pieces)
        text = " ".join(_WORDS[number] for number in words)
        self._messages.append({"role": "user", "content": text})
        return {"messages": self._messages}

    def _num_words(self, piece: PromptPiece) -> int:
        return max(round(piece.num_tokens / self._tokens_per_word), 1)

    def remember(self, text: str, _num_tokens: int) -> None:
        """Adds the answer to the messages."""
        self._messages.append({"role": "assistant", "content": text})
