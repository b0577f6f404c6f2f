"""What the package flash-attn can do, and whether it is here; needs neither it nor Triton.

Source: flash-attn 2.8, the checks of `mha_varlen_fwd` and `mha_fwd_kvcache`.
"""

from __future__ import annotations

import importlib

import torch

# Tokens of a page of keys and values must be a multiple of this.
PAGE_SIZE = 256
_MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16)
# Ampere.
_MIN_CAPABILITY = (8, 0)


def why_no_flash_attention() -> str | None:
    """None if the package can be imported and the device is one of its; otherwise the reason."""
    try:
        importlib.import_module("flash_attn")
    except ModuleNotFoundError:
        return "flash_attn is not installed"
    except (ImportError, OSError) as error:
        # Built for another torch, mostly; the first line names the symbol.
        return f"flash_attn cannot be imported: {str(error).splitlines()[0]}"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        return "flash-attn needs compute capability 8.0"
    return None


def why_not_flash_attention(
    head_dims: tuple[int, int], dtype: torch.dtype, block_size: int, *, has_sinks: bool
) -> str | None:
    """What keeps flash-attn from heads of such sizes (key, value); None if nothing does."""
    key_dim, value_dim = head_dims
    if block_size % PAGE_SIZE:
        return f"block_size {block_size}: flash-attn takes multiples of {PAGE_SIZE} only"
    if dtype not in _DTYPES:
        return f"{dtype}: flash-attn takes float16 and bfloat16 only"
    if has_sinks:
        return "attention sinks: flash-attn has none"
    if key_dim != value_dim:
        return f"key heads of {key_dim} and value heads of {value_dim}: flash-attn wants equal ones"
    if key_dim > _MAX_HEAD_DIM or key_dim % 8:
        return f"heads of {key_dim}: flash-attn takes multiples of 8 up to {_MAX_HEAD_DIM}"
    return None
