"""Limits of flash-attn 3; imports neither flash-attn nor Triton.

Source: flash-attn 3 (the folder `hopper` of its repository, 2026), the checks of `mha_fwd` in
`flash_api.cpp`, and `tile_size.h`.
"""

from __future__ import annotations

import torch

_MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16)
_FLOAT8 = torch.float8_e4m3fn
# From this block size on, flash-attn reads whole pages, including unwritten slots, which may hold
# NaN.
_MIN_WHOLE_PAGE = 64
# Prompts in windowed layers differed from float32 by 0.14 to 0.15 with heads of 128 and 256, and by
# 0.013 with heads of 64 (`make gpu-check`, part `correct`, the build of vLLM 0.33).
_MAX_WINDOWED_HEAD_DIM = 64


def why_not_flash_attention_3(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    window: int | None,
) -> str | None:
    """Returns why flash-attn 3 cannot run heads of sizes (key, value); None if it can.

    `dtype`: of queries. `kv_dtype`: of keys and values.
    """
    if block_size >= _MIN_WHOLE_PAGE:
        return (
            f"block_size {block_size}: flash-attn 3 reads such pages whole, written or not;"
            f" allowed: 1 to {_MIN_WHOLE_PAGE - 1}"
        )
    if dtype not in _DTYPES:
        return f"{dtype}: flash-attn 3 takes float16 and bfloat16 only"
    if kv_dtype not in (dtype, _FLOAT8):
        return f"keys and values in {kv_dtype}: flash-attn 3 takes {dtype} and {_FLOAT8}"
    if window is not None and window < block_size:
        return f"a sliding window of {window} in blocks of {block_size}: allowed: a block or more"
    if window is not None and max(head_dims) > _MAX_WINDOWED_HEAD_DIM:
        return (
            f"a sliding window and heads of {max(head_dims)}: flash-attn 3 computed prompts wrong"
            f" on an H100; allowed: heads of up to {_MAX_WINDOWED_HEAD_DIM}"
        )
    return _why_not_heads(*head_dims, is_float8=kv_dtype == _FLOAT8)


def _why_not_heads(key_dim: int, value_dim: int, *, is_float8: bool) -> str | None:
    # Copies are 16 bytes wide.
    unit = 16 if is_float8 else 8
    if key_dim % unit or value_dim % unit or key_dim > _MAX_HEAD_DIM:
        return (
            f"key heads of {key_dim} and value heads of {value_dim}: flash-attn 3 takes multiples"
            f" of {unit}, keys up to {_MAX_HEAD_DIM}"
        )
    is_latent = 128 < key_dim <= 192 and 96 < value_dim <= 128
    is_wide = key_dim <= 64 and value_dim <= (256 if is_float8 else 512)
    if key_dim == value_dim or is_latent or is_wide:
        return None
    return f"key heads of {key_dim} and value heads of {value_dim}: flash-attn 3 has no such pair"
