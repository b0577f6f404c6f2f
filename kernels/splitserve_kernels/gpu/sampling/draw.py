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

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.gpu.launch import ceil_div, next_power_of_2
from splitserve_kernels.gpu.philox import uniform
from splitserve_kernels.gpu.sampling.cut import cut_kernel, gather_kernel
from splitserve_kernels.gpu.sampling.weights import (
    LARGEST_KEY,
    NUM_EDGES,
    edge_key,
    is_finite,
    is_searched,
    load_keys,
    row_largest,
    weights_of,
)

# -- Sampling parameters on the device, copied as a whole ------------------------------------------
#
# Shape letter: N capacity in rows.

# 64-bit words per row.
_NUM_WORDS = 5
# Columns start at addresses aligned for loads of any width: Triton compiles a kernel again for
# unaligned ones.
_ALIGNED_ROWS = 4


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """Columns of `DrawRows` on the device of the logits, [S] or more each."""

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def of_words(cls, words: Tensor) -> DrawColumns:
        """Returns views of `words` [5 N] int64, filled by `pack`, as columns of [N] each."""
        num_rows = len(words) // _NUM_WORDS
        seeds, positions, top_p, floats, integers = words.view(_NUM_WORDS, num_rows)
        temperatures, min_p = floats.view(torch.float32).split(num_rows)
        top_k, _ = integers.view(torch.int32).split(num_rows)
        return cls(temperatures, top_k, top_p.view(torch.float64), min_p, seeds, positions)


def num_words(num_rows: int) -> int:
    """Returns the number of words that `pack` needs for `num_rows` rows: 5 N."""
    return _NUM_WORDS * (num_rows // _ALIGNED_ROWS + 1) * _ALIGNED_ROWS


def pack(rows: DrawRows, words: npt.NDArray[np.int64]) -> None:
    """Writes `rows` into `words` [5 N] int64, N >= S; further rows are greedy."""
    words[:] = 0
    seeds, positions, top_p, floats, integers = words.reshape(_NUM_WORDS, -1)
    count, room = len(rows), len(seeds)
    seeds[:count] = rows.seeds
    positions[:count] = rows.positions
    top_p.view(np.float64)[:count] = rows.top_p
    floats.view(np.float32)[:count] = rows.temperatures
    floats.view(np.float32)[room : room + count] = rows.min_p
    integers.view(np.int32)[:count] = rows.top_k


# -- Launches --------------------------------------------------------------------------------------

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


# -- Largest logit of each block of the vocabulary, and the first token with that logit ------------


@triton.jit
def survey_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    token_ids: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_V: tl.constexpr,
) -> None:
    """Surveys one block of a row. `largest`, `token_ids`: [S, L]; a block with NaN has +inf."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = tokens < vocab_size
    x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=float("-inf"))
    # NaN and +inf both make a row invalid.
    x = tl.where(x == x, x, float("inf"))
    most = tl.max(x, 0)
    tl.store(largest + row * num_blocks + block, most)
    tl.store(
        token_ids + row * num_blocks + block, tl.min(tl.where(x == most, tokens, vocab_size), 0)
    )


# -- Sums of weights by block of the vocabulary, before and after the cut of a row -----------------


@triton.jit
def kept_weights(
    keys: tl.tensor,
    tokens: tl.tensor,
    cut_key: tl.tensor,
    last_token: tl.tensor,
    min_p: tl.tensor,
) -> tl.tensor:
    """Returns weights as float64.

    0 for tokens cut off after `cut_key`, `last_token` or by min_p.
    """
    weights = weights_of(keys)
    is_kept = (keys < cut_key) | ((keys == cut_key) & (tokens <= last_token))
    return tl.where(is_kept & (weights >= min_p), weights, 0.0).to(tl.float64)


@triton.jit
def weigh_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    sums: tl.tensor,
    edge_counts: tl.tensor,
    edge_sums: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_V: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
) -> None:
    """Weighs one block of a row that is sampled at a temperature.

    For a searched row, writes the number of tokens up to each edge to `edge_counts` [S, E, L] int32
    and their weight to `edge_sums` [S, E, L] float64; otherwise writes the weight of all kept
    tokens to `sums` [S, L] float64.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = row_largest(largest, row, num_blocks, MAX_BLOCKS)
    temperature = tl.load(temperatures + row)
    if is_finite(most) & (temperature > 0.0):
        tokens = block * BLOCK_V + tl.arange(0, BLOCK_V)
        keys = load_keys(logits + row * row_stride, tokens, vocab_size, most, temperature)
        if is_searched(tl.load(top_k + row), tl.load(top_p + row), vocab_size):
            weights = weights_of(keys).to(tl.float64)
            smallest = tl.min(keys, 0)
            for edge in range(NUM_EDGES):
                bound = edge_key(block * 0 + edge)
                at = (row * NUM_EDGES + edge) * num_blocks + block
                # Most blocks have no token up to the first edges.
                if smallest <= bound:
                    is_inside = keys <= bound
                    tl.store(edge_counts + at, tl.sum(is_inside.to(tl.int32), 0))
                    tl.store(edge_sums + at, tl.sum(tl.where(is_inside, weights, 0.0), 0))
                else:
                    tl.store(edge_counts + at, 0)
                    tl.store(edge_sums + at, 0.0)
        else:
            weights = kept_weights(keys, tokens, LARGEST_KEY, vocab_size, tl.load(min_p + row))
            tl.store(sums + row * num_blocks + block, tl.sum(weights, 0))


