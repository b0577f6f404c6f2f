"""A model's tokenizer from the files that the server gives out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import tokenizers

from splitserve_client.chat_template import ChatTemplate, Message
from splitserve_client.detokenizer import Detokenizer
from splitserve_client.errors import ChatTemplateFailed, TokenizerUnavailable

_TEMPLATE_NAME = "default"


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """From `tokenizer.json`, and what there is of the other files; by base name.

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
        source = _template_source(files, config)
        template = ChatTemplate(source, special_tokens) if source else None
        return cls(tokenizer, template)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens, by their texts."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def chat_template_text(self) -> str:
        """The source of the chat template, whose notations tell how the model writes."""
        return "" if self._chat_template is None else self._chat_template.source

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was trained on chats."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with what the model expects around a text, unless told otherwise."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have none."""
        ids = list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """What `SamplingParams.bad_words_token_ids` takes to keep `words` out of the output.

        Each word as it is tokenised at the beginning of a text, and after a space. A model can
        still spell one with other tokens, or within a longer word. Empty words are left out.
        """
        bare = [word.lstrip() for word in words if word.strip()]
        texts = [text for word in bare for text in (word, f" {word}")]
        encoded = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:  # noqa: ANN401
        """The text of a chat, ready for the answer. Raises ChatTemplateFailed."""
        if self._chat_template is None:
            raise ChatTemplateFailed("the model has no chat template")
        return self._chat_template.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:  # noqa: ANN401
        """The token ids of a chat, ready for the answer. Raises ChatTemplateFailed."""
        # The template writes special tokens itself.
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def detokenizer(
        self, context_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """For the text of a stream of tokens. `context_token_ids`: the text they continue."""

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return Detokenizer(decode, context_token_ids)


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
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


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get(_TEMPLATE_NAME)
    return template if isinstance(template, str) else ""
