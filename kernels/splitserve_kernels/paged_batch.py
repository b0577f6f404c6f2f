"""Inputs of attention operations: a flattened batch, options of a layer, and layouts of rows.

Shape letters: R rows, T tokens over all rows, M blocks of the longest block table, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Batch of rows concatenated without padding; all tensors are on the device of the pools.

    Token t of row r is input token `t - query_starts[r]` of that row, at position
    `num_computed_tokens[r] + t - query_starts[r]` of its sequence.

    `block_tables`: [R, M] int32, padded with any valid block id or -1. The padding is never used as
    an index. In a layer with a sliding window, neither is an entry whose positions are all behind
    the window of the row's first input token. `num_computed_tokens`: [R] int32, tokens computed
    before this step. `query_starts`: [R + 1] int32. `slot_mapping`: [T] int64, slot of the key and
    value of each token, `block_id * block_size + offset`; all distinct. `max_num_new_tokens`,
    `max_num_tokens`: largest number of input tokens, and of all tokens (computed and new), of a
    row; 0 without rows. `num_decodes`: at least the first `num_decodes` rows have one new token at
    most; a backend may compute them in another way than later rows. Too small a number is valid,
    only slow. In a recorded step, whose numbers are fixed, padding rows have no token: their query
    starts are equal.
    """

    block_tables: Tensor
    num_computed_tokens: Tensor
    query_starts: Tensor
    slot_mapping: Tensor
    max_num_new_tokens: int
    max_num_tokens: int
    num_decodes: int = 0

    @property
    def num_rows(self) -> int:
        """Number R of rows."""
        return self.num_computed_tokens.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Attention options of one layer.

    `scale` multiplies the dot products. `sliding_window` w: the token at position i attends to
    position j only if i - j < w. `softcap` c: scores become c * tanh(score / c). `sinks`: [H], one
    more score per head that takes part in the softmax and has no value. `relative_bias`: [H, n],
    added to the scores, after any softcap, of keys 0, 1, ... tokens before the query; the last
    column is for all further ones.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    relative_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVScales:
    """Factors that convert stored numbers of keys and of values to actual ones.

    `in_slots`: `key` and `value` are 1, and each token and head has a scale of its own in the
    pools, which then have SCALE_BYTES more per head: [N, B, G, D + 4] and [N, B, G, E + 4].
    """

    key: float = 1.0
    value: float = 1.0
    in_slots: bool = False


UNIT_SCALES = KVScales()
SLOT_SCALES = KVScales(in_slots=True)
# Bytes of a scale, a float32, in a slot.
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of rows, in numpy. `row_of_token`, `positions`, `slots`: [T] int64.

    Other fields: as in PagedBatch; `query_starts`: [R + 1] int64.
    """

    row_of_token: Int64Array
    positions: Int64Array
    slots: Int64Array
    query_starts: Int64Array
    max_num_new_tokens: int
    max_num_tokens: int
    num_decodes: int


def lay_out_rows(
    block_tables: npt.NDArray[Any],
    num_computed_tokens: Int64Array,
    num_new_tokens: Int64Array,
    block_size: int,
) -> RowLayout:
    """Concatenates rows.

    `block_tables`: [R, M] integer. `num_computed_tokens`, `num_new_tokens`: [R]. The table of a row
    must contain every block that the row writes.
    """
    num_rows = len(num_new_tokens)
    query_starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(num_new_tokens, out=query_starts[1:])
    row_of_token = np.repeat(np.arange(num_rows), num_new_tokens)
    skipped = num_computed_tokens - query_starts[:-1]
    positions = np.arange(len(row_of_token)) + skipped[row_of_token]
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)
    return RowLayout(
        row_of_token=row_of_token,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        query_starts=query_starts,
        max_num_new_tokens=int(num_new_tokens.max()) if num_rows else 0,
        max_num_tokens=int((num_computed_tokens + num_new_tokens).max()) if num_rows else 0,
        num_decodes=_num_leading_ones(num_new_tokens),
    )


def lay_out_decodes(
    block_tables: npt.NDArray[Any], num_computed_tokens: Int64Array, block_size: int
) -> RowLayout:
    """Concatenates rows with one new token each, in fewer operations than `lay_out_rows`."""
    num_rows = len(num_computed_tokens)
    starts = np.arange(num_rows + 1)
    rows = starts[:-1]
    blocks = block_tables[rows, num_computed_tokens // block_size].astype(np.int64)
    return RowLayout(
        row_of_token=rows,
        positions=num_computed_tokens.copy(),
        slots=blocks * block_size + num_computed_tokens % block_size,
        query_starts=starts,
        max_num_new_tokens=1 if num_rows else 0,
        max_num_tokens=int(np.maximum.reduce(num_computed_tokens)) + 1 if num_rows else 0,
        num_decodes=num_rows,
    )


def _num_leading_ones(numbers: Int64Array) -> int:
    others = np.flatnonzero(numbers != 1)
    return int(others[0]) if len(others) else len(numbers)


def build_paged_batch(
    block_tables: Tensor,
    num_computed_tokens: Tensor,
    num_new_tokens: Tensor,
    block_size: int,
    device: torch.device | str = "cpu",
) -> PagedBatch:
    """Builds a batch: derives query starts and slots from tables and token counts.

    `block_tables`: [R, M] integer. `num_computed_tokens`, `num_new_tokens`: [R] integer. All inputs
    are on the CPU, where the arithmetic runs; the result is on `device`. The table of a row must
    contain every block that the row writes.
    """
    # Numpy, as torch takes ten times as long for an operation on a few numbers.
    tables = block_tables.numpy()
    computed, new = (
        tensor.numpy().astype(np.int64) for tensor in (num_computed_tokens, num_new_tokens)
    )
    layout = lay_out_rows(tables, computed, new, block_size)

    def move(array: npt.NDArray[Any], dtype: type[np.signedinteger[Any]]) -> Tensor:
        return torch.from_numpy(array.astype(dtype, copy=False)).to(device)

    return PagedBatch(
        block_tables=move(tables, np.int32),
        num_computed_tokens=move(computed, np.int32),
        query_starts=move(layout.query_starts, np.int32),
        slot_mapping=move(layout.slots, np.int64),
        max_num_new_tokens=layout.max_num_new_tokens,
        max_num_tokens=layout.max_num_tokens,
        num_decodes=layout.num_decodes,
    )


class AttentionBackend(Protocol):
    """Paged attention on one kind of device; modules of `splitserve_kernels` implement it."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        scales: KVScales = ...,
    ) -> None: ...

    def paged_attention(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        scales: KVScales = ...,
    ) -> Tensor: ...
