"""Grammars of a model without texts: what may follow is worked out from its token ids alone.

The texts of `choices` are token ids, "5 9 12". Any other kind is a rule that looks at all output
tokens. A text that begins with "!" cannot be compiled.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

from executor_service.steps.sampling_params import Grammar

_MODULUS = 3
_END_EVERY = 5


def is_invalid(grammar: Grammar) -> bool:
    """Whether it cannot be compiled."""
    return any(text.startswith("!") for text in grammar.texts)


def allowed_by(
    grammar: Grammar, output: Sequence[int], vocab_size: int, eos: Collection[int]
) -> frozenset[int] | None:
    """What may follow `output`; None if the grammar is invalid, or `output` breaks it."""
    if is_invalid(grammar):
        return None
    if grammar.kind == "choices":
        return _of_choices(grammar, output, eos)
    for position in range(len(output)):
        if output[position] not in _of_rule(grammar, output[:position], vocab_size, eos):
            return None
    return _of_rule(grammar, output, vocab_size, eos)


def _of_choices(
    grammar: Grammar, output: Sequence[int], eos: Collection[int]
) -> frozenset[int] | None:
    choices = [list(map(int, text.split())) for text in grammar.texts]
    kept = [choice for choice in choices if choice[: len(output)] == list(output)]
    if not kept:
        return None
    allowed = {choice[len(output)] for choice in kept if len(choice) > len(output)}
    return frozenset(allowed | (set(eos) if list(output) in kept else set()))


def _of_rule(
    grammar: Grammar, output: Sequence[int], vocab_size: int, eos: Collection[int]
) -> frozenset[int]:
    """Every third token, beginning with one that all of `output` decides; sometimes the end."""
    start = (zlib.crc32(grammar.texts[0].encode()) + sum(output)) % _MODULUS
    allowed = set(range(start, vocab_size, _MODULUS)) - set(eos)
    return frozenset(allowed | (set(eos) if sum(output) % _END_EVERY == 0 else set()))
