"""Which tokens a row may sample, as the comments of SamplingParams say it."""

import math
from collections.abc import Collection, Sequence

from splitserve.executor.v1 import executor_pb2 as pb

# A choice that no grammar compiles.
INVALID = "no tokens"


def uses_constraints(params: pb.SamplingParams) -> bool:
    """Whether a row with `params` needs FEATURE_TOKEN_CONSTRAINTS."""
    has_lists = bool(params.allowed_token_ids or params.bad_words_token_ids)
    return has_lists or -math.inf in params.logit_bias.values()


def has_phrases(params: pb.SamplingParams) -> bool:
    """Whether what may be sampled depends on the tokens before."""
    return any(len(word.token_ids) > 1 for word in params.bad_words_token_ids)


def first_allowed(
    params: pb.SamplingParams, history: Sequence[int], token_id: int, vocab_size: int
) -> int:
    """`token_id`, or the next one that `params` allow after `history`; -1 for none."""
    banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    if params.allowed_token_ids:
        banned.update(set(range(vocab_size)) - set(params.allowed_token_ids))
    for word in params.bad_words_token_ids:
        *before, last = word.token_ids
        if len(before) <= len(history) and list(history)[len(history) - len(before) :] == before:
            banned.add(last)
    candidates = ((token_id + offset) % vocab_size for offset in range(vocab_size))
    return next((candidate for candidate in candidates if candidate not in banned), -1)


def allowed_next(
    grammar: pb.Grammar, output: Sequence[int], eos: Collection[int]
) -> set[int] | None:
    """The tokens that may follow `output`; None if none of the texts begins like it.

    The texts of `choices` are token ids: "5 9 12".
    """
    if INVALID in grammar.choices.texts:
        return None
    found: set[int] = set()
    num_kept = 0
    for text in grammar.choices.texts:
        choice = [int(token) for token in text.split()]
        if choice[: len(output)] == list(output):
            num_kept += 1
            found |= set(choice[len(output) : len(output) + 1]) or set(eos)
    return found if num_kept else None
