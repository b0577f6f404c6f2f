"""Cut of a row by top-k and top-p: the cut key, and which tokens with that key stay.

The search treats keys as numbers: each iteration divides the remaining keys into NUM_BOUNDS parts,
and counts or weighs the tokens up to the end of each part. So it ends after a few iterations
whatever the weights are, and every sum has a fixed order.

Shape letters: S rows that sample, V tokens of the vocabulary, C limit of listed tokens.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from splitserve_kernels.gpu.sampling.bracket import find_bracket
from splitserve_kernels.gpu.sampling.weigh import edge_key
from splitserve_kernels.gpu.sampling.weights import (
    NO_KEY,
    is_finite,
    is_searched,
    load_keys,
    row_largest,
    weights_of,
)

_NUM_BOUNDS = tl.constexpr(8)


@triton.jit
def _tally(
    bounds: tl.tensor,
    source: tl.tuple,
    low_key: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """Returns the number or weight of keys above `low_key` and up to each of `bounds`; float64.

    `source`: see `_load_tile`.
    """
    totals = tl.zeros([_NUM_BOUNDS], tl.float64)
    for start in range(0, source[0], BLOCK_C):
        keys = _load_tile(start, source, BLOCK_C)
        is_inside = (keys[:, None] > low_key) & (keys[:, None] <= bounds[None, :])
        if BY_WEIGHT:
            weights = weights_of(keys).to(tl.float64)[:, None]
            totals += tl.sum(tl.where(is_inside, weights, 0.0), 0)
        else:
            totals += tl.sum(is_inside.to(tl.int32), 0).to(tl.float64)
    return totals


@triton.jit
def _load_tile(
    start: tl.tensor,
    source: tl.tuple,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """Loads the keys of BLOCK_C tokens.

    `source`: number of tokens; their keys, if listed; whether they are listed; and, if they did not
    fit the list, the inputs of keys: logits of the row, largest logit, temperature.
    """
    num_tokens, listed_keys, is_listed, logits, largest, temperature = source
    places = start + tl.arange(0, BLOCK_C)
    if is_listed:
        keys = tl.load(listed_keys + places, mask=places < num_tokens, other=NO_KEY)
    else:
        keys = load_keys(logits, places, num_tokens, largest, temperature)
    return keys


@triton.jit
def _search(
    low: tl.tensor,
    high: tl.tensor,
    before: tl.tensor,
    target: tl.tensor,
    source: tl.tuple,
    low_key: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """Returns the smallest key above `low`, at most `high`, up to which the sum reaches `target`.

    `before`: sum up to `low_key`.
    """
    while high - low > 1:
        step = (high - low + _NUM_BOUNDS - 1) // _NUM_BOUNDS
        bounds = tl.minimum(low + (tl.arange(0, _NUM_BOUNDS) + 1) * step, high)
        reached = before + _tally(bounds, source, low_key, BY_WEIGHT, BLOCK_C)
        num_below = tl.sum((reached < target).to(tl.int32), 0)
        # Rounding may make even the sum up to `high` too small.
        low += tl.minimum(num_below, (high - low - 1) // step) * step
        high = tl.minimum(low + step, high)
    return high


@triton.jit
def _count_of_equals(before: tl.tensor, weight: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Returns how many tokens of equal weight it takes to bring the sum to `target`."""
    count = ((target - before) / tl.maximum(weight, 1e-300)).to(tl.int32)
    count += (before + count * weight < target).to(tl.int32)
    count -= ((count > 0) & (before + (count - 1) * weight >= target)).to(tl.int32)
    return count


@triton.jit
def cut_kernel(
    logits: tl.tensor,
    row_largest_of_blocks: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    edge_counts: tl.tensor,
    edge_sums: tl.tensor,
    listed_keys: tl.tensor,
    listed_tokens: tl.tensor,
    cut_keys: tl.tensor,
    last_tokens: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    MAX_BLOCKS: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Finds the cut of one searched row. `cut_keys`, `last_tokens`: [S] int32.

    Keeps the keys below the cut key and, of the tokens with the cut key, those up to the last
    token.
    """
    row = tl.program_id(0).to(tl.int64)
    most = row_largest(row_largest_of_blocks, row, num_blocks, MAX_BLOCKS)
    temperature = tl.load(temperatures + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if is_finite(most) & (temperature > 0.0) & is_searched(k, p, vocab_size):
        low, high, num_before, num_through, before, total = find_bracket(
            edge_counts, edge_sums, row, k, p, vocab_size, num_blocks, MAX_BLOCKS
        )
        logits += row * row_stride
        listed_keys += row * MAX_LISTED
        listed_tokens += row * MAX_LISTED
        is_listed = num_through - num_before <= MAX_LISTED
        num_tokens = tl.where(is_listed, num_through - num_before, vocab_size)
        source = (num_tokens, listed_keys, is_listed, logits, most, temperature)
        low_key, cut_key = edge_key(low), edge_key(high)
        if k < vocab_size:
            cut_key = _search(
                edge_key(high - 1),
                cut_key,
                num_before.to(tl.float64),
                k.to(tl.float64),
                source,
                low_key,
                False,
                BLOCK_C,
            )
        # All tokens equal to the k-th stay.
        last_token = vocab_size
        if p < 1.0:
            bounds = tl.full([_NUM_BOUNDS], 0, tl.int32) + cut_key
            if k < vocab_size:
                total = before + tl.max(_tally(bounds, source, low_key, True, BLOCK_C), 0)
            target = p * total
            cut_key = _search(low_key, cut_key, before, target, source, low_key, True, BLOCK_C)
            # Of tokens with equal keys, those with smaller ids stay.
            bounds = tl.full([_NUM_BOUNDS], -1, tl.int32) + cut_key
            before += tl.max(_tally(bounds, source, low_key, True, BLOCK_C), 0)
            num_kept = _count_of_equals(before, weights_of(cut_key).to(tl.float64), target)
            num_seen = 0
            last_kept = -1
            for start in range(0, num_tokens, BLOCK_C):
                keys = _load_tile(start, source, BLOCK_C)
                is_equal = keys == cut_key
                ranks = num_seen + tl.cumsum(is_equal.to(tl.int32), 0)
                places = start + tl.arange(0, BLOCK_C)
                last_place = tl.max(tl.where(is_equal & (ranks <= num_kept), places, -1), 0)
                last_kept = tl.maximum(last_kept, last_place)
                num_seen += tl.sum(is_equal.to(tl.int32), 0)
            last_token = last_kept
            if is_listed & (last_kept >= 0):
                last_token = tl.load(listed_tokens + last_kept)
        tl.store(cut_keys + row, cut_key)
        tl.store(last_tokens + row, last_token)
