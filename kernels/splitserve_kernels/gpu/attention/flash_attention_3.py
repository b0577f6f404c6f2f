"""Paged attention by flash-attn 3; keys and values are written by our own kernel.

Source: Shah et al., "FlashAttention-3", 2024; its `flash_attn_interface`.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a query or key
head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from splitserve_kernels.gpu.attention.rows_in_sight import rows_in_sight
from splitserve_kernels.gpu.kv_write import kv_write
from splitserve_kernels.gpu.layer_pools import LayerPools
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch


class FlashAttention3:
    """An attention backend. `flash_attention_3_rules` says what it can do."""

    def __init__(self, package: Any) -> None:  # noqa: ANN401
        """`package`: the module `flash_attn_interface`."""
        self._attend = package.flash_attn_with_kvcache

    def write_kv(
        self, key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, batch: PagedBatch
    ) -> None:
        kv_write(key, value, LayerPools(key_pool, value_pool), batch.slot_mapping)

    def paged_attention(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Causal attention of every input token over the tokens of its row, itself included.

        `query`: [T, H, D]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E]. Returns [T, H, E]
        in the dtype of `query`. One launch for decodes and prompts: which program takes what is
        decided on the device. Raises ValueError for sinks.
        """
        if options.sinks is not None:
            raise ValueError("flash-attn 3 has no attention sinks")
        if query.shape[0] == 0:
            return query.new_empty(0, query.shape[1], value_pool.shape[3])
        window = options.sliding_window
        lengths, tables = rows_in_sight(batch, key_pool.shape[1], window)
        output: Tensor = self._attend(
            query,
            key_pool,
            value_pool,
            cache_seqlens=lengths,
            page_table=tables,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=batch.max_num_new_tokens,
            softmax_scale=options.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=options.softcap or 0.0,
        )
        return output
