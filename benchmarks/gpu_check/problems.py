"""Paged attention problems of given sizes, in the memory layout of the executor.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a query or key
head, E size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from executor_service.device import KVCache, LayerShape
from splitserve_kernels.paged_batch import PagedBatch, build_paged_batch

_NUM_BLOCKS_AT_A_TIME = 2**12
# Chunks of prompts and decodes in one step: (computed, new) tokens of each row.
MIXED_ROWS = ((0, 2048), (8192, 512), (300, 1), (4095, 1), (17, 64), (0, 1))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`rows`: (computed, new) tokens of each."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    rows: tuple[tuple[int, int], ...]

    def divided(self, divisor: int) -> AttentionShape:
        """The same with shorter rows, of which no more than three, and one group of heads."""
        if divisor == 1:
            return self
        rows = tuple((computed // divisor, -(-new // divisor)) for computed, new in self.rows)
        num_heads = self.num_heads // self.num_kv_heads
        return replace(self, rows=rows[:3], num_heads=num_heads, num_kv_heads=1)


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Random numbers. `query`: [T, H, D], `key`: [T, G, D], `value`: [T, G, E]: of new tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    cache: KVCache
    batch: PagedBatch


def make_problem(
    shape: AttentionShape,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> AttentionProblem:
    """Blocks are shuffled; all slots of the pools hold numbers.

    `kv_dtype`: that of the pools; None for `dtype`.
    """
    generator = torch.Generator(device).manual_seed(0)
    computed, new = torch.tensor(shape.rows).unbind(-1)
    tables = _block_tables((-(-(computed + new) // shape.block_size)).tolist())
    layer = LayerShape(shape.num_kv_heads, shape.key_dim, shape.value_dim)
    cache = KVCache(
        [layer] * num_layers, shape.block_size, int(tables.max()) + 1, 0, kv_dtype or dtype, device
    )
    for pool in (*cache.key_pools, *cache.value_pools):
        fill_randomly(pool, generator)
    num_tokens = int(new.sum())

    def heads(count: int, size: int) -> Tensor:
        shape = (num_tokens, count, size)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    return AttentionProblem(
        query=heads(shape.num_heads, shape.key_dim),
        key=heads(shape.num_kv_heads, shape.key_dim),
        value=heads(shape.num_kv_heads, shape.value_dim),
        cache=cache,
        batch=build_paged_batch(tables, computed, new, shape.block_size, device),
    )


def _block_tables(num_blocks: list[int]) -> Tensor:
    """[R, M]: so many blocks for each row, shuffled over all rows, and -1 behind them."""
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1))
    return pad_sequence(list(torch.split(order, num_blocks)), batch_first=True, padding_value=-1)


def fill_randomly(pool: Tensor, generator: torch.Generator | None = None) -> None:
    """Normal numbers; of a block after the other where torch has none of the pool's dtype."""
    if pool.dtype.itemsize > 1:
        pool.normal_(generator=generator)
        return
    for part in torch.split(pool, _NUM_BLOCKS_AT_A_TIME):
        part.copy_(torch.randn(part.shape, generator=generator, device=pool.device))


def largest(*differences: Tensor) -> float:
    """The largest of their amounts; NaN if there is one."""
    return float(torch.stack([each.abs().max().double() for each in differences]).max())
