"""A model of random bytes under a grammar."""

from __future__ import annotations

import json
import random

import llguidance
import llguidance.numpy

from splitserve_text import Choices, Grammar, JsonSchema, Lark, Regex

TOKENIZER = llguidance.LLTokenizer("byte")
_CLOSING = set(b'"}]>')


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


def accepts(grammar: Grammar, text: str) -> bool:
    made = matcher(grammar)
    ids = list(text.encode())
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


def drawn(grammar: Grammar, rng: random.Random, max_tokens: int = 600) -> str | None:
    """An answer at random, rather short; None if it does not end in time."""
    made = matcher(grammar)
    ids: list[int] = []
    mask = llguidance.numpy.allocate_token_bitmask(1, TOKENIZER.vocab_size)
    while len(ids) < max_tokens:
        llguidance.numpy.fill_next_token_bitmask(made, mask, 0)
        allowed = [i for i in range(TOKENIZER.vocab_size) if mask[0][i // 32] >> (i % 32) & 1]
        closing = [i for i in allowed if i == TOKENIZER.eos_token or i in _CLOSING]
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        if token_id == TOKENIZER.eos_token:
            return bytes(ids).decode()
        ids.append(token_id)
        assert made.consume_token(token_id)
    return None
