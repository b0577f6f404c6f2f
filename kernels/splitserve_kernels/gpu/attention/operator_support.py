"""What attention operators of libraries lack: inputs that batches have not, and attention sinks.

Inputs that batches lack are lengths of rows and cleaned block tables. A sink is one more score in a
head's softmax, without a value. So the output with a sink equals the output without it times S / (S
+ exp(sink)), exactly, where S is the sum of exp(score) over keys.

Shape letters: R rows, M blocks of the longest block table, B block size, T tokens over all rows, H
query heads, E size of a value head.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.kv_write import heads_per_tile
from splitserve_kernels.gpu.launch import ceil_div, next_power_of_2
from splitserve_kernels.paged_batch import PagedBatch

_BLOCK_M = 256

_Found = TypeVar("_Found")


class OncePerPass:
    """Values that all layers of a forward pass share, computed by the first that needs them.

    A pass has its own batch, and each of its layers has its own pool: if a batch comes again with a
    pool it had before, another pass has begun, and the batch's tensors may hold new values. So
    values computed while a CUDA graph is recorded become part of the graph, and a replay computes
    them again.
    """

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None
        self._pools: set[int] = set()
        self._found: dict[tuple[Any, ...], Any] = {}

    def of(self, batch: PagedBatch, key_pool: Tensor) -> OncePerPass:
        """Returns itself, without values of an earlier pass. Called once for each layer."""
        pool = key_pool.data_ptr()
        if batch is not self._batch or pool in self._pools:
            self._batch, self._pools, self._found = batch, set(), {}
        self._pools.add(pool)
        return self

    def once(self, key: tuple[Any, ...], find: Callable[[], _Found]) -> _Found:
        """Returns the value of `key`, which `find` computes if the pass has none yet."""
        if key not in self._found:
            self._found[key] = find()
        found: _Found = self._found[key]
        return found


def rows_in_sight(batch: PagedBatch, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Returns the tokens of each row, including new ones, [R] int32, and block tables [R, M] int32.

    With a sliding window, which is at least a block long, entries wholly behind the window are
    replaced by the first block in sight. A library that reads whole tiles may read such entries,
    and then finds numbers of the row itself: the replaced block may belong to another row by now,
    and a NaN in it would become NaN in the result, even with a weight of 0.

    Computed on the device at each call, so that a replayed CUDA graph computes it again.
    """
    num_rows, width = batch.block_tables.shape
    lengths = torch.empty_like(batch.num_computed_tokens)
    tables = batch.block_tables if window is None else torch.empty_like(batch.block_tables)
    if num_rows == 0:
        return lengths, tables
    num_tiles = 1 if window is None else ceil_div(width, _BLOCK_M)
    _rows_kernel[(num_rows, num_tiles)](
        batch.block_tables,
        batch.num_computed_tokens,
        batch.query_starts,
        lengths,
        tables,
        width,
        batch.block_tables.stride(0),
        tables.stride(0),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        BLOCK_M=_BLOCK_M,
        num_warps=4,
    )
    return lengths, tables


@triton.jit(do_not_specialize=["width", "table_stride", "new_table_stride"])
def _rows_kernel(
    block_tables: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    lengths: tl.tensor,
    new_tables: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    new_table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Writes some entries of the table of one row, and the row's length."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(num_computed_tokens + row)
    num_new = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    tl.store(lengths + row, position + num_new)
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // BLOCK_SIZE
        entries = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        sources = tl.maximum(entries, first)
        blocks = tl.load(
            block_tables + row * table_stride + sources,
            mask=(entries < width) & (sources < width),
            other=0,
        )
        tl.store(new_tables + row * new_table_stride + entries, blocks, mask=entries < width)


def weigh_with_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor, query_starts: Tensor) -> None:
    """Rescales the tokens of some rows in `output` [T, H, E], contiguous, in place.

    `log_sums`: [H, T] float32, the natural logarithm of S. `sinks`: [H]. `query_starts`: of the
    rows and their end, [R + 1] int32.
    """
    num_tokens, num_heads, value_dim = output.shape
    if num_tokens == 0:
        return
    block_h = heads_per_tile(num_heads, value_dim)
    _sink_kernel[(num_tokens, ceil_div(num_heads, block_h))](
        output,
        log_sums,
        sinks,
        query_starts,
        query_starts.shape[0] - 1,
        log_sums.stride(0),
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        BLOCK_H=block_h,
        BLOCK_E=next_power_of_2(value_dim),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "head_stride"])
def _sink_kernel(
    output: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    query_starts: tl.tensor,
    num_rows: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Rescales some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    if (token < tl.load(query_starts)) | (token >= tl.load(query_starts + num_rows)):
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < NUM_HEADS
    log_sum = tl.load(log_sums + heads * head_stride + token, mask=is_head, other=0.0)
    sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
    weight = 1.0 / (1.0 + tl.exp(sink - log_sum))
    dims = tl.arange(0, BLOCK_E)
    offsets = (token * NUM_HEADS + heads)[:, None] * VALUE_DIM + dims[None, :]
    mask = is_head[:, None] & (dims < VALUE_DIM)[None, :]
    numbers = tl.load(output + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + offsets, (numbers * weight[:, None]).to(output.dtype.element_ty), mask=mask)
