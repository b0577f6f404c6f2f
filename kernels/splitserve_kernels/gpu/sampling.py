"""Logits to token ids without truncation: greedy, and at a temperature.

The definitions are those of `SamplingParams` in `executor.proto`. Source of the random numbers:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

# Capital letters: what is known when a kernel is compiled.
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.philox import uniform

_BLOCK_V = 4096


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, the smallest id among equals.

    `logits`: [S, V] float32, last stride 1, V < 2^31. Returns token ids [S] int32 and validity [S]
    bool. A row with NaN or +inf, or with -inf alone, is invalid and gets -1.
    """
    token_ids = logits.new_empty(logits.shape[0], dtype=torch.int32)
    if logits.shape[0]:
        _greedy_kernel[(logits.shape[0],)](
            logits, token_ids, logits.shape[1], logits.stride(0), BLOCK_V=_BLOCK_V, num_warps=8
        )
    return token_ids, token_ids >= 0


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws a token of each row; all are eligible. Rows with temperature 0 are greedy.

    `logits`: [S, V] float32, last stride 1, V < 2^31. `temperatures`: [S] float32, >= 0. `seeds`:
    [S] int64, bits taken as unsigned. `positions`: [S] int64, of the tokens to sample. Returns what
    `greedy` returns.

    The token is the first, in order of id, at which the running float64 sum of the weights
    exp((logit - largest) / temperature), rounded to float32, is greater than u times their total.
    Sums are in another order than torch's and exp is another approximation, so where u hits a
    boundary between two tokens but for these errors (1e-6 or so), it may be the other token.
    """
    token_ids = logits.new_empty(logits.shape[0], dtype=torch.int32)
    if logits.shape[0]:
        _sample_kernel[(logits.shape[0],)](
            logits,
            temperatures,
            seeds,
            positions,
            token_ids,
            logits.shape[1],
            logits.stride(0),
            BLOCK_V=_BLOCK_V,
            num_warps=8,
        )
    return token_ids, token_ids >= 0


@triton.jit
def _find_largest(logits: tl.tensor, vocab_size: tl.tensor, BLOCK_V: tl.constexpr) -> tl.tensor:
    """The largest logit of a row and its token id, -1 if the row is invalid."""
    largest = tl.full([BLOCK_V], float("-inf"), tl.float32)
    token_ids = tl.zeros([BLOCK_V], tl.int32)
    num_nan = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + tl.arange(0, BLOCK_V)
        x = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
        num_nan += (x != x).to(tl.int32)
        is_larger = x > largest
        largest = tl.where(is_larger, x, largest)
        token_ids = tl.where(is_larger, tokens, token_ids)
    overall = tl.max(largest, 0)
    token_id = tl.min(tl.where(largest == overall, token_ids, vocab_size), 0)
    is_valid = (tl.sum(num_nan, 0) == 0) & (overall > float("-inf")) & (overall < float("inf"))
    return overall, tl.where(is_valid, token_id, -1)


@triton.jit
def _greedy_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    BLOCK_V: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    _, token_id = _find_largest(logits + row * row_stride, vocab_size, BLOCK_V)
    tl.store(token_ids + row, token_id)


@triton.jit
def _weights(
    logits: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
) -> tl.tensor:
    """Weights of `tokens`, rounded to float32, as float64."""
    x = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return tl.exp(tl.div_rn(x - largest, temperature)).to(tl.float64)


@triton.jit
def _sample_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    token_ids: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    BLOCK_V: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    largest, token_id = _find_largest(logits, vocab_size, BLOCK_V)
    temperature = tl.load(temperatures + row)
    if (token_id >= 0) & (temperature > 0.0):
        u = uniform(tl.load(seeds + row).to(tl.int64), tl.load(positions + row).to(tl.int64))
        tokens = tl.arange(0, BLOCK_V)
        total = u * 0.0
        for start in range(0, vocab_size, BLOCK_V):
            weights = _weights(logits, start + tokens, vocab_size, largest, temperature)
            total += tl.sum(weights, 0)

        # The block in which the running sum passes the target; if rounding leaves none, the last
        # one with any weight.
        target = u * total
        running = u * 0.0
        before = u * 0.0
        block_start = 0
        for start in range(0, vocab_size, BLOCK_V):
            weights = _weights(logits, start + tokens, vocab_size, largest, temperature)
            block_total = tl.sum(weights, 0)
            is_candidate = (running <= target) & (block_total > 0.0)
            block_start = tl.where(is_candidate, start, block_start)
            before = tl.where(is_candidate, running, before)
            running += block_total

        tokens += block_start
        weights = _weights(logits, tokens, vocab_size, largest, temperature)
        running_sums = before + tl.cumsum(weights, 0)
        is_above = (running_sums > target) & (weights > 0.0)
        first_above = tl.min(tl.where(is_above, tokens, vocab_size), 0)
        last = tl.max(tl.where(weights > 0.0, tokens, 0), 0)
        token_id = tl.minimum(first_above, last)
    tl.store(token_ids + row, token_id)
