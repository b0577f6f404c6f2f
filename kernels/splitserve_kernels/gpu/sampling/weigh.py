"""Sums of weights by block of the vocabulary, before and after the cut of a row.

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary, E edges.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from splitserve_kernels.gpu.sampling.weights import (
    LARGEST_KEY,
    is_finite,
    is_searched,
    kept_weights,
    load_keys,
    row_largest,
    weights_of,
)

# The search first brackets the cut between two of so many keys, and then searches among the tokens
# between them.
NUM_EDGES = tl.constexpr(16)
# The distance of an edge is a squared integer times this: edges are dense where top-p usually cuts,
# and a few are very close to 0, for high temperatures.
_EDGE_UNIT = tl.constexpr(0.08)


@triton.jit
def edge_key(edge: tl.tensor) -> tl.tensor:
    """Returns the largest key up to an edge; all keys are up to the last edge. -1 for edge -1."""
    root = (edge + 1).to(tl.float32)
    key = (root * root * _EDGE_UNIT).to(tl.int32, bitcast=True)
    return tl.where(edge < 0, -1, tl.where(edge >= NUM_EDGES - 1, LARGEST_KEY, key))


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
