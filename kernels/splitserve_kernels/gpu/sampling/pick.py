"""Choice of the token of each row: the largest logit, or where the sum of weights passes u.

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from splitserve_kernels.gpu.philox import uniform
from splitserve_kernels.gpu.sampling.weights import (
    LARGEST_KEY,
    is_finite,
    is_searched,
    kept_weights,
    load_keys,
    row_largest,
)


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
