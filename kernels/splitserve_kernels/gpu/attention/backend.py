"""KV-cache writes and paged attention on a GPU: the operations of `reference` in Triton.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a query or key
head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

from torch import Tensor

from splitserve_kernels.gpu.attention.paged_decode import paged_decode, paged_split_prefill
from splitserve_kernels.gpu.attention.paged_prefill import leaves_room, paged_prefill
from splitserve_kernels.gpu.head_tiles import with_dense_heads
from splitserve_kernels.gpu.kv_write import kv_write
from splitserve_kernels.gpu.layer_pools import LayerPools
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch


def write_kv(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    batch: PagedBatch,
    scales: KVScales = UNIT_SCALES,
) -> None:
    """Writes the keys and values of all input tokens into their slots.

    `key`: [T, G, D], `value`: [T, G, E]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E], see
    LayerPools, written in place. Raises ValueError for a pool of another layout.
    """
    kv_write(key, value, LayerPools(key_pool, value_pool, scales), batch.slot_mapping)


def paged_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """Computes causal attention of every input token over the tokens of its row, itself included.

    `query`: [T, H, D]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E], see LayerPools.
    Returns [T, H, E] in the dtype of `query`. Raises ValueError for a pool of another layout.

    Reads the same slots as `reference`. Scores, softmax and the weighted sum are float32, but
    weights are rounded to the dtype of the query before they are multiplied with values.
    """
    query = with_dense_heads(query)
    pools = LayerPools(key_pool, value_pool, scales)
    output = query.new_empty(query.shape[0], query.shape[1], value_pool.shape[3])
    if batch.max_num_new_tokens <= 1:
        paged_decode(query, pools, batch, options, output, num_rows=batch.num_rows)
        return output
    # In a prefill tile, one program would read all keys of a decode.
    paged_decode(query, pools, batch, options, output, num_rows=batch.num_decodes)
    attend = paged_split_prefill if leaves_room(query, pools, batch, options) else paged_prefill
    attend(query, pools, batch, options, output, first_row=batch.num_decodes)
    return output
