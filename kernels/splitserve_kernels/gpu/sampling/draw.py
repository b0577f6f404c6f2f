"""Launches that turn logits into token ids: greedy or at a temperature, with or without a cut.

The definitions are those of `SamplingParams` in `executor.proto`. No launch depends on a result of
another, so the host never waits, and a CUDA graph can record them. The vocabulary is divided into
blocks, one program each, and every sum has a fixed order, so the token of a row is the same in any
batch.

Sums have another order than torch's, and exp is another approximation. So if u, or a limit of
top-p, is within these errors (about 1e-6) of the boundary between two tokens, the result may be the
other token.

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve_kernels.gpu.launch import ceil_div, next_power_of_2
from splitserve_kernels.gpu.sampling.bracket import gather_kernel
from splitserve_kernels.gpu.sampling.columns import DrawColumns
from splitserve_kernels.gpu.sampling.cut import cut_kernel
from splitserve_kernels.gpu.sampling.pick import pick_kernel, pick_largest_kernel
from splitserve_kernels.gpu.sampling.survey import survey_kernel
from splitserve_kernels.gpu.sampling.weigh import NUM_EDGES, weigh_kept_kernel, weigh_kernel

_BLOCK_V = 4096
_BLOCK_C = 1024
# Limit of listed tokens of a row; a row with more between its edges is searched as a whole, which
# takes longer.
_MAX_LISTED = 16384


@dataclass(frozen=True, slots=True)
class _Survey:
    """Largest logit of each block, `largest` [S, L] float32, and its first token.

    `tokens`: [S, L] int32, token ids.
    """

    largest: Tensor
    tokens: Tensor

    @property
    def max_blocks(self) -> int:
        """Smallest power of 2 that is at least L."""
        return next_power_of_2(self.largest.shape[1])


def greedy(logits: Tensor) -> Tensor:
    """Returns the token with the largest logit of each row; the smallest id among equals.

    `logits`: [S, V] float32, last stride 1, V < 2^31. Returns [S] int32; -1 for a row with NaN or
    +inf, or with -inf only.
    """
    token_ids = logits.new_empty(logits.shape[0], dtype=torch.int32)
    if not len(logits):
        return token_ids
    survey = _survey(logits)
    pick_largest_kernel[(len(logits),)](
        survey.largest,
        survey.tokens,
        token_ids,
        logits.shape[1],
        survey.largest.shape[1],
        MAX_BLOCKS=survey.max_blocks,
    )
    return token_ids


def draw(
    logits: Tensor, columns: DrawColumns, *, may_cut: bool = True, max_listed: int = _MAX_LISTED
) -> Tensor:
    """Samples a token of each row, or takes the largest logit at temperature 0.

    `logits`, and the result: see `greedy`. `may_cut`: whether any row has a top_k below V or a
    top_p below 1. `max_listed`: limit of listed tokens of a row, up to which the search is fast.
    """
    num_rows, vocab_size = logits.shape
    token_ids = logits.new_empty(num_rows, dtype=torch.int32)
    if not num_rows:
        return token_ids
    survey = _survey(logits)
    num_blocks, max_blocks = survey.largest.shape[1], survey.max_blocks
    sums = logits.new_empty((num_rows, num_blocks), dtype=torch.float64)
    num_edges = int(NUM_EDGES) if may_cut else 0
    edge_counts = logits.new_empty((num_rows, num_edges, num_blocks), dtype=torch.int32)
    edge_sums = torch.empty_like(edge_counts, dtype=torch.float64)
    cut_keys, last_tokens = torch.empty_like(token_ids), torch.empty_like(token_ids)
    limits = (columns.temperatures, columns.top_k, columns.top_p)
    sizes = (vocab_size, logits.stride(0), num_blocks)
    grid = (num_rows, num_blocks)
    blocks = {"BLOCK_V": _BLOCK_V, "MAX_BLOCKS": max_blocks}
    weigh_kernel[grid](
        logits,
        survey.largest,
        *limits,
        columns.min_p,
        sums,
        edge_counts,
        edge_sums,
        *sizes,
        **blocks,
    )
    if may_cut:
        listed_keys = logits.new_empty((num_rows, max_listed), dtype=torch.int32)
        listed_tokens = torch.empty_like(listed_keys)
        searched = (edge_counts, edge_sums, listed_keys, listed_tokens)
        gather_kernel[grid](
            logits, survey.largest, *limits, *searched, *sizes, MAX_LISTED=max_listed, **blocks
        )
        cut_kernel[(num_rows,)](
            logits,
            survey.largest,
            *limits,
            *searched,
            cut_keys,
            last_tokens,
            *sizes,
            MAX_BLOCKS=max_blocks,
            MAX_LISTED=max_listed,
            BLOCK_C=_BLOCK_C,
            num_warps=8,
        )
        weigh_kept_kernel[grid](
            logits,
            survey.largest,
            *limits,
            columns.min_p,
            cut_keys,
            last_tokens,
            sums,
            *sizes,
            **blocks,
        )
    pick_kernel[(num_rows,)](
        logits,
        survey.largest,
        survey.tokens,
        *limits,
        columns.min_p,
        columns.seeds,
        columns.positions,
        cut_keys,
        last_tokens,
        sums,
        token_ids,
        *sizes,
        **blocks,
        num_warps=8,
    )
    return token_ids


def _survey(logits: Tensor) -> _Survey:
    num_rows, vocab_size = logits.shape
    num_blocks = ceil_div(vocab_size, _BLOCK_V)
    largest = logits.new_empty((num_rows, num_blocks))
    survey = _Survey(largest, torch.empty_like(largest, dtype=torch.int32))
    survey_kernel[(num_rows, num_blocks)](
        logits,
        survey.largest,
        survey.tokens,
        vocab_size,
        logits.stride(0),
        num_blocks,
        BLOCK_V=_BLOCK_V,
    )
    return survey
