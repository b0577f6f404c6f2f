"""Tokenizer of a model, built from the files that the server provides, and its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeAlias, TypeVar, Unpack

import tokenizers

from splitserve_common import parse_json
from splitserve_text.chat_template import ChatTemplates, Message, TemplateOptions
from splitserve_text.detokenizer import Detokenizer, make_detokenizer
from splitserve_text.errors import ChatTemplateFailed, InvalidRequest, TokenizerUnavailable
from splitserve_text.output_parser import OutputFormat
from splitserve_text.response_template import described_calls, described_reasoning
from splitserve_text.token_texts import TokenTexts
from splitserve_text.vector_texts import VectorTexts, with_lower_case

T = TypeVar("T")

# Limits of work on the event loop, which takes less than a millisecond.
_MAX_INLINE_CHARS = 4096
_MAX_INLINE_TOKENS = 2048
_NUM_THREADS = 2
# Encoding takes a hundred times the text's size in memory, so larger texts are encoded one by one.
_LARGE_CHARS = 256 * 1024


class Tokenizer:
    """Converts text to token ids and back, and chats to text. Thread-safe.

    Methods that end in `_async` move long work to threads. The threads are few, so that long work
    waits for other long work.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_templates: ChatTemplates | None = None,
        vector_texts: VectorTexts | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Wraps `tokenizer`. `vector_texts`: None for inputs of vectors without prompts.

        `named_tokens`: texts of special tokens by name (`bos_token`, `eos_token`, ...).
        """
        self.named_tokens = dict(named_tokens or {})
        self.vector_texts = vector_texts or VectorTexts(tokenizer)
        self._tokenizer = tokenizer
        self._chat_templates = chat_templates
        self._texts: dict[bool, TokenTexts] = {}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], chat_template: str | None = None) -> Self:
        """Builds the tokenizer from `tokenizer.json` and optional other files, by name.

        `chat_template`: source of a chat template in place of the model's own ones.

        Raises TokenizerUnavailable if `tokenizer.json` is missing or a file is not readable, and
        ChatTemplateFailed.
        """
        if "tokenizer.json" not in files:
            raise TokenizerUnavailable("the server's tokenizer files have no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the bindings raise nothing narrower
            raise TokenizerUnavailable(f"tokenizer.json is not readable: {error}") from error
        # Settings saved for training; here no text is truncated or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(files, "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(files, "special_tokens_map.json"))
        special_tokens |= _special_tokens(config)
        if _read_json(files, "sentence_bert_config.json").get("do_lower_case") is True:
            with_lower_case(tokenizer)
        sentence_config = _read_json(files, "config_sentence_transformers.json")
        if chat_template is None:
            templates = ChatTemplates.from_files(files, config, special_tokens)
        else:
            templates = ChatTemplates({"default": chat_template}, special_tokens)
        return cls(
            tokenizer,
            templates,
            VectorTexts.from_config(tokenizer, config, sentence_config),
            special_tokens,
        )

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template; None if there is none."""
        return None if self._chat_templates is None else self._chat_templates.default

    # -- vocabulary --------------------------------------------------------------------------------

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model may have room for more ids."""
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of special tokens by text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset(self.special_tokens.values())

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token as written in the vocabulary; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text, special tokens included.

        May split characters.
        """
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
        """Returns the text of a token, with replacement characters for incomplete characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    # -- texts -------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`, by default with the model's special tokens around it.

        Raises InvalidRequest for text that is not Unicode (a lone surrogate). Releases Python's
        lock.
        """
        try:
            # Unlike `encode` this releases Python's lock.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise InvalidRequest("the text contains a lone surrogate") from error
        return list(encoding.ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text of any length like `encode`; a long text in a thread."""
        if len(text) <= _MAX_INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await self.in_thread(
            lambda: self.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    def count(self, text: str, *, add_special_tokens: bool = False) -> int:
        """Returns the number of tokens in `text`. Raises InvalidRequest."""
        return len(self.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; ids outside the vocabulary have none."""
        ids = [token_id for token_id in token_ids if token_id >= 0]
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    async def decode_async(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Decodes any number of tokens like `decode`; many tokens in a thread."""
        if len(token_ids) <= _MAX_INLINE_TOKENS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await self.in_thread(
            lambda: self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns a value of `SamplingParams.bad_words_token_ids` that keeps `words` out.

        Each word as tokenized at the start of a text and after a space. A model can still produce a
        word with other tokens, or inside a longer word. Empty words are ignored.
        """
        bare = [word.lstrip() for word in words if word.strip()]
        texts = [text for word in bare for text in (word, f" {word}")]
        encoded = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))

    def detokenizer(
        self, context_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Returns a detokenizer for a stream of tokens that continues `context_token_ids`."""

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        texts = self._token_texts(skip_special_tokens=skip_special_tokens)
        return make_detokenizer(texts, decode, context_token_ids)

    # -- chats -------------------------------------------------------------------------------------

    @property
    def chat_template_text(self) -> str:
        """Source of all chat templates; shows the model's notation of tool calls."""
        return "" if self._chat_templates is None else self._chat_templates.text

    @cached_property
    def described_format(self) -> OutputFormat:
        """Notations that the model's `response_template` describes."""
        template = None if self._chat_templates is None else self._chat_templates.response_template
        return OutputFormat(described_calls(template), described_reasoning(template))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat_templates is not None

    def render_chat(self, messages: Sequence[Message], **options: Unpack[TemplateOptions]) -> str:
        """Returns the text of a chat, ready for the answer; see `TemplateOptions`.

        Raises ChatTemplateFailed. Takes bounded time, which may be long for an event loop.
        """
        if self._chat_templates is None:
            raise ChatTemplateFailed("the model has no chat template")
        return self._chat_templates.render(messages, **options)

    def encode_chat(
        self, messages: Sequence[Message], **options: Unpack[TemplateOptions]
    ) -> list[int]:
        """Returns the token ids of a chat, ready for the answer. Raises ChatTemplateFailed."""
        # The template itself writes special tokens.
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    async def encode_chat_async(
        self, messages: Sequence[Message], **options: Unpack[TemplateOptions]
    ) -> list[int]:
        """Encodes a chat like `encode_chat`, in a thread."""
        text = await self.in_thread(lambda: self.render_chat(messages, **options))
        # The template itself writes special tokens.
        return await self.encode_async(text, add_special_tokens=False)

    # -- threads -----------------------------------------------------------------------------------

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
        """Runs `work` with this tokenizer in a thread and returns its result.

        `num_chars`: length of the texts to encode. Large texts share a single thread, so that other
        work does not wait for them.
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
    """Returns the special tokens in `config` (`bos_token`, `eos_token`, ...) by field name.

    A field is a text, or an object with `content`.
    """
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt as a text, a chat or token ids.

    `is_raw`: skip the chat template, which otherwise is used if the model has one. `messages`: a
    chat in place of the text, rendered with the options of `template`. `token_ids`: the encoded
    prompt in place of either; the answer then continues it.
    """

    text: str = ""
    system: str = ""
    is_raw: bool = False
    token_ids: tuple[int, ...] = ()
    messages: Sequence[Message] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)

    async def encode_async(self, tokenizer: Tokenizer | None) -> list[int]:
        """Returns the token ids of the prompt; slow encoding runs in a thread.

        Raises ChatTemplateFailed, InvalidRequest.
        """
        if tokenizer is None or self.token_ids:
            return list(self.token_ids)
        if not self.is_chat(tokenizer):
            return await tokenizer.encode_async(self.text)
        return await tokenizer.encode_chat_async(self._chat(), **self.template)

    def is_chat(self, tokenizer: Tokenizer | None) -> bool:
        """Returns whether the answer is a new message rather than a continuation of the prompt."""
        if tokenizer is None or self.token_ids:
            return False
        return bool(self.messages) or (tokenizer.has_chat_template and not self.is_raw)

    def _chat(self) -> Sequence[Message]:
        if self.messages:
            return self.messages
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.text}]


# A `str` is continued, a sequence of messages is a chat.
AnyPrompt: TypeAlias = str | Prompt | Sequence[Mapping[str, Any]]


def as_prompt(prompt: AnyPrompt) -> Prompt:
    """Converts any prompt to a Prompt."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, is_raw=True)
    return Prompt(messages=prompt)
