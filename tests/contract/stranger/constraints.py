"""Which tokens a row may sample, as the comments of SamplingParams say it."""

import math
from collections.abc import Sequence

from splitserve.executor.v1 import executor_pb2 as pb


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
