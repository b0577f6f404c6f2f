"""Paged attention in plain torch: slow, simple, and the oracle of every other backend.

Shape letters: T tokens over all rows, H query heads, G key/value heads (H is a multiple of G), D
size of a query or key head, E size of a value head, B block size, N blocks of the pool, C tokens of
one row that are in sight, S input tokens of one row.

A step first calls `write_kv` for all rows of a layer and then `paged_attention` for all rows: a row
may read a block that another row of the same step fills.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitserve_kernels.paged_batch import (
    SCALE_BYTES,
    UNIT_SCALES,
    AttentionOptions,
    KVScales,
    PagedBatch,
)

_SCORES_AT_A_TIME = 2**24
# Smallest piece of a row: smaller ones cost more than the scores that they save.
_MIN_WINDOW_PIECE = 64
# Smaller numbers count as 0 where each token and head has its scale.
_LEAST_SCALED = 1e-30


def write_kv(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    batch: PagedBatch,
    scales: KVScales = UNIT_SCALES,
) -> None:
    """Writes the keys and values of all input tokens into their slots.

    `key`: [T, G, D], `value`: [T, G, E]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E],
    written in place; the blocks of a pool need not be contiguous (stride(0) is free). Stores number
    / scale, clamped to the range of the dtype for a float8 pool. With scales in slots, int8 and
    float8 pools store the numbers of a token and head rounded to codes, and then their scale: the
    largest magnitude over the largest code; NaN if a number is not finite.
    """
    block_size = key_pool.shape[1]
    blocks = batch.slot_mapping // block_size
    offsets = batch.slot_mapping % block_size
    for pool, numbers, scale in ((key_pool, key, scales.key), (value_pool, value, scales.value)):
        if scales.in_slots:
            _indexable(pool)[blocks, offsets] = _scaled_codes(numbers.float(), pool.dtype)
            continue
        if scale != 1.0:
            numbers = numbers.float() * (1.0 / scale)
        if pool.dtype.itemsize == 1:
            largest = torch.finfo(pool.dtype).max
            numbers = numbers.clamp(-largest, largest).to(pool.dtype)
        _indexable(pool)[blocks, offsets] = _indexable(numbers.to(pool.dtype))


def paged_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """Computes causal attention of every input token over the tokens of its row, itself included.

    `query`: [T, H, D]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E]; the slots of all input
    tokens are already written. Returns [T, H, E] in the dtype of `query`; scores, softmax and the
    weighted sum are float32. Slots that a row has not written are never read, nor slots behind the
    sliding window of its first input token: their content (even NaN) has no effect, and table
    entries wholly behind the window may have any value.
    """
    value_dim = value_pool.shape[3] - (SCALE_BYTES if scales.in_slots else 0)
    output = query.new_empty(query.shape[0], query.shape[1], value_dim)
    window = options.sliding_window
    query_starts = batch.query_starts.tolist()
    for row, num_computed in enumerate(batch.num_computed_tokens.tolist()):
        start, end = query_starts[row], query_starts[row + 1]
        if start == end:
            continue
        table, row_end = batch.block_tables[row], num_computed + end - start
        row_first = _first_in_sight(num_computed, window)
        key, value = (
            _numbers(_gather(pool, table, row_first, row_end), scale, scales.in_slots)
            for pool, scale in ((key_pool, scales.key), (value_pool, scales.value))
        )
        step = _piece_size(query.shape[1], row_end - row_first, window)
        for piece in range(start, end, step):
            piece_end = min(piece + step, end)
            position = num_computed + piece - start
            in_sight = slice(
                _first_in_sight(position, window) - row_first,
                position + piece_end - piece - row_first,
            )
            output[piece:piece_end] = _attend(
                query[piece:piece_end], key[in_sight], value[in_sight], options
            )
    return output


def _first_in_sight(position: int, window: int | None) -> int:
    """Returns the first position that the token at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def _piece_size(num_heads: int, num_tokens: int, window: int | None) -> int:
    """Returns how many input tokens of a row attend at once, to bound the memory of scores.

    With a window the number is small, so that few scores are computed in vain.
    """
    size = max(1, _SCORES_AT_A_TIME // (num_heads * num_tokens))
    return size if window is None else min(size, max(window, _MIN_WINDOW_PIECE))


def _gather(pool: Tensor, table: Tensor, first: int, end: int) -> Tensor:
    """Returns what is stored for positions `first` .. `end` - 1 of a row: [C, G, D].

    `pool`: [N, B, G, D].
    """
    block_size = pool.shape[1]
    first_block = first // block_size
    blocks = table[first_block : -(-end // block_size)].to(torch.int64)
    skipped = first_block * block_size
    gathered = _indexable(pool)[blocks].flatten(0, 1)[first - skipped : end - skipped]
    return gathered.view(pool.dtype)


def _numbers(stored: Tensor, scale: float, in_slots: bool) -> Tensor:
    """Returns the actual numbers of `stored` [C, G, D], or [C, G, D + 4] with scales in slots."""
    if not in_slots:
        return stored if scale == 1.0 else stored.float() * scale
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-SCALE_BYTES].float() * scales


def _scaled_codes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds `numbers` [T, G, D], float32, to codes. Returns bytes, uint8 [T, G, D + 4].

    Behind the codes of a head, of `dtype`, is the scale that they have in common.
    """
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    largest = numbers.abs().amax(dim=2, keepdim=True)
    is_usable = largest.isfinite() & (largest >= _LEAST_SCALED)
    # Torch divides a number by a tensor less exactly.
    scaled = torch.where(is_usable, numbers * (torch.full_like(largest, limit) / largest), 0.0)
    codes = (scaled.round() if dtype == torch.int8 else scaled.clamp(-limit, limit)).to(dtype)
    without = torch.where(largest.isfinite(), 0.0, torch.nan)
    scales = torch.where(is_usable, largest / limit, without)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=2)


def _indexable(numbers: Tensor) -> Tensor:
    """Returns `numbers`, or their bits as uint8 for 8-bit ones: float8 cannot be indexed."""
    return numbers.view(torch.uint8) if numbers.dtype.itemsize == 1 else numbers


def _attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Computes attention of the last S of C tokens over all tokens up to each of them.

    `query`: [S, H, D], `key`: [C, G, D], `value`: [C, G, E]. Returns [S, H, E].
    """
    num_new, num_heads, head_dim = query.shape
    num_tokens, num_kv_heads, value_dim = value.shape
    # Query heads g * H/G .. (g + 1) * H/G - 1 share key/value head g.
    grouped = query.float().view(num_new, num_kv_heads, -1, head_dim)
    scores = torch.einsum("sgqd,cgd->gqsc", grouped, key.float()) * options.scale
    scores = scores.reshape(num_heads, num_new, num_tokens)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    query_positions = torch.arange(num_tokens - num_new, num_tokens, device=query.device)[:, None]
    key_positions = torch.arange(num_tokens, device=query.device)[None, :]
    distances = query_positions - key_positions
    if options.relative_bias is not None:
        last = options.relative_bias.shape[1] - 1
        scores = scores + options.relative_bias.float()[:, distances.clamp(0, last)]
    visible = distances >= 0
    if options.sliding_window is not None:
        visible &= distances < options.sliding_window
    scores = scores.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(num_heads, num_new, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_tokens]
    weights = weights.view(num_kv_heads, -1, num_new, num_tokens)
    attended = torch.einsum("gqsc,cge->sgqe", weights, value.float())
    return attended.reshape(num_new, num_heads, value_dim).to(query.dtype)
