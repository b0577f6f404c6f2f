"""Native operations on the CPU: paged attention, and products with packed weights.

Attention has the interface of `splitserve_kernels.reference`.

Shape letters of attention: T tokens over all rows, H query heads, G key/value heads, D size of a
query or key head, E size of a value head, B block size, N blocks of the pool. Of products: N
outputs, K inputs, M rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.cpu.library import (
    DTYPES,
    CAttentionLayer,
    CAttentionRows,
    CKVBlocks,
    CLinear,
    NativeLibrary,
    kv_format,
    pointer,
)
from splitserve_kernels.paged_batch import (
    SCALE_BYTES,
    SLOT_SCALES,
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
        dtype = _computed_dtype(key_pool, key, scales)
        key, value = key.to(dtype).contiguous(), value.to(dtype).contiguous()
        _, block_size, num_kv_heads, _ = key_pool.shape
        dims = key.shape[2], value.shape[2]
        blocks = CKVBlocks(block_size, num_kv_heads, *dims, kv_format(key_pool.dtype))
        self._library.call(
            "store_kv",
            dtype,
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

        Queries and weights are rounded to the dtype of the pools, but not for 8-bit ones; sums are
        float32.
        """
        dtype = query.dtype
        query = query.to(_computed_dtype(key_pool, query, scales))
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        value_dim = value_pool.shape[3] - (SCALE_BYTES if scales.in_slots else 0)
        output = query.new_empty(query.shape[0], query.shape[1], value_dim)
        sinks = None if options.sinks is None else options.sinks.to(torch.float32).contiguous()
        bias = options.relative_bias
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        layer = CAttentionLayer(
            query=pointer(query),
            keys=pointer(key_pool),
            values=pointer(value_pool),
            output=pointer(output),
            sinks=pointer(sinks),
            relative_bias=pointer(bias),
            query_stride=query.stride(0),
            key_stride=key_pool.stride(0),
            value_stride=value_pool.stride(0),
            num_heads=query.shape[1],
            num_kv_heads=key_pool.shape[2],
            head_dim=query.shape[2],
            value_dim=value_dim,
            block_size=key_pool.shape[1],
            sliding_window=options.sliding_window or 0,
            num_distances=0 if bias is None else bias.shape[1],
            kv_format=kv_format(key_pool.dtype),
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


def _computed_dtype(pool: Tensor, rows: Tensor, scales: KVScales) -> torch.dtype:
    """Returns the dtype that keys and values of `pool` are multiplied in; `rows`: activations."""
    is_plain = kv_format(pool.dtype) == 0
    assert scales == (UNIT_SCALES if is_plain else SLOT_SCALES), f"scales of {pool.dtype} pools"
    return pool.dtype if is_plain else rows.dtype


def why_not_native_attention(layer_dims: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Returns why NativeAttention cannot run heads of sizes (key, value); None if it can."""
    if dtype not in DTYPES:
        return f"{dtype}; allowed: float32, bfloat16"
    if layer_dims[0] * dtype.itemsize % 4:
        return f"key heads have size {layer_dims[0]}; allowed in {dtype}: even sizes"
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


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weight matrix [N, K] in panels (gemm.h), with bias and scales, padded to whole panels.

    `dtype`: of the rows it is multiplied with. `scales`: None if the panels have that dtype too;
    otherwise the panels hold integers (int8_weights.h). `kinds`, `starts`: of each panel of groups
    (group_weights.h), uint8 and int64; None for other panels. `order`: [K] int32, the input that
    each column of groups belongs to; None if they are in order. `is_exact`: groups are multiplied
    with rows that are not rounded.
    """

    panels: Tensor
    bias: Tensor | None
    scales: Tensor | None
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    kinds: Tensor | None = None
    starts: Tensor | None = None
    order: Tensor | None = None
    is_exact: bool = False
    # Made once: a small matrix is multiplied in few microseconds.
    _c: CLinear = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        structure = CLinear(
            pointer(self.panels),
            pointer(self.bias),
            pointer(self.scales),
            pointer(self.kinds),
            pointer(self.starts),
            pointer(self.order),
            self.num_outputs,
            self.num_inputs,
            self.is_exact,
        )
        object.__setattr__(self, "_c", structure)

    @property
    def num_bytes(self) -> int:
        """Total bytes of panels, bias and scales."""
        tensors = (self.panels, self.bias, self.scales, self.kinds, self.starts)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def as_c(self) -> CLinear:
        """Returns the C structure of the matrix; the structure does not keep the tensors alive."""
        return self._c


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of a weight matrix [N, K], at arbitrary addresses.

    `addresses`: [N] int64, 0 for a row of zeros. `sources`: the contiguous matrices that hold the
    rows; all of one dtype and with K inputs.
    """

    addresses: npt.NDArray[np.int64]
    sources: tuple[Tensor, ...]

    @classmethod
    def of(cls, weight: Tensor) -> WeightRows:
        """Returns the rows of `weight` [N, K]."""
        weight = weight.detach().contiguous()
        row_bytes = weight.shape[1] * weight.itemsize
        addresses = weight.data_ptr() + np.arange(weight.shape[0], dtype=np.int64) * row_bytes
        return cls(addresses, (weight,))


def pack(
    library: NativeLibrary,
    rows: WeightRows,
    bias: Tensor | None = None,
    *,
    is_int8: bool = False,
) -> PackedLinear:
    """Packs `rows` [N, K], float32 or bfloat16, and `bias` [N]; copies both.

    K must be even for bfloat16. `is_int8`: rounds weights to integers from -127 to 127, times one
    scale per output. An output with a weight that is not finite then becomes NaN.
    """
    num_outputs, source = len(rows.addresses), rows.sources[0]
    num_inputs = source.shape[1]
    padded = -(-num_outputs // library.panel) * library.panel
    panels = torch.empty(padded * num_inputs, dtype=torch.int8 if is_int8 else source.dtype)
    scales = torch.empty(padded) if is_int8 else None
    library.call(
        "pack_int8" if is_int8 else "pack",
        source.dtype,
        ctypes.c_void_p(rows.addresses.ctypes.data),
        ctypes.c_int32(num_outputs),
        ctypes.c_int32(num_inputs),
        pointer(panels),
        *([pointer(scales)] if is_int8 else []),
        ctypes.c_int32(torch.get_num_threads()),
    )
    padded_bias = None
    if bias is not None:
        padded_bias = torch.zeros(padded)
        padded_bias[:num_outputs] = bias.detach()
    return PackedLinear(panels, padded_bias, scales, num_outputs, num_inputs, source.dtype)


def linear(library: NativeLibrary, weights: PackedLinear, rows: Tensor) -> Tensor:
    """Multiplies `rows` [M, K] with the weights and adds the bias: [M, N], in the weights' dtype.

    Sums are float32. The result of a row is bit-identical whatever the other rows are.
    """
    rows = rows.contiguous()
    output = rows.new_empty(rows.shape[0], weights.num_outputs)
    library.call(
        "linear",
        weights.dtype,
        ctypes.byref(weights.as_c()),
        pointer(rows),
        ctypes.c_int32(rows.shape[0]),
        pointer(output),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return output


def unpack_outputs(library: NativeLibrary, weights: PackedLinear, outputs: Tensor) -> Tensor:
    """Returns the weights of `outputs` [R] int64, in float: [R, K], in the weights' dtype.

    `weights`: of groups (`kinds` is set).
    """
    outputs = outputs.contiguous()
    unpacked = torch.empty(len(outputs), weights.num_inputs, dtype=weights.dtype)
    library.call(
        "unpack_outputs",
        weights.dtype,
        ctypes.byref(weights.as_c()),
        pointer(outputs),
        ctypes.c_int32(len(outputs)),
        pointer(unpacked),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return unpacked
