"""Native paged attention on the CPU, with the interface of `splitserve_kernels.reference`.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a query or key
head, E size of a value head, B block size, N blocks of the pool.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from splitserve_kernels.cpu.library import (
    DTYPES,
    CAttentionLayer,
    CAttentionRows,
    CKVBlocks,
    NativeLibrary,
    pointer,
)
from splitserve_kernels.paged_batch import (
    UNIT_SCALES,
    AttentionOptions,
    KVScales,
    PagedBatch,
)


class NativeAttention:
    """Attention backend with compiled CPU kernels.

    Only these kernels can read its blocks: the layout of keys and values inside a block differs
    from the shape of the pools (kv_blocks.h).
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        assert scales == UNIT_SCALES, "CPUs have no pools of 8 bits"
        key = key.to(key_pool.dtype).contiguous()
        value = value.to(value_pool.dtype).contiguous()
        _, block_size, num_kv_heads, key_dim = key_pool.shape
        blocks = CKVBlocks(block_size, num_kv_heads, key_dim, value_pool.shape[3])
        self._library.call(
            "store_kv",
            key_pool.dtype,
            ctypes.byref(blocks),
            pointer(key),
            pointer(value),
            pointer(batch.slot_mapping),
            ctypes.c_int32(key.shape[0]),
            pointer(key_pool),
            pointer(value_pool),
            ctypes.c_int64(key_pool.stride(0)),
            ctypes.c_int64(value_pool.stride(0)),
            ctypes.c_int32(torch.get_num_threads()),
        )

    def paged_attention(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """See `splitserve_kernels.reference.paged_attention`.

        Queries and weights are rounded to the dtype of the pools; sums are float32.
        """
        assert scales == UNIT_SCALES, "CPUs have no pools of 8 bits"
        dtype = query.dtype
        query = query.to(key_pool.dtype)
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        output = query.new_empty(query.shape[0], query.shape[1], value_pool.shape[3])
        sinks = None if options.sinks is None else options.sinks.to(torch.float32).contiguous()
        layer = CAttentionLayer(
            query=pointer(query),
            keys=pointer(key_pool),
            values=pointer(value_pool),
            output=pointer(output),
            sinks=pointer(sinks),
            query_stride=query.stride(0),
            key_stride=key_pool.stride(0),
            value_stride=value_pool.stride(0),
            num_heads=query.shape[1],
            num_kv_heads=key_pool.shape[2],
            head_dim=query.shape[2],
            value_dim=value_pool.shape[3],
            block_size=key_pool.shape[1],
            sliding_window=options.sliding_window or 0,
            scale=options.scale,
            softcap=options.softcap or 0.0,
        )
        self._library.call(
            "attention",
            query.dtype,
            ctypes.byref(layer),
            ctypes.byref(rows_as_c(batch)),
            ctypes.c_int32(torch.get_num_threads()),
        )
        return output.to(dtype)


def why_not_native_attention(layer_dims: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Returns why NativeAttention cannot run heads of sizes (key, value); None if it can."""
    if dtype not in DTYPES:
        return f"{dtype}: allowed are float32 and bfloat16"
    if layer_dims[0] * dtype.itemsize % 4:
        return f"a key head has {layer_dims[0]} numbers; in {dtype} it must be even"
    return None


def rows_as_c(batch: PagedBatch) -> CAttentionRows:
    """Returns the rows of a batch as a C structure; `batch` must stay alive."""
    tables = batch.block_tables
    return CAttentionRows(
        pointer(tables),
        pointer(batch.num_computed_tokens),
        pointer(batch.query_starts),
        tables.stride(0),
        batch.num_rows,
    )
