"""Shared definitions of the sampling kernels: distances of logits, weights, edges of the search.

The distance of a token is (largest - logit) / temperature, never negative. Its bits, taken as an
int32, are the *key* of the token: keys are ordered like distances, the most probable token first.

Shape letters: L blocks of the vocabulary.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

# Key of an infinite distance, of a token that cannot be sampled. No token has a larger key.
LARGEST_KEY = tl.constexpr(0x7F800000)
# Key of an index beyond the vocabulary.
NO_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def row_largest(
    largest: tl.tensor, row: tl.tensor, num_blocks: tl.tensor, MAX_BLOCKS: tl.constexpr
) -> tl.tensor:
    """Returns the largest logit of a row from those of its blocks; infinite for an invalid row."""
    blocks = tl.arange(0, MAX_BLOCKS)
    is_block = blocks < num_blocks
    parts = tl.load(largest + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    return tl.max(parts, 0)


@triton.jit
def is_finite(number: tl.tensor) -> tl.tensor:
    """Returns whether `number` is neither infinite nor NaN."""
    return (number > float("-inf")) & (number < float("inf"))


@triton.jit
def load_keys(
    logits: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
) -> tl.tensor:
    """Returns the keys of `tokens`; NO_KEY for tokens beyond the vocabulary."""
    is_token = tokens < vocab_size
    x = tl.load(logits + tokens, mask=is_token, other=float("-inf"))
    distance = tl.abs(tl.div_rn(x - largest, temperature))
    return tl.where(is_token, distance.to(tl.int32, bitcast=True), NO_KEY)


@triton.jit
def weights_of(keys: tl.tensor) -> tl.tensor:
    """Returns the weights of tokens, rounded to float32: probabilities relative to the largest."""
    distance = tl.minimum(keys, LARGEST_KEY).to(tl.float32, bitcast=True)
    return tl.exp(-distance)


@triton.jit
def is_searched(top_k: tl.tensor, top_p: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Returns whether the cut of a row depends on all its tokens, not only on the largest."""
    return (top_k < vocab_size) | (top_p < 1.0)


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
