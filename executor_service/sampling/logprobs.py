"""Scores of tokens: logprob, rank and the most probable alternatives, from raw logits.

Shape letters: K scored tokens, V tokens of the vocabulary, A alternatives of each while they are
computed, N alternatives over all scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device.host_copies import Array
from executor_service.steps.step import BoolArray, Int32Array, LogprobColumns

# Temporaries are as large as the logits they are made of; this many tokens at a time.
_TOKENS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """What to score; all [K] int32, ordered by row, then position.

    `num_top`: how many alternatives to return for each token.
    """

    row_indexes: Int32Array
    positions: Int32Array
    token_ids: Int32Array
    num_top: Int32Array

    def select(self, kept: BoolArray) -> ScoredTokens:
        """Those of them where `kept` [K] holds."""
        return ScoredTokens(
            self.row_indexes[kept],
            self.positions[kept],
            self.token_ids[kept],
            self.num_top[kept],
        )


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """Scores on the device of `logits` [K, V] float32. `token_ids`: [K] int32.

    `num_top`: A, or more than there are. Returns logprobs and ranks of the tokens, [K] float32 and
    int32, ids and logprobs of the A best, [K, A] int32 and float32.
    """
    if len(logits) <= _TOKENS_AT_A_TIME:
        return _score(logits, token_ids, num_top)
    parts = [
        _score(*part, num_top)
        for part in zip(
            torch.split(logits, _TOKENS_AT_A_TIME),
            torch.split(token_ids, _TOKENS_AT_A_TIME),
            strict=True,
        )
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def make_columns(tokens: ScoredTokens, scores: tuple[Array, ...]) -> LogprobColumns:
    """`scores`: what `score` returns for `tokens`, with A no less than the largest `num_top`."""
    logprobs, ranks, top_ids, top_logprobs = scores
    num_top = np.minimum(tokens.num_top, top_ids.shape[1])
    # Keeps the first num_top[i] of line i; boolean indexing goes line by line.
    wanted = np.arange(top_ids.shape[1])[None, :] < num_top[:, None]
    return LogprobColumns(
        row_indexes=tokens.row_indexes,
        positions=tokens.positions,
        token_ids=tokens.token_ids,
        logprobs=logprobs,
        ranks=ranks,
        top_offsets=np.concatenate([[0], np.cumsum(num_top)]).astype(np.int32),
        top_token_ids=top_ids[wanted],
        top_logprobs=top_logprobs[wanted],
    )


def _score(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    target_logits = logits.gather(-1, token_ids.to(torch.int64)[:, None])
    ranks = (logits > target_logits).sum(dim=-1) + 1
    top_logits, top_ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return (
        (target_logits - normaliser).squeeze(-1),
        ranks.to(torch.int32),
        top_ids.to(torch.int32),
        top_logits - normaliser,
    )
