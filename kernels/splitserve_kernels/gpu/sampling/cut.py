"""Cut of a row by top-k and top-p: the cut key, and which tokens with that key stay.

Two edges bracket the cut, and the tokens between them are listed. The search among these treats
keys as numbers: each iteration divides the remaining keys into NUM_BOUNDS parts, and counts or
weighs the tokens up to the end of each part. So it ends after a few iterations whatever the weights
are, and every sum has a fixed order.

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary, E edges,
C limit of listed tokens.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from splitserve_kernels.gpu.sampling.weights import (
    NO_KEY,
    NUM_EDGES,
    edge_key,
    is_finite,
    is_searched,
    load_keys,
    row_largest,
    weights_of,
)

# -- Bracket of a cut: the two edges around it, and the tokens between them ------------------------


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
            indexes = start + tl.cumsum(is_listed.to(tl.int32), 0) - 1
            indexes += row * MAX_LISTED
            tl.store(listed_keys + indexes, keys, mask=is_listed)
            tl.store(listed_tokens + indexes, tokens, mask=is_listed)


# -- Search of the cut among the listed tokens -----------------------------------------------------

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
    indexes = start + tl.arange(0, BLOCK_C)
    if is_listed:
        keys = tl.load(listed_keys + indexes, mask=indexes < num_tokens, other=NO_KEY)
    else:
        keys = load_keys(logits, indexes, num_tokens, largest, temperature)
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
                indexes = start + tl.arange(0, BLOCK_C)
                last_index = tl.max(tl.where(is_equal & (ranks <= num_kept), indexes, -1), 0)
                last_kept = tl.maximum(last_kept, last_index)
                num_seen += tl.sum(is_equal.to(tl.int32), 0)
            last_token = last_kept
            if is_listed & (last_kept >= 0):
                last_token = tl.load(listed_tokens + last_kept)
        tl.store(cut_keys + row, cut_key)
        tl.store(last_tokens + row, last_token)
