"""Function of flash-attn 2 from the installed package, and its limits.

Imports neither flash-attn nor Triton. Sources: `flash_attn_interface.py`, and `mha_varlen_fwd` in
its `flash_api.cpp`, version 2.8.

Shape letters: T tokens over all rows, H query heads, D size of a head.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

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

# `flash_attn_varlen_func` with `return_attn_probs`: returns [T, H, D], the logarithm of each
# softmax's sum, [H, T], and something empty.
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
