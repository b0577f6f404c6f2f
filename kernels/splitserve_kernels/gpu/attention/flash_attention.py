"""Paged attention by the package flash-attn; keys and values are written by our own kernel.

Sources: Dao, "FlashAttention-2", 2023; the interface of flash-attn 2.8.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a head,
B block size, N blocks of the pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitserve_kernels.gpu.kv_write import kv_write
from splitserve_kernels.gpu.layer_pools import LayerPools
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch


class FlashAttention:
    """An attention backend. `flash_attention_rules` says what it can do."""

    def __init__(self, package: Any) -> None:  # noqa: ANN401
        """`package`: the module `flash_attn`."""
        self._attend_to_cache = package.flash_attn_with_kvcache
        self._attend_to_varied = package.flash_attn_varlen_func

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

        `query`: [T, H, D]. `key_pool`, `value_pool`: [N, B, G, D]. Returns [T, H, D] in the dtype
        of `query`. Of a block in sight, what lies behind the window or has not been written may
        be read, and must not be NaN. Raises ValueError for sinks.
        """
        if options.sinks is not None:
            raise ValueError("flash-attn has no attention sinks")
        if query.shape[0] == 0:
            return torch.empty_like(query)
        window = options.sliding_window
        arguments = {
            "block_table": batch.block_tables,
            "softmax_scale": options.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": options.softcap or 0.0,
        }
        output: Tensor
        if batch.max_num_new_tokens == 1 and query.shape[0] == batch.num_rows:
            # What is launched depends on shapes only, so that a CUDA graph can record it.
            output = self._attend_to_cache(
                query.unsqueeze(1),
                key_pool,
                value_pool,
                cache_seqlens=batch.num_computed_tokens + 1,
                **arguments,
            )
            return output.squeeze(1)
        key_starts = batch.query_starts.clone()
        key_starts[1:] += torch.cumsum(batch.num_computed_tokens, dim=0)
        output = self._attend_to_varied(
            query,
            key_pool,
            value_pool,
            batch.query_starts,
            key_starts,
            # 1 would mean that every row has a token.
            max(2, batch.max_num_new_tokens),
            batch.max_num_tokens,
            **arguments,
        )
        return output
