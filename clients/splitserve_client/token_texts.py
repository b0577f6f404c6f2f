"""What each token of a vocabulary contributes to a text, by the kind of its decoder.

`tokenizers` decodes a whole list of tokens: its stages map tokens one by one, join runs of bytes,
or work on the joined text. Here the stages are told apart, so that `detokenizer` can do the same to
a stream. What a map makes of a token is asked of the library itself, once for each token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders

from splitserve_rpc.json_text import parse_json

# What a byte stands for in the texts of byte-level tokens: itself if it is printable in Latin-1,
# and the others in their order from 256 on.
_PRINTABLE = frozenset((*range(33, 127), *range(161, 173), *range(174, 256)))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
# A token before another one, so that this is not the first; no stage does anything to it.
_ANCHOR = "\0"

TextMap = Callable[[str], str]


def byte_of_token(text: str) -> int | None:
    """The byte that a token like `<0x0A>` stands for; None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


@dataclass(frozen=True, slots=True)
class ElementMaps:
    """What stages do to one token: to the first of a text, and to any later one."""

    first: tuple[TextMap, ...] = ()
    later: tuple[TextMap, ...] = ()

    def apply(self, text: str, *, is_first: bool) -> str:
        """Raises what the library raises."""
        for text_map in self.first if is_first else self.later:
            text = text_map(text)
        return text


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """A decoder, taken apart.

    `before`: maps of tokens. `is_byte_level`: characters of tokens are bytes, and these are UTF-8.
    `joins_bytes`: runs of tokens like `<0x0A>` are joined, and `after` maps what that gives.
    `num_stripped` of the character `stripped` are cut off at the beginning of the whole text.
    """

    before: ElementMaps = ElementMaps()
    is_byte_level: bool = False
    joins_bytes: bool = False
    after: ElementMaps = ElementMaps()
    stripped: str = ""
    num_stripped: int = 0


def decoder_kind(tokenizer: tokenizers.Tokenizer) -> DecoderKind | None:
    """How `tokenizer` decodes; None where the text is only known when all tokens are."""
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
    """`stages`: what is done to the joined text. All but a strip of its beginning needs the end."""
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
    """The stages up to the first that is no map of single tokens, and the rest."""
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
    """The vocabulary of a tokenizer as contributions to a text, looked up once for each token.

    Threads may share it. `skip_special_tokens`: special tokens then contribute nothing, as ids
    outside the vocabulary never do.
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
        """The token as the vocabulary has it; None for one that contributes nothing."""
        try:
            token = self._tokenizer.id_to_token(token_id)
        except OverflowError:  # negative
            return None
        return None if token is None or token in self._skipped else token

    def contribution(self, token_id: int, *, is_first: bool) -> str | int | None:
        """A text; or one byte of a run, as an int; or None for nothing at all."""
        assert self.kind is not None
        token = self.token(token_id)
        if token is None:
            return None
        text = self.kind.before.apply(token, is_first=is_first)
        byte = byte_of_token(text) if self.kind.joins_bytes else None
        return self.kind.after.apply(text, is_first=is_first) if byte is None else byte


class ByteStrings(dict[int, bytes]):
    """Of a byte-level tokenizer: the bytes of each token."""

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token_id: int) -> bytes:
        token = self._texts.token(token_id)
        if token is None:
            return b""
        try:
            value = bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token is text
            value = token.encode()
        self[token_id] = value
        return value


class LaterTexts(dict[int, str | int | None]):
    """Of other tokenizers: what a token that is not the first contributes.

    A text; or an int, which is one byte of a run; or None for nothing.
    """

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token_id: int) -> str | int | None:
        value = self._texts.contribution(token_id, is_first=False)
        if value is not None:
            self[token_id] = value
        return value
