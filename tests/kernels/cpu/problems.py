"""Attention problems for backends that keep keys and values in a layout of their own.

Pools are NaN to begin with, so that what no row has written poisons whoever reads it, and are
written through the backend only.

Shape letters: T tokens over all rows, L tokens of a sequence, H query heads, G key/value heads,
D size of a query or key head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.paged_batch import (
    AttentionBackend,
    AttentionOptions,
    PagedBatch,
    build_paged_batch,
)

# Largest difference to the oracle, which computes in float32 with the same numbers: sums in another
# order; weights and output rounded to 7 bits behind the point.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    """`rows`: (num_computed, num_new) of each."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """`query`: [T, H, D]. `key`: [T, G, D]. `value`: [T, G, E]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def at(self, index: slice) -> Tokens:
        return Tokens(self.query[index], self.key[index], self.value[index])


def make_tokens(shape: Shape, count: int, dtype: torch.dtype, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    sizes = (shape.key_dim, shape.key_dim, shape.value_dim)
    return Tokens(
        *(
            torch.randn(count, *each, generator=generator).to(dtype)
            for each in zip(heads, sizes, strict=True)
        )
    )


def joined(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(
        torch.cat([part.query for part in parts]),
        torch.cat([part.key for part in parts]),
        torch.cat([part.value for part in parts]),
    )


def make_pools(shape: Shape, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[N, B, G, D] and [N, B, G, E], NaN; views of one tensor, as in the KV cache."""
    tokens = shape.block_size * shape.num_kv_heads
    sizes = [16, tokens * shape.key_dim, tokens * shape.value_dim, 16]
    pool = torch.full((num_blocks, sum(sizes)), torch.nan, dtype=dtype)
    _, key, value, _ = torch.split(pool, sizes, dim=1)
    whole = (num_blocks, shape.block_size, shape.num_kv_heads)
    return key.view(*whole, shape.key_dim), value.view(*whole, shape.value_dim)


def make_tables(lengths: Sequence[int], block_size: int, seed: int) -> tuple[Tensor, int]:
    """Shuffled blocks for sequences of such lengths, padded with -1, and how many there are."""
    num_blocks = [-(-length // block_size) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks, default=0)), -1)
    for row, count in enumerate(num_blocks):
        for block in range(count):
            tables[row, block] = order.pop()
    return tables, sum(num_blocks) + 2


def make_batch(tables: Tensor, rows: Sequence[tuple[int, int]], block_size: int) -> PagedBatch:
    computed, new = torch.tensor(rows).view(-1, 2).unbind(-1)
    return build_paged_batch(tables, computed, new, block_size)


def hidden(tokens: Tokens, num_hidden: int) -> Tokens:
    """`tokens`, of which the first `num_hidden` have no keys and values that one may look at."""
    key, value = tokens.key.clone(), tokens.value.clone()
    key[:num_hidden] = torch.nan
    value[:num_hidden] = torch.nan
    return Tokens(tokens.query, key, value)


@dataclass(frozen=True, slots=True)
class Problem:
    """`history`: the tokens of `before`, which are written first; `new`: those of `batch`."""

    shape: Shape
    options: AttentionOptions
    num_blocks: int
    history: Tokens
    before: PagedBatch
    new: Tokens
    batch: PagedBatch

    def attend(self, backend: AttentionBackend, dtype: torch.dtype) -> Tensor:
        """[T, H, E], computed by `backend` in pools of its own."""
        pools = make_pools(self.shape, self.num_blocks, dtype)
        for tokens, batch in ((self.history, self.before), (self.new, self.batch)):
            backend.write_kv(tokens.key.to(dtype), tokens.value.to(dtype), *pools, batch)
        query = self.new.query.to(dtype)
        return backend.paged_attention(query, *pools, self.batch, self.options)


def make_problem(
    shape: Shape, options: AttentionOptions, dtype: torch.dtype, seed: int = 0
) -> Problem:
    """Tokens of `dtype`.

    What is behind the window of each row's first new token is NaN, and its blocks are unknown.
    """
    tables, num_blocks = make_tables(
        [computed + new for computed, new in shape.rows], shape.block_size, seed
    )
    window, history = options.sliding_window, []
    for row, (computed, _) in enumerate(shape.rows):
        tokens = make_tokens(shape, computed, dtype, seed + row)
        history.append(hidden(tokens, max(0, computed - window + 1) if window else 0))
    new = make_tokens(shape, sum(new for _, new in shape.rows), dtype, seed + 99)
    before = make_batch(tables, [(0, computed) for computed, _ in shape.rows], shape.block_size)
    batch = make_batch(tables, shape.rows, shape.block_size)
    if window:
        for row, (computed, _) in enumerate(shape.rows):
            num_behind = max(0, computed - window + 1) // shape.block_size
            batch.block_tables[row, :num_behind] = -1
    return Problem(shape, options, num_blocks, joined(history), before, new, batch)


def attend_both(
    backend: AttentionBackend, shape: Shape, options: AttentionOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[T, H, E] of `backend` and of the oracle, the latter in float32."""
    problem = make_problem(shape, options, dtype)
    return problem.attend(backend, dtype), problem.attend(reference, torch.float32)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within the tolerance of the dtype of `actual`. `expected`: float32."""
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCES[actual.dtype], rtol=0)
