"""A model that knows nothing: bytes and some special tokens, drawn at random under a grammar."""

from __future__ import annotations

import json
import random

import llguidance
import llguidance.numpy

from splitserve_client.types import Choices, Grammar, JsonSchema, Lark, Regex

EOS = 256
SPECIAL_TOKENS = {
    text: 257 + index
    for index, text in enumerate(
        ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "</think>"]
    )
}
_TEXTS = {token_id: text for text, token_id in SPECIAL_TOKENS.items()}


class _Tokens:
    eos_token_id = EOS
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [
        b"\xff" + text.encode() for text in ("<eos>", *SPECIAL_TOKENS)
    ]
    special_token_ids = [EOS, *SPECIAL_TOKENS.values()]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(_Tokens()), n_vocab=257 + len(SPECIAL_TOKENS)
)


def matcher(grammar: Grammar) -> llguidance.LLMatcher:
    """Fails if the grammar does not compile."""
    match grammar:
        case JsonSchema(text):
            compiled = llguidance.LLMatcher.grammar_from_json_schema(text)
        case Regex(text):
            compiled = llguidance.LLMatcher.grammar_from_regex(text)
        case Lark(text):
            compiled = llguidance.LLMatcher.grammar_from_lark(text)
        case Choices(texts):
            lark = "start: " + " | ".join(json.dumps(text) for text in texts)
            compiled = llguidance.LLMatcher.grammar_from_lark(lark)
    made = llguidance.LLMatcher(TOKENIZER, compiled, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def token_ids(text: str, special: bool) -> list[int]:
    """Bytes, with special tokens where they are spelled out."""
    ids: list[int] = []
    while text:
        found = next((each for each in SPECIAL_TOKENS if special and text.startswith(each)), None)
        ids += [SPECIAL_TOKENS[found]] if found else list(text[0].encode())
        text = text[len(found or text[0]) :]
    return ids


def accepts(grammar: Grammar, text: str, *, special: bool = False) -> bool:
    made = matcher(grammar)
    ids = token_ids(text, special)
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


def drawn(grammar: Grammar, rng: random.Random, max_tokens: int = 600) -> str | None:
    """An answer at random; None if it does not end in time."""
    made = matcher(grammar)
    ids: list[int] = []
    mask = llguidance.numpy.allocate_token_bitmask(1, TOKENIZER.vocab_size)
    while len(ids) < max_tokens:
        llguidance.numpy.fill_next_token_bitmask(made, mask, 0)
        words = mask[0]
        allowed = [i for i in range(TOKENIZER.vocab_size) if words[i // 32] >> (i % 32) & 1]
        closing = [i for i in allowed if i == EOS or i > EOS or i in b'"}]>']
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        if token_id == EOS:
            return _text(ids)
        ids.append(token_id)
        assert made.consume_token(token_id)
    return None


def _text(ids: list[int]) -> str:
    pieces = (_TEXTS[i].encode() if i > EOS else bytes([i]) for i in ids)
    return b"".join(pieces).decode()
