"""Attention problems whose pools look like those of a running engine, at their worst.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a query or key
head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch, build_paged_batch

# Largest difference to the oracle, which gets the same numbers and computes in float32: sums in
# another order, and powers of two as exact as a GPU has them (2^-22), which softcap multiplies by
# 30; weights and output rounded to 10 and 7 bits behind the point.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    # (num_computed, num_new) of each row
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """`query`: [T, H, D]. `key_pool`: [N, B, G, D]. `value_pool`: [N, B, G, E]. All is written.

    The pools are views of one tensor, as in the KV cache; what no row has written is NaN.
    """

    query: Tensor
    key_pool: Tensor
    value_pool: Tensor
    batch: PagedBatch

    def with_pools(self, key_pool: Tensor, value_pool: Tensor) -> Problem:
        return replace(self, key_pool=key_pool, value_pool=value_pool)


def make_problem(
    shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    lengths = [computed + new for computed, new in shape.rows]
    num_blocks = [-(-length // shape.block_size) for length in lengths]
    order = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks)), -1)
    key_pool, value_pool = _empty_pools(shape, len(order), dtype)
    for row, length in enumerate(lengths):
        for block in range(num_blocks[row]):
            tables[row, block] = order.pop()
        positions = torch.arange(length)
        blocks = tables[row, positions // shape.block_size]
        for pool in (key_pool, value_pool):
            numbers = torch.randn(length, *pool.shape[2:], generator=generator)
            pool[blocks, positions % shape.block_size] = numbers.to(dtype)
    computed, new = torch.tensor(shape.rows).unbind(-1)
    batch = build_paged_batch(tables, computed, new, shape.block_size, device)
    num_tokens = int(new.sum())
    query = torch.randn(num_tokens, shape.num_heads, shape.key_dim, generator=generator)
    # Of one tensor that also holds keys and values, as fused projections leave it.
    query = torch.cat([query, query], dim=1).to(dtype).to(device)[:, : shape.num_heads]
    # One move, so that the pools stay views of one tensor.
    num_blocks_in_all, stride = len(key_pool), key_pool.stride(0)
    both = key_pool.as_strided((num_blocks_in_all, stride), (stride, 1), 0)
    moved = both.to(device)
    return Problem(
        query,
        moved.as_strided(key_pool.shape, key_pool.stride(), key_pool.storage_offset()),
        moved.as_strided(value_pool.shape, value_pool.stride(), value_pool.storage_offset()),
        batch,
    )


def _empty_pools(shape: Shape, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """NaN; before, between and behind keys and values there are other layers."""
    tokens = shape.block_size * shape.num_kv_heads
    sizes = [16, tokens * shape.key_dim, 48, tokens * shape.value_dim, 16]
    pool = torch.full((num_blocks, sum(sizes)), torch.nan).to(dtype)
    _, key, _, value, _ = torch.split(pool, sizes, dim=1)
    heads = (num_blocks, shape.block_size, shape.num_kv_heads)
    return key.view(*heads, shape.key_dim), value.view(*heads, shape.value_dim)


def attend_by_oracle(problem: Problem, options: AttentionOptions) -> Tensor:
    """[T, H, E] float32, on the CPU."""
    batch = problem.batch
    on_cpu = replace(
        batch,
        block_tables=batch.block_tables.cpu(),
        num_computed_tokens=batch.num_computed_tokens.cpu(),
        query_starts=batch.query_starts.cpu(),
        slot_mapping=batch.slot_mapping.cpu(),
    )
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.cpu())
    return reference.paged_attention(
        problem.query.float().cpu(),
        problem.key_pool.float().cpu(),
        problem.value_pool.float().cpu(),
        on_cpu,
        options,
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within the tolerance of the dtype of `actual`. `expected`: float32."""
    torch.testing.assert_close(
        actual.float().cpu(), expected, atol=TOLERANCES[actual.dtype], rtol=0
    )


def hide_what_is_behind(problem: Problem, shape: Shape, window: int) -> None:
    """NaN in all slots behind the window of each row's first input token, and wild block ids."""
    for row, (computed, _) in enumerate(shape.rows):
        table = problem.batch.block_tables[row]
        num_behind = max(0, computed - window + 1)
        for position in range(num_behind):
            slot = (int(table[position // shape.block_size]), position % shape.block_size)
            problem.key_pool[slot] = torch.nan
            problem.value_pool[slot] = torch.nan
        table[: num_behind // shape.block_size] = 10**6 if row % 2 else -1
