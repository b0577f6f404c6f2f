"""Paged attention with flash-attn 3; our own kernel writes keys and values.

Source: Shah et al., "FlashAttention-3", 2024; its `flash_api.cpp`.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a query
or key head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitserve_kernels.gpu.attention import backend
from splitserve_kernels.gpu.attention.flash_attention_3_op import FlashAttention3Op
from splitserve_kernels.gpu.attention.operator_support import (
    OncePerPass,
    rows_in_sight,
    weigh_with_sinks,
)
from splitserve_kernels.gpu.launch import FLOAT8_MAX
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch

# Limit of the parts into which the keys of a decode are split. By default the operator chooses by
# shapes alone; a fixed limit bounds the memory that a CUDA graph keeps for the parts, and a build
# that cannot split keys fails in its trial.
_MAX_NUM_SPLITS = 32


class FlashAttention3:
    """Attention backend with flash-attn 3; `why_not_flash_attention_3` has its limits.

    The operator's inputs about the rows of a batch are computed once for all layers with equal
    shapes.
    """

    write_kv = staticmethod(backend.write_kv)

    def __init__(self, op: FlashAttention3Op) -> None:
        self._op = op
        self._pass = OncePerPass()
        self._scales: dict[KVScales, Tensor] = {}

    def paged_attention(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Computes causal attention of every input token over its row's tokens, itself included.

        `query`: [T, H, D]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E]. Returns [T, H, E]
        in the dtype of `query`. Decodes have a call of their own: in one call with a prompt, the
        operator would not split their keys. Over float8 pools, queries and weights are rounded to
        float8 too.
        """
        queries = _rounded(query, key_pool.dtype)
        dtype = torch.bfloat16 if queries.dtype.itemsize == 1 else queries.dtype
        output = queries.new_empty(*query.shape[:2], value_pool.shape[3], dtype=dtype)
        if query.shape[0] == 0:
            return output.to(query.dtype)
        self._pass.of(batch, key_pool)
        layer = _Layer(key_pool, value_pool, options, scales)
        only_decodes = batch.max_num_new_tokens <= 1
        num_decodes = batch.num_rows if only_decodes else batch.num_decodes
        if num_decodes > 0:
            # They have a token at most, so theirs are among these.
            tokens = slice(0, num_decodes)
            decodes = _Rows(batch, 0, num_decodes, 1, _MAX_NUM_SPLITS)
            self._attend(queries[tokens], layer, decodes, output[tokens])
        if num_decodes < batch.num_rows:
            others = _Rows(batch, num_decodes, batch.num_rows, batch.max_num_new_tokens, 0)
            self._attend(queries, layer, others, output)
        return output.to(query.dtype)

    def _attend(self, queries: Tensor, layer: _Layer, rows: _Rows, output: Tensor) -> None:
        """Computes the tokens of `rows` in `output`."""
        batch, key_pool, options = rows.batch, layer.key_pool, layer.options
        lengths, tables = self._in_sight(batch, key_pool.shape[1], options.sliding_window)
        shape = {
            "max_seqlen_q": rows.max_num_new_tokens,
            # From the table's width, not from the rows: a CUDA graph is replayed for longer rows.
            "max_seqlen_k": batch.block_tables.shape[1] * key_pool.shape[1],
            "num_splits": rows.max_num_splits,
            **_mask(options.sliding_window),
        }
        _, log_sums = self._op.forward(
            q=queries,
            k=key_pool,
            v=layer.value_pool,
            out=output,
            cu_seqlens_q=rows.query_starts,
            seqused_k=lengths[rows.first : rows.end],
            page_table=tables[rows.first : rows.end],
            softmax_scale=options.scale,
            softcap=options.softcap or 0.0,
            scheduler_metadata=self._metadata(queries.shape[1], layer, rows, lengths, shape),
            **self._descales(key_pool, rows.end - rows.first, layer.scales),
            **shape,
        )
        if options.sinks is not None:
            weigh_with_sinks(output, log_sums, options.sinks, rows.query_starts)

    def _in_sight(
        self, batch: PagedBatch, block_size: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Returns lengths and block tables of all rows; see `rows_in_sight`."""
        return self._pass.once(
            ("rows", block_size, window), lambda: rows_in_sight(batch, block_size, window)
        )

    def _metadata(
        self, num_heads: int, layer: _Layer, rows: _Rows, lengths: Tensor, shape: dict[str, Any]
    ) -> Tensor:
        """Returns the scheduler metadata; computed once for layers of the same configuration.

        Such layers have equal heads, dtype and window, and all or none of them have a softcap.
        """
        _, block_size, num_kv_heads, key_dim = layer.key_pool.shape
        arguments = {
            "batch_size": rows.end - rows.first,
            "num_heads": num_heads,
            "num_heads_k": num_kv_heads,
            "headdim": key_dim,
            "headdim_v": layer.value_pool.shape[3],
            "qkv_dtype": layer.key_pool.dtype,
            "page_size": block_size,
            "has_softcap": bool(layer.options.softcap),
            **shape,
        }
        return self._pass.once(
            ("metadata", rows.first, *arguments.values()),
            lambda: self._op.scheduler_metadata(
                seqused_k=lengths[rows.first : rows.end],
                cu_seqlens_q=rows.query_starts,
                **arguments,
            ),
        )

    def _descales(
        self, key_pool: Tensor, num_rows: int, scales: KVScales
    ) -> dict[str, Tensor | None]:
        """Returns the factors of float8 queries (1), keys and values, [R, G] float32; else None."""
        names = ("q_descale", "k_descale", "v_descale")
        if key_pool.dtype.itemsize != 1:
            return dict.fromkeys(names)
        if scales not in self._scales:
            # Cached permanently by the first pass, which no CUDA graph records: a copy from the
            # host.
            numbers = torch.tensor((1.0, scales.key, scales.value), device=key_pool.device)
            self._scales[scales] = numbers
        expanded = self._scales[scales][:, None, None].expand(3, num_rows, key_pool.shape[2])
        return dict(zip(names, expanded.unbind(), strict=True))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Pools, options and scales of one layer."""

    key_pool: Tensor
    value_pool: Tensor
    options: AttentionOptions
    scales: KVScales


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows `first` .. `end` - 1 of a batch, for one call.

    `max_num_new_tokens`: of these rows. `max_num_splits`: 0 for the operator's choice.
    """

    batch: PagedBatch
    first: int
    end: int
    max_num_new_tokens: int
    max_num_splits: int

    @property
    def query_starts(self) -> Tensor:
        return self.batch.query_starts[self.first : self.end + 1]


def _mask(window: int | None) -> dict[str, Any]:
    left, right = (-1, -1) if window is None else (window - 1, 0)
    return {"is_causal": True, "window_size_left": left, "window_size_right": right}


def _rounded(query: Tensor, pool_dtype: torch.dtype) -> Tensor:
    """Converts queries to the dtype of keys, as the operator requires."""
    if pool_dtype == query.dtype:
        return query
    return query.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(pool_dtype)
