"""What grammars are compiled for: the texts of a model's tokens.

Shape letters: V tokens of the vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from executor_service.grammars.token_bytes import TokenizerUnsupported, read_token_bytes
from executor_service.steps.executor_info import TokenizerFile

# llguidance takes up to 1024; a longer one is never sampled.
_MAX_TOKEN_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokenizer`: V tokens for llguidance, no fewer than the model has.

    `has_text`: [V] bytes, 1 for tokens that are part of a text. `samplable`: [W] uint32, a bit for
    each of those, and for `eos_token_ids`. `eos_bits`: [W] uint32, for these alone.
    """

    tokenizer: LLTokenizer
    eos_token_ids: frozenset[int]
    has_text: bytes
    samplable: npt.NDArray[np.uint32]
    eos_bits: npt.NDArray[np.uint32]

    @classmethod
    def read(cls, file: TokenizerFile, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Of a tokenizer.json; takes a second with 150 000 tokens, and the GIL.

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
        # What panics in Rust is no Exception; the model is served even so.
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerUnsupported(f"llguidance cannot take its tokens: {error}") from error


def _pack(tokens: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """[V] to [W]; the first token is the lowest bit."""
    padded = np.pad(tokens, (0, -len(tokens) % 32))
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


class _TokenTexts:
    """What llguidance asks of a tokenizer that it does not read itself."""

    bos_token_id = None
    # It is told of all of them beside this.
    eos_token_id = 0

    def __init__(self, tokens: list[bytes]) -> None:
        # Special tokens have no text here, so no grammar can name them; but one there has to be,
        # or grammars that try are met by a panic instead of an error.
        self.tokens = [*tokens, b"<none>"]
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: bytes) -> list[int]:
        """Only for tokens that are sampled without a model; see `no_forcing`."""
        raise NotImplementedError
