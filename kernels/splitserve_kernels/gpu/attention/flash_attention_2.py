"""Paged attention with flash-attn 2 for prompts, and our own kernels for all other rows.

The package `flash-attn` reads pages of 256 tokens and multiples of that. Its calls for rows of
several tokens do not split keys. So decodes, and steps whose prompts would not fill the device, run
in Triton, whose programs share the keys of long rows.

Source: Dao, "FlashAttention-2", 2023.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a head, B block
size, N blocks of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitserve_kernels.gpu.attention import backend
from splitserve_kernels.gpu.attention.flash_attention_2_op import VarlenFunction
from splitserve_kernels.gpu.attention.operator_support import (
    OncePerPass,
    rows_in_sight,
    weigh_with_sinks,
)
from splitserve_kernels.gpu.attention.paged_decode import paged_decode
from splitserve_kernels.gpu.kv_write import with_dense_heads
from splitserve_kernels.gpu.launch import LayerPools
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch


class FlashAttention2:
    """Attention backend with flash-attn 2; `why_not_flash_attention_2` has its limits."""

    write_kv = staticmethod(backend.write_kv)

    def __init__(self, attend: VarlenFunction) -> None:
        self._attend = attend
        self._pass = OncePerPass()

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

        `query`: [T, H, D]. `key_pool`, `value_pool`: [N, B, G, D]. Returns [T, H, D] in the dtype
        of `query`.
        """
        query = with_dense_heads(query)
        pools = LayerPools(key_pool, value_pool, scales)
        if batch.max_num_new_tokens <= 1 or backend.leaves_room(query, pools, batch, options):
            return backend.paged_attention(query, key_pool, value_pool, batch, options, scales)
        output = self._prompts(query, pools, batch, options)
        paged_decode(query, pools, batch, options, output, num_rows=batch.num_decodes)
        return output

    def _prompts(
        self, query: Tensor, pools: LayerPools, batch: PagedBatch, options: AttentionOptions
    ) -> Tensor:
        """Returns [T, H, D] with the tokens of all rows after the decodes; others are undefined."""
        first, block_size = batch.num_decodes, pools.key.shape[1]
        query_starts = batch.query_starts[first:]
        window = options.sliding_window
        output, log_sums, _ = self._attend(
            query,
            pools.key,
            pools.value,
            cu_seqlens_q=query_starts,
            cu_seqlens_k=self._pass.of(batch, pools.key).once(
                (block_size,), lambda: _key_starts(batch, block_size)
            ),
            max_seqlen_q=batch.max_num_new_tokens,
            # From the table's width, not from the rows: a CUDA graph is replayed for longer rows.
            max_seqlen_k=batch.block_tables.shape[1] * block_size,
            softmax_scale=options.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=options.softcap or 0.0,
            return_attn_probs=True,
            block_table=batch.block_tables[first:],
        )
        output = output.contiguous()
        if options.sinks is not None:
            weigh_with_sinks(output, log_sums, options.sinks, query_starts)
        return output


def _key_starts(batch: PagedBatch, block_size: int) -> Tensor:
    """Returns the tokens of all rows after the decodes, summed up: [rows + 1] int32."""
    lengths = rows_in_sight(batch, block_size, None)[0][batch.num_decodes :]
    starts = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts
