"""The bytes that each token stands for, from tokenizer.json.

A tokenizer's decoder is a chain of steps. Those that change one token at a time are followed here;
what concerns only the first token of a text, and what joins them, changes no token's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from executor_service.steps.executor_info import TokenizerFile, read_tokenizer_file
from splitserve_rpc.json_text import parse_json

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Of all pieces at once.
_Decode = Callable[[Sequence[str]], list[bytes]]
_Replace = tuple[str, str]


class TokenizerUnsupported(Exception):
    """The bytes of its tokens cannot be told; the message says why."""


def read_token_bytes(file: TokenizerFile, vocab_size: int) -> list[bytes]:
    """The bytes of each token id, at least `vocab_size` of them; empty for one that has no text.

    That is a special token, or an id of the model that is none of the tokenizer's. Raises
    TokenizerUnsupported if `file` is no tokenizer.json, or its decoder is none of those known here.
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
    """Ids and pieces; a unigram model has a list of pieces with their scores."""
    if isinstance(vocab, Mapping):
        return ((token_id, piece) for piece, token_id in vocab.items())
    return ((token_id, entry[0]) for token_id, entry in enumerate(vocab))


def _decoder(decoder: dict[str, Any] | None) -> _Decode:
    """What pieces are as bytes. Raises TokenizerUnsupported."""
    if decoder is None:
        raise TokenizerUnsupported("its tokenizer has no decoder")
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
                raise TokenizerUnsupported(f"its tokenizer has a decoder of type {kind}")
    return lambda pieces: [_metaspace(piece, replaces, has_byte_tokens) for piece in pieces]


def _steps(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _replace(step: dict[str, Any]) -> _Replace:
    pattern: str | None = step["pattern"].get("String")
    if pattern is None:
        raise TokenizerUnsupported("its tokenizer decodes by a regular expression")
    return pattern, step["content"]


def _metaspace(piece: str, replaces: Sequence[_Replace], has_byte_tokens: bool) -> bytes:
    if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes.fromhex(match[1])
    for pattern, content in replaces:
        piece = piece.replace(pattern, content)
    return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Bytes as printable characters: most are their own, the others begin at 256.

    Source: Radford 2019, the code of GPT-2.
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
    """A piece with a character beyond the alphabet stands for itself, as a whole."""
    chars = np.frombuffer("".join(pieces).encode("utf-32-le"), "<u4")
    found = _BYTE_OF[np.minimum(chars, len(_BYTE_OF) - 1)]
    all_bytes = found.astype(np.uint8).tobytes()
    ends = list(accumulate(map(len, pieces)))
    texts = [all_bytes[end - len(piece) : end] for piece, end in zip(pieces, ends, strict=True)]
    for index in np.unique(np.searchsorted(ends, np.flatnonzero(found == _OTHER), "right")):
        texts[index] = pieces[index].encode()
    return texts
