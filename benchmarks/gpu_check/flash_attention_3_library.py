"""flash-attn 3 out of a library of operators, in place of its package.

vLLM's wheel has it as one file, `_vllm_fa3_C.abi3.so`, which needs no other torch than it was built
for. Loaded here, it is what `flash_attn_interface` is to all else: a backend that is tried and
timed.
Source: the operator `fwd` of that library, as vLLM 0.33 registers it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_MODULE = "flash_attn_interface"


def install(library: Path) -> None:
    """From now on the package is there. Raises OSError if torch cannot load the file."""
    operators: Any = torch.ops
    operators.load_library(str(library))
    module: Any = ModuleType(_MODULE)
    module.flash_attn_with_kvcache = _Operator(_operators(library))
    sys.modules[_MODULE] = module


def _operators(library: Path) -> Any:  # noqa: ANN401
    """A library's are called as its file is, up to the first dot."""
    return getattr(torch.ops, library.name.partition(".")[0])


class _Operator:
    """`flash_attn_with_kvcache`, of what `FlashAttention3` asks of it."""

    def __init__(self, operators: Any) -> None:  # noqa: ANN401
        self._forward = operators.fwd

    def __call__(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        *,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:
        longest = page_table.shape[1] * key_pool.shape[1]
        found = self._forward(
            query, key_pool, value_pool,
            None, None, None, None,  # new keys and values, their product with queries, the output
            cu_seqlens_q, None, None,  # where rows begin: queries, keys, new keys
            None, cache_seqlens,  # tokens in use: of queries, of keys
            max_seqlen_q, longest,
            page_table, None, None,  # the cache's rows, what is padded on the left
            None, None, None,  # rotary embedding
            None, None, None,  # scales of float8
            softmax_scale, causal, window_size[0], window_size[1], softcap,
            True, None, 0, None, 0,  # interleaved rotary, schedule, splits, heads packed, margin
            None, 1, 0, None,  # sinks, and context parallelism
        )  # fmt: skip
        output: Tensor = found[0]
        return output
