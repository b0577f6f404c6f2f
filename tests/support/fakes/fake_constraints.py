"""Tokens that sampling parameters forbid a fake model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from executor_service.steps.sampling_params import SamplingParams


def choose_allowed(
    token_id: int,
    params: SamplingParams,
    history: Sequence[int],
    vocab_size: int,
    by_grammar: Collection[int] | None = None,
) -> int:
    """`token_id`, or the next one that may follow `history`; -1 where none may.

    `by_grammar`: those that a grammar allows, None without one.
    """
    banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    if by_grammar is not None:
        banned |= set(range(vocab_size)) - set(by_grammar)
    if params.allowed_token_ids:
        banned |= set(range(vocab_size)) - set(params.allowed_token_ids)
    for *before, last in params.bad_words_token_ids:
        if list(history[max(len(history) - len(before), 0) :]) == before:
            banned.add(last)
    for offset in range(vocab_size):
        candidate = (token_id + offset) % vocab_size
        if candidate not in banned:
            return candidate
    return -1
