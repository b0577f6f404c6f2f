"""Truncation of the vocabulary, by top-k, then top-p of the rest, then min-p; and logprobs.

A row is cut at a threshold among its largest logits. Sorting a whole vocabulary is slow, and the
cut is nearly always among the first few hundred tokens. So rows are tried with ever more
candidates, in the end with all. To decide how far to go, the host reads intermediate results. On
devices other than a CPU it would have to wait for them: there whole rows are sorted.

Shape letters: S rows that sample, V tokens of the vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device import Array, to_device, to_host
from executor_service.steps import BoolArray, Int32Array, LogprobColumns, ParamRows

_NUM_CANDIDATES = (256, 4096)


class _Limits:
    """Limits of some rows as columns: [S] int64, [S] float64, [S] float32."""

    def __init__(self, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p

    @classmethod
    def of(cls, params: ParamRows, vocab_size: int, device: torch.device) -> _Limits:
        """Builds the columns of `params`; a row without top-k gets the size of the vocabulary."""
        return cls(
            to_device(params.top_k(vocab_size).astype(np.int64), device),
            to_device(params.column("top_p"), device),
            to_device(params.column("min_p"), device),
        )

    def select(self, rows: Tensor) -> _Limits:
        """Returns the limits of `rows`, given as indexes."""
        return _Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def _is_limited(params: ParamRows, vocab_size: int) -> BoolArray:
    """Returns which rows may lose tokens to a limit, [S]."""
    is_cut: BoolArray = (params.column("top_p") < 1) | (params.column("min_p") > 0)
    is_cut |= params.top_k(vocab_size) < vocab_size
    return is_cut


def truncate(scaled: Tensor, params: ParamRows) -> Tensor:
    """Returns the weights of the tokens that stay eligible, 0 for other tokens.

    `scaled`: [S, V] float32, logits over temperature, the largest of each row at 0. Returns [S, V]
    float32: exp(scaled), proportional to probability. Among equal logits at the cut of top-p the
    smaller token ids stay. The host reads intermediate results.
    """
    vocab_size = scaled.shape[-1]
    weights = torch.exp(scaled)
    limited = np.flatnonzero(_is_limited(params, vocab_size))
    if not len(limited):
        return weights
    limits = _Limits.of(params.take(limited), vocab_size, scaled.device)
    open_rows = to_device(limited, scaled.device)
    for num_candidates in (*(c for c in _NUM_CANDIDATES if c < vocab_size), vocab_size):
        part = scaled[open_rows]
        candidates = part.topk(num_candidates, dim=-1).values
        num_kept, is_settled = _count_kept(candidates, weights[open_rows], limits)
        cut = candidates.gather(-1, (num_kept - 1)[:, None])
        num_equal_kept = num_kept - (part > cut).sum(dim=-1)
        has_excess = (part == cut).sum(dim=-1) > num_equal_kept
        settled_lines, excess_lines = to_host(is_settled, has_excess)
        keep = part >= cut
        if excess_lines.any():
            lines = to_device(np.flatnonzero(excess_lines), scaled.device)
            keep[lines] = _keep_first(part[lines], cut[lines], num_equal_kept[lines])
        lines = to_device(np.flatnonzero(settled_lines), scaled.device)
        settled_rows = open_rows[lines]
        weights[settled_rows] = torch.where(keep[lines], weights[settled_rows], 0.0)
        if settled_lines.all():
            break
        lines = to_device(np.flatnonzero(~settled_lines), scaled.device)
        open_rows, limits = open_rows[lines], limits.select(lines)
    return weights


def truncate_unseen(scaled: Tensor, params: ParamRows) -> Tensor:
    """Does the same as `truncate`, but the host reads no results, so it waits for no device."""
    vocab_size = scaled.shape[-1]
    weights = torch.exp(scaled)
    # A stable sort: among equal logits the smaller ids come first.
    falling = scaled.sort(dim=-1, descending=True, stable=True)
    limits = _Limits.of(params, vocab_size, scaled.device)
    num_kept, _ = _count_kept(falling.values, weights, limits)
    is_kept = torch.arange(vocab_size, device=scaled.device) < num_kept[:, None]
    return torch.where(is_kept.scatter(-1, falling.indices, is_kept), weights, 0.0)


def _count_kept(candidates: Tensor, weights: Tensor, limits: _Limits) -> tuple[Tensor, Tensor]:
    """Counts how many of the largest tokens of each row stay, and tells if that is certain.

    `candidates`: [S, C], the largest of `scaled`, falling. `weights`: [S, V]. Returns [S] int64 and
    [S] bool: a cut at or past the last candidate of C < V is not certain.
    """
    num_candidates, vocab_size = candidates.shape[-1], weights.shape[-1]
    sorted_weights = torch.exp(candidates)
    kth = candidates.gather(-1, (limits.top_k.clamp(max=num_candidates) - 1)[:, None])
    within_k = ((candidates >= kth) | (limits.top_k >= vocab_size)[:, None]).sum(dim=-1)
    # In rows with NaN no candidate satisfies a comparison.
    within_k = torch.where(limits.top_k > num_candidates, num_candidates, within_k).clamp(min=1)
    within_min_p = (sorted_weights >= limits.min_p[:, None]).sum(dim=-1)

    running = sorted_weights.to(torch.float64).cumsum(dim=-1)
    total = running.gather(-1, (within_k - 1)[:, None]).squeeze(-1)
    if num_candidates < vocab_size:
        is_all = limits.top_k >= vocab_size
        total = torch.where(is_all, weights.sum(dim=-1, dtype=torch.float64), total)
    before = running - sorted_weights
    within_p = (before < (limits.top_p * total)[:, None]).sum(dim=-1)
    within_p = torch.where(limits.top_p < 1, within_p, num_candidates)
    num_kept = torch.minimum(torch.minimum(within_k, within_p), within_min_p).clamp(min=1)
    if num_candidates == vocab_size:
        return num_kept, torch.ones_like(num_kept, dtype=torch.bool)
    # If top-k ends past the candidates, the total that top-p refers to is not known yet.
    is_total_open = ~is_all & (within_k >= num_candidates) & (limits.top_p < 1)
    return num_kept, (num_kept < num_candidates) & ~is_total_open


def _keep_first(scaled: Tensor, cut: Tensor, num_equal_kept: Tensor) -> Tensor:
    """Keeps tokens above the cut and the first equal ones. [S, V], [S, 1], [S] -> [S, V]."""
    equal = scaled == cut
    return (scaled > cut) | (equal & (equal.cumsum(dim=-1) <= num_equal_kept[:, None]))


# -- Logprobs, ranks and alternatives of tokens, from raw logits -----------------------------------
#
# Shape letters: K scored tokens, V tokens of the vocabulary, A alternatives of each while they are
# computed, N alternatives over all scored tokens.

# Tokens that are scored at a time; temporaries are as large as their logits.
_TOKENS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens to score; all [K] int32, ordered by row, then position.

    `num_top`: number of alternatives to return for each token.
    """

    row_indexes: Int32Array
    positions: Int32Array
    token_ids: Int32Array
    num_top: Int32Array

    def select(self, kept: BoolArray) -> ScoredTokens:
        """Returns the tokens where `kept` [K] is True."""
        return ScoredTokens(
            self.row_indexes[kept],
            self.positions[kept],
            self.token_ids[kept],
            self.num_top[kept],
        )


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """Scores tokens on the device from `logits` [K, V] float32. `token_ids`: [K] int32.

    `num_top`: A, or more than the vocabulary has. Returns logprobs and ranks of the tokens, [K]
    float32 and int32, and ids and logprobs of the A best tokens, [K, A] int32 and float32.
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
    """Builds the columns from the result of `score` for `tokens`, A >= the largest `num_top`."""
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
