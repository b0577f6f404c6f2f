"""What an attention operation needs to know about a flattened batch, and about a layer.

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
    """Rows laid end to end without padding, all tensors on the device of the pools.

    Token t of row r is input token `t - query_starts[r]` of that row and stands at position
    `num_computed_tokens[r] + t - query_starts[r]` of its sequence.

    `block_tables`: [R, M] int32, padded with any value that is a valid block id or -1; the padding
    is never used as an index, nor is, in a layer with a sliding window, an entry whose positions
    all lie behind the window of the row's first input token. `num_computed_tokens`: [R] int32,
    tokens that were computed before this step. `query_starts`: [R + 1] int32. `slot_mapping`: [T]
    int64, where the keys and values of each token go: `block_id * block_size + offset`; all
    distinct. `max_num_new_tokens`, `max_num_tokens`: largest number of input tokens of a row, and
    of tokens (computed and new) of a row; 0 without rows. `num_decodes`: so many rows at least, the
    first ones, have one new token at most; a backend may compute these in another way than those
    that follow. Fewer than there are is right, too, only slow. In a recorded step, whose numbers
    stay, rows that are added have no token: their query starts are equal.
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
        """R."""
        return self.num_computed_tokens.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends.

    `scale` multiplies the dot products. `sliding_window` w: the token at position i attends to
    position j only if i - j < w. `softcap` c: scores become c * tanh(score / c). `sinks`: [H], one
    more score per head that takes part in the softmax and has no value.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVScales:
    """What a stored number is multiplied with to give the key, or the value, that it stands for."""

    key: float = 1.0
    value: float = 1.0


UNIT_SCALES = KVScales()


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the tokens of rows lie, in numpy. `row_of_token`, `positions`, `slots`: [T] int64.

    The rest is as in PagedBatch; `query_starts`: [R + 1] int64.
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
    """Lays rows end to end.

    `block_tables`: [R, M] integer. `num_computed_tokens`, `num_new_tokens`: [R]. Every block that a
    row writes must be in its table.
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
    """What `lay_out_rows` says of rows with one new token each, in fewer operations."""
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
    """Derives query starts and slots from the description of the rows.

    `block_tables`: [R, M] integer. `num_computed_tokens`, `num_new_tokens`: [R] integer. All on the
    CPU, where the arithmetic is done; the result is on `device`. Every block that a row writes must
    be in its table.
    """
    # In numpy: an operation on a handful of numbers takes torch ten times as long.
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
    """Paged attention on one kind of device; modules of `splitserve_kernels` satisfy it."""

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