@triton.jit
def weigh_kept_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    cut_keys: tl.tensor,
    last_tokens: tl.tensor,
    sums: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_V: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
) -> None:
    """Writes the weight of the kept tokens of one block of a searched row to `sums` [S, L]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = row_largest(largest, row, num_blocks, MAX_BLOCKS)
    temperature = tl.load(temperatures + row)
    searched = is_searched(tl.load(top_k + row), tl.load(top_p + row), vocab_size)
    if is_finite(most) & (temperature > 0.0) & searched:
        tokens = block * BLOCK_V + tl.arange(0, BLOCK_V)
        keys = load_keys(logits + row * row_stride, tokens, vocab_size, most, temperature)
        weights = kept_weights(
            keys,
            tokens,
            tl.load(cut_keys + row),
            tl.load(last_tokens + row),
            tl.load(min_p + row),
        )
        tl.store(sums + row * num_blocks + block, tl.sum(weights, 0))


# -- Choice of a row's token: the largest logit, or where the sum of weights passes u --------------


@triton.jit
def _largest_token(
    largest: tl.tensor,
    block_tokens: tl.tensor,
    row: tl.tensor,
    most: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    MAX_BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Returns the first token with the largest logit of the row; -1 if the row is invalid."""
    blocks = tl.arange(0, MAX_BLOCKS)
    is_block = blocks < num_blocks
    parts = tl.load(largest + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    tokens = tl.load(block_tokens + row * num_blocks + blocks, mask=is_block, other=vocab_size)
    first = tl.min(tl.where(parts == most, tokens, vocab_size), 0)
    return tl.where(is_finite(most), first, -1)


@triton.jit
def pick_largest_kernel(
    largest: tl.tensor,
    block_tokens: tl.tensor,
    token_ids: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    MAX_BLOCKS: tl.constexpr,
) -> None:
    """Picks the token of one row if all rows are greedy. `token_ids`: [S] int32."""
    row = tl.program_id(0).to(tl.int64)
    most = row_largest(largest, row, num_blocks, MAX_BLOCKS)
    token_id = _largest_token(largest, block_tokens, row, most, vocab_size, num_blocks, MAX_BLOCKS)
    tl.store(token_ids + row, token_id)


@triton.jit
def pick_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    block_tokens: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    cut_keys: tl.tensor,
    last_tokens: tl.tensor,
    sums: tl.tensor,
    token_ids: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_V: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
) -> None:
    """Picks the token of one row. `sums`: [S, L] float64, weight of the kept tokens of a block."""
    row = tl.program_id(0).to(tl.int64)
    most = row_largest(largest, row, num_blocks, MAX_BLOCKS)
    token_id = _largest_token(largest, block_tokens, row, most, vocab_size, num_blocks, MAX_BLOCKS)
    temperature = tl.load(temperatures + row)
    if (token_id >= 0) & (temperature > 0.0):
        blocks = tl.arange(0, MAX_BLOCKS)
        block_sums = tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
        running = tl.cumsum(block_sums, 0)
        u = uniform(tl.load(seeds + row).to(tl.int64), tl.load(positions + row).to(tl.int64))
        target = u * tl.max(running, 0)
        # The block in which the running sum passes the target; if rounding leaves none, the last
        # block with any weight.
        last_block = tl.max(tl.where(block_sums > 0.0, blocks, 0), 0)
        block = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), last_block)
        before = tl.max(tl.where(blocks < block, running, 0.0), 0)

        searched = is_searched(tl.load(top_k + row), tl.load(top_p + row), vocab_size)
        cut_key = tl.load(cut_keys + row, mask=searched, other=LARGEST_KEY)
        last_token = tl.load(last_tokens + row, mask=searched, other=vocab_size)
        tokens = block * BLOCK_V + tl.arange(0, BLOCK_V)
        keys = load_keys(logits + row * row_stride, tokens, vocab_size, most, temperature)
        weights = kept_weights(keys, tokens, cut_key, last_token, tl.load(min_p + row))
        is_above = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
        first_above = tl.min(tl.where(is_above, tokens, vocab_size), 0)
        last = tl.max(tl.where(weights > 0.0, tokens, 0), 0)
        token_id = tl.minimum(first_above, last)
    tl.store(token_ids + row, token_id)
