"""Vocabulary of a model for grammars: the bytes of its tokens, read from tokenizer.json.

Shape letters: V tokens of the vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from executor_service.steps import TokenizerFile, read_tokenizer_file
from splitserve_common import parse_json

# llguidance accepts tokens of up to 1024 bytes; a longer token is never sampled.
_MAX_TOKEN_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens that grammars are compiled for.

    `tokenizer`: V tokens for llguidance, no fewer than the model has. `has_text`: [V] bytes, 1 for
    tokens that are part of a text. `samplable`: [W] uint32, a bit for each of these tokens and for
    `eos_token_ids`. `eos_bits`: [W] uint32, bits of `eos_token_ids` alone.
    """

    tokenizer: LLTokenizer
    eos_token_ids: frozenset[int]
    has_text: bytes
    samplable: npt.NDArray[np.uint32]
    eos_bits: npt.NDArray[np.uint32]

    @classmethod
    def read(cls, file: TokenizerFile, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Reads a tokenizer.json; takes a second for 150 000 tokens, and holds the GIL.

        `vocab_size`: that of the model. Raises TokenizerUnsupported.
        """
        if not eos_token_ids:
            raise TokenizerUnsupported("the model has no end-of-sequence token")
        token_bytes = read_token_bytes(file, vocab_size)
        for token_id in eos_token_ids:
            token_bytes[token_id] = b""
        token_bytes = [b"" if len(text) > _MAX_TOKEN_BYTES else text for text in token_bytes]
        tokenizer = _tokenizer(token_bytes, eos_token_ids)
        has_text = np.zeros(tokenizer.vocab_size, np.bool_)
        has_text[: len(token_bytes)] = [len(text) > 0 for text in token_bytes]
        is_eos = np.zeros(tokenizer.vocab_size, np.bool_)
        is_eos[list(eos_token_ids)] = True
        return cls(
            tokenizer=tokenizer,
            eos_token_ids=frozenset(eos_token_ids),
            has_text=has_text.tobytes(),
            samplable=_pack(has_text | is_eos),
            eos_bits=_pack(is_eos),
        )


def _tokenizer(token_bytes: list[bytes], eos_token_ids: Sequence[int]) -> LLTokenizer:
    wrapper = TokenizerWrapper(_TokenTexts(token_bytes))
    try:
        return LLTokenizer(wrapper, eos_token=list(eos_token_ids))
    except BaseException as error:
        # A panic in Rust is not an Exception; the model is served without grammars then.
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerUnsupported(f"llguidance rejects the tokens: {error}") from error


def _pack(tokens: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Packs flags [V] into words [W]; the first token is the lowest bit."""
    padded = np.pad(tokens, (0, -len(tokens) % 32))
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


class _TokenTexts:
    """Tokenizer interface that llguidance requires of a tokenizer that it does not read itself."""

    bos_token_id = None
    # Only one id fits here; LLTokenizer gets all of them as an argument.
    eos_token_id = 0

    def __init__(self, tokens: list[bytes]) -> None:
        # Special tokens have no text here, so no grammar can name them. But llguidance needs one
        # special token: without it, grammars that name special tokens cause a panic instead of an
        # error.
        self.tokens = [*tokens, b"<none>"]
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizes text, for forced tokens only; see `no_forcing`. Raises NotImplementedError."""
        raise NotImplementedError


# -- Bytes of tokens from tokenizer.json -----------------------------------------------------------
#
# A tokenizer's decoder is a chain of steps. Steps that change one token at a time are applied here.
# Steps for the first token of a text, and steps that join tokens, change no token's bytes.

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Decodes all pieces at once.
_Decode = Callable[[Sequence[str]], list[bytes]]
_Replace = tuple[str, str]


class TokenizerUnsupported(Exception):
    """Error: the bytes of the tokens cannot be determined; the message gives the reason."""


def read_token_bytes(file: TokenizerFile, vocab_size: int) -> list[bytes]:
    """Returns the bytes of each token id, at least `vocab_size`; empty for an id without text.

    An id without text is a special token, or an id of the model that the tokenizer does not have.
    Raises TokenizerUnsupported if `file` is no tokenizer.json, or if its decoder is not supported.
    """
    try:
        spec = parse_json(read_tokenizer_file(file))
        added: list[dict[str, Any]] = spec.get("added_tokens") or []
        pieces = dict(_pieces(spec["model"]["vocab"]))
        decode = _decoder(spec.get("decoder"))
        special_ids = {token["id"] for token in added if token["special"]}
        pieces |= {token["id"]: token["content"] for token in added}
        token_bytes = [b""] * max(vocab_size, max(pieces, default=-1) + 1)
        ids = [token_id for token_id in pieces if token_id not in special_ids]
        texts = decode([pieces[token_id] for token_id in ids])
        for token_id, text in zip(ids, texts, strict=True):
            token_bytes[token_id] = text
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"tokenizer.json cannot be read: {type(error).__name__}"
        raise TokenizerUnsupported(reason) from error
    return token_bytes


def _pieces(vocab: Mapping[str, int] | Sequence[Sequence[Any]]) -> Iterable[tuple[int, str]]:
    """Returns pairs of id and piece; a unigram model has a list of pieces with their scores."""
    if isinstance(vocab, Mapping):
        return ((token_id, piece) for piece, token_id in vocab.items())
    return ((token_id, entry[0]) for token_id, entry in enumerate(vocab))


def _decoder(decoder: dict[str, Any] | None) -> _Decode:
    """Returns a function from pieces to bytes. Raises TokenizerUnsupported."""
    if decoder is None:
        raise TokenizerUnsupported("the tokenizer has no decoder")
    replaces: list[_Replace] = []
    has_byte_tokens = False
    for step in _steps(decoder):
        match step["type"]:
            case "ByteLevel":
                return _byte_level
            case "Replace":
                replaces.append(_replace(step))
            case "Metaspace":
                replaces.append((step["replacement"], " "))
            case "ByteFallback":
                has_byte_tokens = True
            case "Fuse" | "Strip":
                pass
            case kind:
                raise TokenizerUnsupported(f"the tokenizer has a decoder of type {kind}")
    return lambda pieces: [_metaspace(piece, replaces, has_byte_tokens) for piece in pieces]


def _steps(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _replace(step: dict[str, Any]) -> _Replace:
    pattern: str | None = step["pattern"].get("String")
    if pattern is None:
        raise TokenizerUnsupported("the tokenizer decodes with a regular expression")
    return pattern, step["content"]


def _metaspace(piece: str, replaces: Sequence[_Replace], has_byte_tokens: bool) -> bytes:
    if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes.fromhex(match[1])
    for pattern, content in replaces:
        piece = piece.replace(pattern, content)
    return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each printable stand-in character.

    Most bytes stand for themselves; the characters of the others begin at 256. Source: Radford
    2019, the code of GPT-2.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    alphabet = {chr(byte): byte for byte in own}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_OTHER = 0xFFFF  # no byte
_BYTE_OF = np.full(0x144 + 1, _OTHER, np.uint16)
for _char, _byte in _byte_alphabet().items():
    _BYTE_OF[ord(_char)] = _byte


def _byte_level(pieces: Sequence[str]) -> list[bytes]:
    """Decodes byte-level pieces; a piece with a character outside the alphabet is kept as text."""
    chars = np.frombuffer("".join(pieces).encode("utf-32-le"), "<u4")
    found = _BYTE_OF[np.minimum(chars, len(_BYTE_OF) - 1)]
    all_bytes = found.astype(np.uint8).tobytes()
    ends = list(accumulate(map(len, pieces)))
    texts = [all_bytes[end - len(piece) : end] for piece, end in zip(pieces, ends, strict=True)]
    for index in np.unique(np.searchsorted(ends, np.flatnonzero(found == _OTHER), "right")):
        texts[index] = pieces[index].encode()
    return texts
