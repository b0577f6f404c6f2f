"""Contribution of each vocabulary token to a text, by the kind of the tokenizer's decoder.

`tokenizers` decodes whole lists of tokens: its stages map single tokens, join runs of bytes, or
process the joined text. This module separates the stages, so that `detokenizer` can apply them to a
stream. The library itself computes what a stage makes of a token, once per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders

from splitserve_common import parse_json

# Byte-level tokens write a byte as itself if it is printable in Latin-1; the other bytes, in order,
# as the characters from 256 on.
_PRINTABLE = frozenset((*range(33, 127), *range(161, 173), *range(174, 256)))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
# Preceding token, so that a token is not the first of the text; no stage changes it.
_ANCHOR = "\0"

TextMap = Callable[[str], str]


def byte_of_token(text: str) -> int | None:
    """Returns the byte of a token such as `<0x0A>`; None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


@dataclass(frozen=True, slots=True)
class ElementMaps:
    """Functions that stages apply to the first token of a text, and to any later token."""

    first: tuple[TextMap, ...] = ()
    later: tuple[TextMap, ...] = ()

    def apply(self, text: str, *, is_first: bool) -> str:
        """Applies the functions to the text of a token. Raises the library's errors."""
        for text_map in self.first if is_first else self.later:
            text = text_map(text)
        return text


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """Decoder of a tokenizer, split into its stages.

    `before`: functions of single tokens. `is_byte_level`: characters of tokens are bytes of UTF-8.
    `joins_bytes`: runs of tokens like `<0x0A>` are joined; `after`: functions of the joined run.
    `num_stripped`: number of characters `stripped` removed at the start of the whole text.
    """

    before: ElementMaps = ElementMaps()
    is_byte_level: bool = False
    joins_bytes: bool = False
    after: ElementMaps = ElementMaps()
    stripped: str = ""
    num_stripped: int = 0


def decoder_kind(tokenizer: tokenizers.Tokenizer) -> DecoderKind | None:
    """Returns the decoder of `tokenizer`; None if its text is known only when all tokens are."""
    if tokenizer.decoder is None:
        return DecoderKind(before=ElementMaps((), (lambda text: " " + text,)))
    before, rest = _split_maps(_flatten(parse_json(tokenizer.decoder.__getstate__())))
    if rest and rest[0]["type"] == "ByteLevel":
        is_alone = not before.later and all(stage["type"] == "Fuse" for stage in rest[1:])
        return DecoderKind(is_byte_level=True) if is_alone else None
    joins_bytes = bool(rest) and rest[0]["type"] == "ByteFallback"
    after, rest = _split_maps(rest[1:]) if joins_bytes else (ElementMaps(), rest)
    if rest and rest[0]["type"] != "Fuse":
        return None
    return _with_whole_text(rest[1:], before=before, joins_bytes=joins_bytes, after=after)


def _flatten(stage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for part in stage["decoders"] for inner in _flatten(part)]


def _with_whole_text(stages: Sequence[Mapping[str, Any]], **parts: Any) -> DecoderKind | None:  # noqa: ANN401
    """Adds the stages of the joined text.

    None if any but a strip of its start, as those need the end.
    """
    stages = [stage for stage in stages if stage["type"] != "Fuse"]
    if not stages:
        return DecoderKind(**parts)
    strip = stages[0]
    if len(stages) > 1 or strip["type"] != "Strip" or strip["stop"]:
        return None
    return DecoderKind(**parts, stripped=strip["content"], num_stripped=strip["start"])


def _split_maps(
    stages: Sequence[Mapping[str, Any]],
) -> tuple[ElementMaps, Sequence[Mapping[str, Any]]]:
    """Splits `stages` at the first that is no function of single tokens; returns both parts."""
    first: list[TextMap] = []
    later: list[TextMap] = []
    for number, stage in enumerate(stages):
        if stage["type"] not in _ELEMENT_MAPS:
            return ElementMaps(tuple(first), tuple(later)), stages[number:]
        maps = _ELEMENT_MAPS[stage["type"]](stage)
        first.append(maps[0])
        later.append(maps[1])
    return ElementMaps(tuple(first), tuple(later)), ()


def _replace(stage: Mapping[str, Any]) -> tuple[TextMap, TextMap]:
    pattern = stage["pattern"]
    found = pattern["String"] if "String" in pattern else tokenizers.Regex(pattern["Regex"])
    return _alike(decoders.Replace(found, stage["content"]))


def _strip(stage: Mapping[str, Any]) -> tuple[TextMap, TextMap]:
    return _alike(decoders.Strip(stage["content"], stage["start"], stage["stop"]))


def _metaspace(stage: Mapping[str, Any]) -> tuple[TextMap, TextMap]:
    scheme, split = stage.get("prepend_scheme", "always"), stage.get("split", True)
    return _by_place(decoders.Metaspace(stage["replacement"], scheme, split))


def _word_piece(stage: Mapping[str, Any]) -> tuple[TextMap, TextMap]:
    return _by_place(decoders.WordPiece(stage["prefix"], stage["cleanup"]))


def _alike(decoder: Any) -> tuple[TextMap, TextMap]:  # noqa: ANN401
    def text_map(text: str) -> str:
        return str(decoder.decode([text]))

    return text_map, text_map


def _by_place(decoder: Any) -> tuple[TextMap, TextMap]:  # noqa: ANN401
    def first(text: str) -> str:
        return str(decoder.decode([text]))

    def later(text: str) -> str:
        return str(decoder.decode([_ANCHOR, text]))[len(_ANCHOR) :]

    return first, later


_ELEMENT_MAPS: Mapping[str, Callable[[Mapping[str, Any]], tuple[TextMap, TextMap]]] = {
    "Replace": _replace,
    "Strip": _strip,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
}


class TokenTexts:
    """Contributions of a tokenizer's vocabulary to a text, computed once per token. Thread-safe.

    `skip_special_tokens`: special tokens contribute nothing, like ids outside the vocabulary.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and skip_special_tokens
        )
        self.kind = decoder_kind(tokenizer)
        self.byte_strings = ByteStrings(self)
        self.later = LaterTexts(self)

    def token(self, token_id: int) -> str | None:
        """Returns the token as written in the vocabulary; None if it contributes nothing."""
        try:
            token = self._tokenizer.id_to_token(token_id)
        except OverflowError:  # negative id
            return None
        return None if token is None or token in self._skipped else token

    def contribution(self, token_id: int, *, is_first: bool) -> str | int | None:
        """Returns a text, an int for one byte of a run, or None for nothing."""
        assert self.kind is not None
        token = self.token(token_id)
        if token is None:
            return None
        text = self.kind.before.apply(token, is_first=is_first)
        byte = byte_of_token(text) if self.kind.joins_bytes else None
        return self.kind.after.apply(text, is_first=is_first) if byte is None else byte


class ByteStrings(dict[int, bytes]):
    """Bytes of each token of a byte-level tokenizer."""

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token_id: int) -> bytes:
        token = self._texts.token(token_id)
        if token is None:
            return b""
        try:
            value = bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token is plain text
            value = token.encode()
        self[token_id] = value
        return value


class LaterTexts(dict[int, str | int | None]):
    """Contribution of each token that is not the first, for tokenizers that are not byte-level.

    A text, an int for one byte of a run, or None for nothing.
    """

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token_id: int) -> str | int | None:
        value = self._texts.contribution(token_id, is_first=False)
        if value is not None:
            self[token_id] = value
        return value
