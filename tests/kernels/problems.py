"""Attention problems whose pools look like those of a running engine, at their worst.

Shape letters: T tokens over all rows, L tokens of a sequence, H query heads, G key/value heads,
D size of a query or key head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.paged_batch import (
    SCALE_BYTES,
    SLOT_SCALES,
    UNIT_SCALES,
    AttentionBackend,
    AttentionOptions,
    KVScales,
    PagedBatch,
    build_paged_batch,
)

# Largest difference to the oracle, which gets the same numbers and computes in float32: sums in
# another order, and powers of two as exact as a GPU has them (2^-22), which softcap multiplies by
# 30; weights and output rounded to 10 and 7 bits behind the point.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within the tolerance of the dtype of `actual`. `expected`: float32."""
    torch.testing.assert_close(
        actual.float().cpu(), expected, atol=TOLERANCES[actual.dtype], rtol=0
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, blocks and rows of a problem. `rows`: (num_computed, num_new) of each."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    rows: tuple[tuple[int, int], ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [computed + new for computed, new in self.rows]

    @property
    def num_new(self) -> int:
        """New tokens of all rows."""
        return sum(new for _, new in self.rows)


def make_pools(
    shape: Shape, num_blocks: int, dtype: torch.dtype, scales: KVScales = UNIT_SCALES
) -> tuple[Tensor, Tensor]:
    """[N, B, G, D] and [N, B, G, E], NaN; views of one tensor, as in the KV cache.

    Before, between and behind keys and values there are other layers. With scales in slots, heads
    have room for them, and the scales are NaN.
    """
    tokens, more = shape.block_size * shape.num_kv_heads, SCALE_BYTES if scales.in_slots else 0
    dims = shape.key_dim + more, shape.value_dim + more
    sizes = [16, tokens * dims[0], 48, tokens * dims[1], 16]
    pool = torch.full((num_blocks, sum(sizes)), torch.nan)
    if scales.in_slots:
        pool = torch.full((num_blocks, sum(sizes)), 0xFF, dtype=torch.uint8).view(dtype)
    _, key, _, value, _ = torch.split(pool.to(dtype), sizes, dim=1)
    heads = (num_blocks, shape.block_size, shape.num_kv_heads)
    return key.view(*heads, dims[0]), value.view(*heads, dims[1])


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


def make_batch(
    tables: Tensor,
    rows: Sequence[tuple[int, int]],
    block_size: int,
    device: str | torch.device = "cpu",
) -> PagedBatch:
    computed, new = torch.tensor(rows, dtype=torch.int64).view(-1, 2).unbind(-1)
    return build_paged_batch(tables, computed, new, block_size, torch.device(device))


# -- Problems whose keys and values are in the pools already ---------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """`query`: [T, H, D]. `key_pool`: [N, B, G, D]. `value_pool`: [N, B, G, E]. All is written.

    What no row has written is NaN.
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
    tables, num_blocks = make_tables(shape.lengths, shape.block_size, seed)
    key_pool, value_pool = make_pools(shape, num_blocks, dtype)
    for row, length in enumerate(shape.lengths):
        positions = torch.arange(length)
        blocks = tables[row, positions // shape.block_size]
        for pool in (key_pool, value_pool):
            numbers = torch.randn(length, *pool.shape[2:], generator=generator)
            pool[blocks, positions % shape.block_size] = numbers.to(dtype)
    query = torch.randn(shape.num_new, shape.num_heads, shape.key_dim, generator=generator)
    # Of one tensor that also holds keys and values, as fused projections leave it.
    query = torch.cat([query, query], dim=1).to(dtype).to(device)[:, : shape.num_heads]
    # One move, so that the pools stay views of one tensor.
    stride = key_pool.stride(0)
    moved = key_pool.as_strided((num_blocks, stride), (stride, 1), 0).to(device)
    return Problem(
        query,
        moved.as_strided(key_pool.shape, key_pool.stride(), key_pool.storage_offset()),
        moved.as_strided(value_pool.shape, value_pool.stride(), value_pool.storage_offset()),
        make_batch(tables, shape.rows, shape.block_size, device),
    )


def attend_by_oracle(problem: Problem, options: AttentionOptions) -> Tensor:
    """[T, H, E] float32, on the CPU."""
    tensors = ("block_tables", "num_computed_tokens", "query_starts", "slot_mapping")
    on_cpu = {name: getattr(problem.batch, name).cpu() for name in tensors}
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.cpu())
    pools = (problem.key_pool.float().cpu(), problem.value_pool.float().cpu())
    query, batch = problem.query.float().cpu(), replace(problem.batch, **on_cpu)
    return reference.paged_attention(query, *pools, batch, options)


def hide_what_is_behind(problem: Problem, shape: Shape, window: int) -> None:
    """NaN in all slots behind the window of each row's first input token, and wild block ids."""
    for row, (computed, _) in enumerate(shape.rows):
        table = problem.batch.block_tables[row]
        num_behind = max(0, computed - window + 1)
        positions = torch.arange(num_behind, device=table.device)
        blocks = table[positions // shape.block_size].long()
        for pool in (problem.key_pool, problem.value_pool):
            pool[blocks, positions % shape.block_size] = torch.nan
        table[: num_behind // shape.block_size] = 10**6 if row % 2 else -1


# -- Problems for backends that keep keys and values in a layout of their own ----------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """`query`: [T, H, D]. `key`: [T, G, D]. `value`: [T, G, E]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def at(self, index: slice) -> Tokens:
        return Tokens(self.query[index], self.key[index], self.value[index])

    def hidden(self, num_hidden: int) -> Tokens:
        """The same, but nobody may look at the first `num_hidden` keys and values."""
        key, value = self.key.clone(), self.value.clone()
        key[:num_hidden] = torch.nan
        value[:num_hidden] = torch.nan
        return Tokens(self.query, key, value)


def make_tokens(shape: Shape, count: int, dtype: torch.dtype, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    sizes = (shape.key_dim, shape.key_dim, shape.value_dim)
    numbers = (
        torch.randn(count, *each, generator=generator).to(dtype)
        for each in zip(heads, sizes, strict=True)
    )
    return Tokens(*numbers)


def joined(parts: Sequence[Tokens]) -> Tokens:
    names = ("query", "key", "value")
    return Tokens(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True, slots=True)
class UnwrittenProblem:
    """`history`: the tokens of `before`, which are written first; `new`: those of `batch`."""

    shape: Shape
    options: AttentionOptions
    num_blocks: int
    history: Tokens
    before: PagedBatch
    new: Tokens
    batch: PagedBatch

    def attend(
        self, backend: AttentionBackend, dtype: torch.dtype, codes: torch.dtype | None = None
    ) -> Tensor:
        """[T, H, E], computed by `backend` in pools of its own.

        What no row has written poisons whoever reads it. `codes`: of 8-bit pools with scales in
        slots; None for pools of `dtype`.
        """
        scales = UNIT_SCALES if codes is None else SLOT_SCALES
        pools = make_pools(self.shape, self.num_blocks, codes or dtype, scales)
        for tokens, batch in ((self.history, self.before), (self.new, self.batch)):
            key, value = tokens.key.to(dtype), tokens.value.to(dtype)
            backend.write_kv(key, value, *pools, batch, scales)
        query = self.new.query.to(dtype)
        return backend.paged_attention(query, *pools, self.batch, self.options, scales)


def make_unwritten_problem(
    shape: Shape, options: AttentionOptions, dtype: torch.dtype, seed: int = 0
) -> UnwrittenProblem:
    """Tokens of `dtype`.

    What is behind the window of each row's first new token is NaN, and its blocks are unknown.
    """
    tables, num_blocks = make_tables(shape.lengths, shape.block_size, seed)
    before = make_batch(tables, [(0, computed) for computed, _ in shape.rows], shape.block_size)
    batch = make_batch(tables, shape.rows, shape.block_size)
    window, history = options.sliding_window, []
    for row, (computed, _) in enumerate(shape.rows):
        num_behind = max(0, computed - window + 1) if window else 0
        history.append(make_tokens(shape, computed, dtype, seed + row).hidden(num_behind))
        batch.block_tables[row, : num_behind // shape.block_size] = -1
    new = make_tokens(shape, shape.num_new, dtype, seed + 99)
    return UnwrittenProblem(shape, options, num_blocks, joined(history), before, new, batch)


def attend_both(
    backend: AttentionBackend,
    shape: Shape,
    options: AttentionOptions,
    dtype: torch.dtype,
    codes: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, H, E] of `backend` and of the oracle, the latter in float32. `codes`: of the pools."""
    problem = make_unwritten_problem(shape, options, dtype)
    return problem.attend(backend, dtype, codes), problem.attend(reference, torch.float32, codes)
