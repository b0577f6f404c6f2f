"""Paged attention with flash-attn 2 for prompts, and our own kernels for all other rows.

The package `flash-attn` reads pages of 256 tokens and multiples of that. Its calls for rows of
several tokens do not split keys. So decodes, and steps whose prompts would not fill the device, run
in Triton, whose programs share the keys of long rows.

Sources: Dao, "FlashAttention-2", 2023; `flash_attn_interface.py`, and `mha_varlen_fwd` in its
`flash_api.cpp`, version 2.8.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a head, B block
size, N blocks of the pool.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from splitserve_kernels.gpu.attention import backend
from splitserve_kernels.gpu.attention.operator_support import (
    OncePerPass,
    rows_in_sight,
    weigh_with_sinks,
)
from splitserve_kernels.gpu.attention.paged_decode import paged_decode
from splitserve_kernels.gpu.kv_write import with_dense_heads
from splitserve_kernels.gpu.launch import LayerPools
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch

PAGE_SIZE = 256
_AMPERE = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM, _HEAD_DIM_UNIT = 256, 8
_MODULE, _FUNCTION = "flash_attn", "flash_attn_varlen_func"
_ARGUMENTS = frozenset(
    {
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "return_attn_probs",
        "block_table",
    }
)

# `flash_attn_varlen_func`: returns [T, H, D], and with `return_attn_probs` also the logarithm of
# each softmax's sum, [H, T], and something empty.
VarlenFunction = Callable[..., tuple[Tensor, Tensor, Tensor]]


class FlashAttention2Missing(Exception):
    """Reports that flash-attn 2 is missing or cannot be called; the message is one line."""


def load_flash_attention_2() -> VarlenFunction:
    """Returns the function of the installed package. Raises FlashAttention2Missing."""
    try:
        module = importlib.import_module(_MODULE)
        function: VarlenFunction = getattr(module, _FUNCTION)
    except ModuleNotFoundError as error:
        raise FlashAttention2Missing(f"flash-attn 2 is not installed: {error}") from error
    except (ImportError, OSError) as error:
        # Usually built for another torch version; the first line names the symbol.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FlashAttention2Missing(f"flash-attn 2 cannot be imported: {reason}") from error
    except AttributeError as error:
        # flash-attn 4 has the same name, and other functions.
        raise FlashAttention2Missing(f"flash-attn 2 is not installed: {error}") from error
    missing = sorted(_ARGUMENTS - inspect.signature(function).parameters.keys())
    if missing:
        raise FlashAttention2Missing(f"flash-attn 2: {_FUNCTION} has no argument {missing[0]}")
    return function


def why_not_flash_attention_2(
    head_dims: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
) -> str | None:
    """Returns why flash-attn 2 cannot run heads of sizes (key, value); None if it can.

    `dtype`: of queries. `kv_dtype`: of keys and values.
    """
    if block_size % PAGE_SIZE:
        return f"block_size {block_size}: flash-attn 2 supports multiples of {PAGE_SIZE}"
    if dtype not in _DTYPES:
        return f"{dtype}: flash-attn 2 supports float16 and bfloat16 only"
    if kv_dtype != dtype:
        return f"keys and values in {kv_dtype}: flash-attn 2 supports {dtype} only"
    key_dim, value_dim = head_dims
    if key_dim != value_dim or key_dim % _HEAD_DIM_UNIT or key_dim > _MAX_HEAD_DIM:
        return (
            f"key head size {key_dim} and value head size {value_dim}: flash-attn 2 supports equal"
            f" sizes, multiples of {_HEAD_DIM_UNIT} up to {_MAX_HEAD_DIM}"
        )
    return None


def why_no_flash_attention_2_device() -> str | None:
    """Returns why the device cannot run flash-attn 2; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < _AMPERE:
        return "flash-attn 2 requires compute capability 8.0 or later"
    return None


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
