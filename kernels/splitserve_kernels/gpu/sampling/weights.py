"""Shared definitions of the sampling kernels: distance of a logit from the largest, and weight.

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
def is_searched(top_k: tl.tensor, top_p: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Returns whether the cut of a row depends on all its tokens; min_p needs the largest only."""
    return (top_k < vocab_size) | (top_p < 1.0)
