"""A model's tokenizer from the files that the server gives out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Self, TypeVar, Unpack

import tokenizers

from splitserve_client.chat_template import ChatTemplates, Message, TemplateOptions
from splitserve_client.detokenizer import Detokenizer, make_detokenizer
from splitserve_client.errors import ChatTemplateFailed, InvalidRequest, TokenizerUnavailable
from splitserve_client.token_texts import TokenTexts
from splitserve_rpc.json_text import parse_json

T = TypeVar("T")

# Up to so much the event loop may do it itself: less than a millisecond.
_MAX_INLINE_CHARS = 4096
_MAX_INLINE_TOKENS = 2048
_NUM_THREADS = 2
# To encode a text takes a hundred times its size, so larger ones than this wait for each other.
_LARGE_CHARS = 256 * 1024


class Tokenizer:
    """Text to token ids and back, and chats to text. Threads may share it.

    The methods that end with `_async` let threads do what would keep an event loop waiting; they
    are few, so whoever sends much waits for himself.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, chat_templates: ChatTemplates | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_templates = chat_templates
        self._texts: dict[bool, TokenTexts] = {}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """From `tokenizer.json`, and what there is of the other files; by name.

        Raises TokenizerUnavailable if the first is missing or not readable, and ChatTemplateFailed.
        """
        if "tokenizer.json" not in files:
            raise TokenizerUnavailable("the server's tokenizer files have no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the bindings raise nothing narrower
            raise TokenizerUnavailable(f"tokenizer.json is not readable: {error}") from error
        # Saved with the tokenizer for training; here nothing is cut or filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(files, "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(files, "special_tokens_map.json"))
        special_tokens |= _special_tokens(config)
        return cls(tokenizer, ChatTemplates.from_files(files, config, special_tokens))

    # -- the vocabulary ----------------------------------------------------------------------------

    @cached_property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model may have room for more ids."""
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens, by their texts."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        return frozenset(self.special_tokens.values())

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, special ones too; not always whole characters."""
        texts = self._token_texts(skip_special_tokens=False)
        if texts.kind is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        if texts.kind.is_byte_level:
            return texts.byte_strings[token_id]
        value = texts.later[token_id]
        if value is None:
            return b""
        return bytes((value,)) if isinstance(value, int) else value.encode()

    def token_text(self, token_id: int) -> str:
        """The same as text, with replacement characters for what is no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    # -- texts -------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with what the model expects around a text, unless told otherwise.

        Raises InvalidRequest for what is no Unicode text (a lone surrogate). Other threads run.
        """
        try:
            # Unlike `encode` this lets go of Python's lock.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise InvalidRequest("the text has half of a surrogate pair in it") from error
        return list(encoding.ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, of a text of any length."""
        if len(text) <= _MAX_INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await self.in_thread(
            lambda: self.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    def count(self, text: str, *, add_special_tokens: bool = False) -> int:
        """How many tokens `text` is. Raises InvalidRequest."""
        return len(self.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have none."""
        ids = [token_id for token_id in token_ids if token_id >= 0]
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    async def decode_async(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """As `decode`, of any number of tokens."""
        if len(token_ids) <= _MAX_INLINE_TOKENS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await self.in_thread(
            lambda: self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """What `SamplingParams.bad_words_token_ids` takes to keep `words` out of the output.

        Each word as it is tokenised at the beginning of a text, and after a space. A model can
        still spell one with other tokens, or within a longer word. Empty words are left out.
        """
        bare = [word.lstrip() for word in words if word.strip()]
        texts = [text for word in bare for text in (word, f" {word}")]
        encoded = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))

    def detokenizer(
        self, context_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """For the text of a stream of tokens. `context_token_ids`: the text they continue."""

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        texts = self._token_texts(skip_special_tokens=skip_special_tokens)
        return make_detokenizer(texts, decode, context_token_ids)

    # -- chats -------------------------------------------------------------------------------------

    @property
    def chat_template_text(self) -> str:
        """All chat templates as they are written: a model's notation of calls is in there."""
        return "" if self._chat_templates is None else self._chat_templates.text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was trained on chats."""
        return self._chat_templates is not None

    def render_chat(self, messages: Sequence[Message], **options: Unpack[TemplateOptions]) -> str:
        """The text of a chat, ready for the answer; see `TemplateOptions`.

        Raises ChatTemplateFailed. Takes a bounded time, which may be long for an event loop.
        """
        if self._chat_templates is None:
            raise ChatTemplateFailed("the model has no chat template")
        return self._chat_templates.render(messages, **options)

    def encode_chat(
        self, messages: Sequence[Message], **options: Unpack[TemplateOptions]
    ) -> list[int]:
        """The token ids of a chat, ready for the answer. Raises ChatTemplateFailed."""
        # The template writes special tokens itself.
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    async def encode_chat_async(
        self, messages: Sequence[Message], **options: Unpack[TemplateOptions]
    ) -> list[int]:
        """As `encode_chat`, in a thread."""
        text = await self.in_thread(lambda: self.render_chat(messages, **options))
        # The template writes special tokens itself.
        return await self.encode_async(text, add_special_tokens=False)

    # ----------------------------------------------------------------------------------------------

    def _token_texts(self, *, skip_special_tokens: bool) -> TokenTexts:
        if skip_special_tokens not in self._texts:
            texts = TokenTexts(self._tokenizer, skip_special_tokens=skip_special_tokens)
            self._texts[skip_special_tokens] = texts
        return self._texts[skip_special_tokens]

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="splitserve-text")

    @cached_property
    def _thread_of_large(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="splitserve-large-text")

    async def in_thread(self, work: Callable[[], T], num_chars: int = 0) -> T:
        """The result of `work` with this tokenizer, in one of its few threads.

        `num_chars`: of the texts to encode. Large ones have a single thread, and others do not wait
        for it.
        """
        threads = self._thread_of_large if num_chars > _LARGE_CHARS else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = parse_json(files[name])
    except ValueError as error:
        raise TokenizerUnavailable(f"{name} is not readable: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on; each is a text, or an object with its `content`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
