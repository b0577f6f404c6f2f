"""Bracket of a row's cut: the two edges around the cut, and the tokens between them.

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary, E edges,
C limit of listed tokens.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from splitserve_kernels.gpu.sampling.weigh import NUM_EDGES, edge_key
from splitserve_kernels.gpu.sampling.weights import (
    is_finite,
    is_searched,
    load_keys,
    row_largest,
)


@triton.jit
def _at(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Returns the element of `values` [E] at `index`; 0 for -1."""
    return tl.sum(tl.where(tl.arange(0, NUM_EDGES) == index, values, 0), 0)


@triton.jit
def find_bracket(
    edge_counts: tl.tensor,
    edge_sums: tl.tensor,
    row: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    MAX_BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the edges `low` and `high` between which the cut of a searched row lies.

    The cut is after edge `low` and not after edge `high`. This also holds for every cut that
    decides it: the tokens that top-k keeps end after edge `high` - 1. Returns low (may be -1),
    high, the number of tokens up to low and up to high, the weight of those up to low, and the
    weight of all tokens.
    """
    edges = tl.arange(0, NUM_EDGES)[:, None]
    blocks = tl.arange(0, MAX_BLOCKS)[None, :]
    at = (row * NUM_EDGES + edges) * num_blocks + blocks
    is_block = blocks < num_blocks
    counts = tl.sum(tl.load(edge_counts + at, mask=is_block, other=0), 1)
    sums = tl.sum(tl.load(edge_sums + at, mask=is_block, other=0.0), 1)
    total = _at(sums, NUM_EDGES - 1)
    # The weight of the tokens that top-k keeps is between these two.
    has_top_k = top_k < vocab_size
    high_of_k = tl.sum((counts < top_k).to(tl.int32), 0)
    least = tl.where(has_top_k, _at(sums, high_of_k - 1), total)
    most = tl.where(has_top_k, _at(sums, high_of_k), total)
    high_of_p = tl.sum((sums < top_p * most).to(tl.int32), 0)
    high = tl.where(has_top_k, high_of_k, tl.minimum(high_of_p, NUM_EDGES - 1))
    low = tl.sum((sums < top_p * least).to(tl.int32), 0)
    low = tl.minimum(tl.where(top_p < 1.0, low, high), high) - 1
    return low, high, _at(counts, low), _at(counts, high), _at(sums, low), total


@triton.jit
def gather_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    edge_counts: tl.tensor,
    edge_sums: tl.tensor,
    listed_keys: tl.tensor,
    listed_tokens: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_V: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_LISTED: tl.constexpr,
) -> None:
    """Lists the tokens of one block of a searched row that are between the row's edges.

    Writes tokens and keys, in order of token ids, if all of the row's fit: `listed_keys`,
    `listed_tokens`: [S, C] int32.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = row_largest(largest, row, num_blocks, MAX_BLOCKS)
    temperature = tl.load(temperatures + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if is_finite(most) & (temperature > 0.0) & is_searched(k, p, vocab_size):
        low, high, num_before, num_through, _, _ = find_bracket(
            edge_counts, edge_sums, row, k, p, vocab_size, num_blocks, MAX_BLOCKS
        )
        blocks = tl.arange(0, MAX_BLOCKS)
        at, is_block = row * NUM_EDGES * num_blocks + blocks, blocks < num_blocks
        through = tl.load(edge_counts + at + high * num_blocks, mask=is_block, other=0)
        before = tl.load(edge_counts + at + low * num_blocks, mask=is_block & (low >= 0), other=0)
        inside = through - before
        num_here = tl.sum(tl.where(blocks == block, inside, 0), 0)
        if (num_through - num_before <= MAX_LISTED) & (num_here > 0):
            tokens = block * BLOCK_V + tl.arange(0, BLOCK_V)
            keys = load_keys(logits + row * row_stride, tokens, vocab_size, most, temperature)
            is_listed = (keys > edge_key(low)) & (keys <= edge_key(high))
            start = tl.sum(tl.where(blocks < block, inside, 0), 0)
            places = start + tl.cumsum(is_listed.to(tl.int32), 0) - 1
            places += row * MAX_LISTED
            tl.store(listed_keys + places, keys, mask=is_listed)
            tl.store(listed_tokens + places, tokens, mask=is_listed)
