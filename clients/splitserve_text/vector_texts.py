"""Texts of models that return vectors: single texts and pairs, prompts in front, truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import tokenizers
from tokenizers import normalizers

from splitserve_text.errors import InvalidRequest

# Names under which models have the prompt of documents, the first that exists.
_DOCUMENT_NAMES = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Token ids of two texts. `second_text_start`: as of `PoolingParams`."""

    token_ids: list[int]
    second_text_start: int


class VectorTexts:
    """Encodes texts for vectors, as sentence-transformers does. Thread-safe.

    `prompts`: texts by name that the model's authors put in front of inputs.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        *,
        cuts_beginning: bool = False,
        has_token_types: bool = True,
    ) -> None:
        """Prepares the encoding.

        `default_prompt_name`: prompt of inputs that name none. `cuts_beginning`: truncation drops
        the first tokens instead of the last ones. `has_token_types`: the model tells the texts of a
        pair apart by token types.
        """
        self._tokenizer = tokenizer
        self.prompts = prompts or {}
        self._default_prompt = self.prompts.get(default_prompt_name or "", "")
        self._cuts_beginning = cuts_beginning
        self._has_token_types = has_token_types

    @classmethod
    def from_config(
        cls,
        tokenizer: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        sentence_config: Mapping[str, Any],
    ) -> Self:
        """Returns the encoding that files of a model describe.

        `config`: of tokenizer_config.json. `sentence_config`: of config_sentence_transformers.json.
        """
        prompts = sentence_config.get("prompts")
        texts = prompts.items() if isinstance(prompts, dict) else ()
        default = sentence_config.get("default_prompt_name")
        inputs = config.get("model_input_names")
        return cls(
            tokenizer,
            {str(name): text for name, text in texts if isinstance(text, str)},
            default if isinstance(default, str) else None,
            cuts_beginning=config.get("truncation_side") == "left",
            has_token_types=not isinstance(inputs, list) or "token_type_ids" in inputs,
        )

    # -- prompts -----------------------------------------------------------------------------------

    def prompt(self, name: str | None) -> str:
        """Returns the prompt called `name`; None: the default one. Raises InvalidRequest."""
        if name is None:
            return self._default_prompt
        if name not in self.prompts:
            allowed = ", ".join(map(repr, self.prompts)) or "none, as the model has no prompts"
            raise InvalidRequest(f"prompt_name is {name[:120]!r}; allowed: {allowed}")
        return self.prompts[name]

    @property
    def query_prompt(self) -> str:
        """Prompt of queries of a search; empty if none is called `query`."""
        return self.prompts.get("query", "")

    @property
    def document_prompt(self) -> str:
        """Prompt of documents that a search finds; empty if none has a name of documents."""
        names = (name for name in _DOCUMENT_NAMES if name in self.prompts)
        return self.prompts.get(next(names, ""), "")

    # -- encoding ----------------------------------------------------------------------------------

    def num_special_tokens(self, *, is_pair: bool = False) -> int:
        """Number of special tokens around a text, or around the texts of a pair."""
        return int(self._tokenizer.num_special_tokens_to_add(is_pair))

    def encode(
        self, text: str, *, max_tokens: int | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the token ids of `text`, cut to `max_tokens`; special tokens are never cut.

        `max_tokens`: at least `num_special_tokens`. Raises InvalidRequest.
        """
        encoding = self._encode(text, add_special_tokens=add_special_tokens)
        num_special = self.num_special_tokens() if add_special_tokens else 0
        token_ids = list(encoding.ids)
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        return [token_ids[place] for place in self._kept(encoding, [max_tokens - num_special])]

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        max_tokens: int | None = None,
        max_second_tokens: int | None = None,
    ) -> EncodedPair:
        """Returns the tokens of a pair with the special tokens of its template.

        `max_tokens`: bound on all tokens, at least `num_special_tokens`; the longer text is cut
        first. `max_second_tokens`: bound on those of `second`. Raises InvalidRequest.
        """
        encoding = self._encode((first, second), add_special_tokens=True)
        sequences = encoding.sequence_ids
        lengths = [sequences.count(0), sequences.count(1)]
        if max_second_tokens is not None:
            lengths[1] = min(lengths[1], max_second_tokens)
        if max_tokens is not None:
            room = max_tokens - self.num_special_tokens(is_pair=True)
            lengths = _longest_first(lengths[0], lengths[1], room)
        kept = self._kept(encoding, lengths)
        token_ids, types = encoding.ids, encoding.type_ids
        kept_types = [types[place] for place in kept] if self._has_token_types else []
        start = kept_types.index(1) if 1 in kept_types else 0
        return EncodedPair([token_ids[place] for place in kept], start)

    def beginning(self, text: str, num_tokens: int) -> str:
        """Returns the part of `text` before the token number `num_tokens`.

        Returns all of it if it has no more tokens, or if its beginning would be cut.
        """
        if self._cuts_beginning or len(text) <= num_tokens:
            return text
        encoding = self._encode(text, add_special_tokens=False, has_offsets=True)
        offsets = encoding.offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens][0]]

    def _kept(self, encoding: tokenizers.Encoding, lengths: Sequence[int]) -> list[int]:
        """Returns the places of the tokens that remain; `lengths`: tokens to keep of each text."""
        sequences = encoding.sequence_ids
        places: list[int] = [place for place, text in enumerate(sequences) if text is None]
        for number, length in enumerate(lengths):
            own = [place for place, text in enumerate(sequences) if text == number]
            places += own[len(own) - length :] if self._cuts_beginning else own[:length]
        return sorted(places)

    def _encode(
        self, text: str | tuple[str, str], *, add_special_tokens: bool, has_offsets: bool = False
    ) -> tokenizers.Encoding:
        """Encodes `text`. `has_offsets`: the encoding has the places of tokens in the text."""
        encode = self._tokenizer.encode_batch if has_offsets else self._tokenizer.encode_batch_fast
        try:
            # Unlike `encode` this releases Python's lock.
            (encoding,) = encode([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequest("the text contains a lone surrogate") from error
        return encoding


def _longest_first(first: int, second: int, room: int) -> list[int]:
    """Returns the lengths of two texts that have `room` tokens together; the longer one is cut."""
    if first + second <= room:
        return [first, second]
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [longer, shorter] if first > second else [shorter, longer]


def with_lower_case(tokenizer: tokenizers.Tokenizer) -> None:
    """Makes `tokenizer` turn texts to lower case before anything else."""
    own = [normalizers.Lowercase()]
    if tokenizer.normalizer is not None:
        own.append(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence(own)
