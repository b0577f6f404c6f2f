"""Scores of tokens: logprob, rank and the most probable alternatives, from raw logits.

Shape letters: K scored tokens, V tokens of the vocabulary, N alternatives over all scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.step import Float32Array, Int32Array, LogprobColumns

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


def score_tokens(logits: Tensor, tokens: ScoredTokens) -> LogprobColumns:
    """Scores `tokens` under `logits` [K, V] float32, raw and finite where it matters."""
    num_tokens, vocab_size = logits.shape
    num_top = np.minimum(tokens.num_top, vocab_size)
    widest = int(num_top.max()) if num_tokens else 0
    parts = [
        _score(logits[part], tokens.token_ids[part], widest)
        for start in range(0, num_tokens, _TOKENS_AT_A_TIME)
        for part in (slice(start, start + _TOKENS_AT_A_TIME),)
    ]
    logprobs, ranks, top_ids, top_logprobs = (
        np.concatenate(column) if parts else np.empty(0) for column in _columns(parts)
    )
    # Keeps the first num_top[i] of line i; boolean indexing goes line by line.
    wanted = np.arange(widest)[None, :] < num_top[:, None]
    return LogprobColumns(
        row_indexes=tokens.row_indexes,
        positions=tokens.positions,
        token_ids=tokens.token_ids,
        logprobs=logprobs.astype(np.float32),
        ranks=ranks.astype(np.int32),
        top_offsets=np.concatenate([[0], np.cumsum(num_top)]).astype(np.int32),
        top_token_ids=top_ids.reshape(wanted.shape)[wanted].astype(np.int32),
        top_logprobs=top_logprobs.reshape(wanted.shape)[wanted].astype(np.float32),
    )


_Part = tuple[Float32Array, np.ndarray, np.ndarray, Float32Array]


def _columns(parts: list[_Part]) -> list[list[np.ndarray]]:
    return [[part[column] for part in parts] for column in range(4)]


def _score(logits: Tensor, token_ids: Int32Array, num_top: int) -> _Part:
    """Logprobs and ranks of `token_ids`, ids and logprobs of the best; [k], [k], [k, n], [k, n]."""
    targets = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)[:, None]
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    target_logits = logits.gather(-1, targets)
    ranks = (logits > target_logits).sum(dim=-1) + 1
    top_logits, top_ids = logits.topk(num_top, dim=-1)
    return (
        (target_logits - normaliser).squeeze(-1).cpu().numpy(),
        ranks.cpu().numpy(),
        top_ids.cpu().numpy(),
        (top_logits - normaliser).cpu().numpy(),
    )
