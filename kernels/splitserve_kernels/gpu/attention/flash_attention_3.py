"""Paged attention with flash-attn 3; our own kernel writes keys and values.

Source: Shah et al., "FlashAttention-3", 2024; its `flash_api.cpp`.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a query
or key head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from splitserve_kernels.gpu.attention.flash_attention_3_op import FlashAttention3Op
from splitserve_kernels.gpu.attention.operator_support import rows_in_sight, weigh_with_sinks
from splitserve_kernels.gpu.kv_write import kv_write
from splitserve_kernels.gpu.launch import FLOAT8_MAX, LayerPools
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch

# Limit of the parts into which the keys of a decode are split. By default the operator chooses by
# shapes alone; a fixed limit bounds the memory that a CUDA graph keeps for the parts, and a build
# that cannot split keys fails in its trial.
_MAX_NUM_SPLITS = 32

_Found = TypeVar("_Found")


class FlashAttention3:
    """Attention backend with flash-attn 3; `flash_attention_3_rules` lists its limits.

    The operator's inputs about the rows of a batch are computed once for all layers with equal
    shapes.
    """

    def __init__(self, op: FlashAttention3Op) -> None:
        self._op = op
        self._pass = _Pass(None)
        self._scales: dict[KVScales, Tensor] = {}

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        kv_write(key, value, LayerPools(key_pool, value_pool, scales), batch.slot_mapping)

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
        in the dtype of `query`. One launch covers decodes and prompts: the device divides the work
        among programs. Over float8 pools, queries and weights are rounded to float8 too.
        """
        if query.shape[0] == 0:
            return query.new_empty(0, query.shape[1], value_pool.shape[3])
        self._pass = self._pass.with_layer(batch, key_pool)
        shape = {
            "max_seqlen_q": batch.max_num_new_tokens,
            # From the table's width, not from the rows: a CUDA graph is replayed for longer rows.
            "max_seqlen_k": batch.block_tables.shape[1] * key_pool.shape[1],
            "num_splits": _MAX_NUM_SPLITS if batch.max_num_new_tokens <= 1 else 0,
            **_mask(options.sliding_window),
        }
        lengths, tables = self._rows(batch, key_pool.shape[1], options.sliding_window)
        metadata = self._metadata(query, key_pool, value_pool, batch, options, shape)
        output, log_sums = self._op.forward(
            q=_rounded(query, key_pool.dtype),
            k=key_pool,
            v=value_pool,
            cu_seqlens_q=batch.query_starts,
            seqused_k=lengths,
            page_table=tables,
            softmax_scale=options.scale,
            softcap=options.softcap or 0.0,
            scheduler_metadata=metadata,
            **self._descales(key_pool, batch.num_rows, scales),
            **shape,
        )
        if options.sinks is not None:
            weigh_with_sinks(output, log_sums, options.sinks)
        return output.to(query.dtype)

    def _rows(
        self, batch: PagedBatch, block_size: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Returns lengths and block tables of the rows; see `rows_in_sight`."""
        return self._pass.once(
            ("rows", block_size, window), lambda: rows_in_sight(batch, block_size, window)
        )

    def _metadata(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        shape: dict[str, Any],
    ) -> Tensor:
        """Returns the scheduler metadata; computed once for layers of the same configuration.

        Such layers have equal heads, dtype and window, and all or none of them have a softcap.
        """
        _, block_size, num_kv_heads, key_dim = key_pool.shape
        arguments = {
            "batch_size": batch.num_rows,
            "num_heads": query.shape[1],
            "num_heads_k": num_kv_heads,
            "headdim": key_dim,
            "headdim_v": value_pool.shape[3],
            "qkv_dtype": key_pool.dtype,
            "page_size": block_size,
            "has_softcap": bool(options.softcap),
            **shape,
        }
        lengths, _ = self._rows(batch, block_size, options.sliding_window)
        return self._pass.once(
            ("metadata", *arguments.values()),
            lambda: self._op.scheduler_metadata(
                seqused_k=lengths, cu_seqlens_q=batch.query_starts, **arguments
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


class _Pass:
    """Cache of values computed in one forward pass, for later layers of the pass.

    A pass has its own batch, and each of its layers has its own pool: if a batch comes again with a
    pool it had before, another pass has begun, and the batch's tensors may hold new values. So
    values computed while a CUDA graph is recorded become part of the graph, and a replay computes
    them again.
    """

    def __init__(self, batch: PagedBatch | None) -> None:
        self._batch = batch
        self._pools: set[int] = set()
        self._found: dict[tuple[Any, ...], Any] = {}

    def with_layer(self, batch: PagedBatch, key_pool: Tensor) -> _Pass:
        """Returns this pass if the layer can belong to it; otherwise a new pass."""
        pool = key_pool.data_ptr()
        current = self
        if batch is not self._batch or pool in self._pools:
            current = _Pass(batch)
        current._pools.add(pool)
        return current

    def once(self, key: tuple[Any, ...], find: Callable[[], _Found]) -> _Found:
        if key not in self._found:
            self._found[key] = find()
        found: _Found = self._found[key]
        return found


def _mask(window: int | None) -> dict[str, Any]:
    left, right = (-1, -1) if window is None else (window - 1, 0)
    return {"is_causal": True, "window_size_left": left, "window_size_right": right}


def _rounded(query: Tensor, pool_dtype: torch.dtype) -> Tensor:
    """Converts queries to the dtype of keys, as the operator requires."""
    if pool_dtype == query.dtype:
        return query
    return query.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(pool_dtype)
