"""What flash-attn 3 can do, and whether it is here; needs neither it nor Triton.

Source: flash-attn 3 (the folder `hopper` of its repository, 2026), the checks of `mha_fwd` in
`flash_api.cpp`, and `tile_size.h`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

# A build or wheel of the repository, and a build of Hugging Face's `kernels-community/flash-attn3`
# whose folder is on the path. Nothing is downloaded: what is not there is not used.
_MODULES = ("flash_attn_interface", "flash_attn3.flash_attn_interface")
# Hopper; what there is for others is slower than Triton or missing.
_CAPABILITY = (9, 0)
_MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16)
# From so many tokens on, pages are read whole, with what nobody has written yet: it may be NaN.
_MIN_WHOLE_PAGE = 64


def flash_attention_3() -> ModuleType:
    """The module. Raises ImportError, of the first name if none is installed."""
    missing: list[ModuleNotFoundError] = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.append(error)
    raise missing[0]


def why_no_flash_attention_3() -> str | None:
    """None if the module can be imported and the device is its; otherwise the reason."""
    try:
        flash_attention_3()
    except ModuleNotFoundError:
        return f"flash-attn 3 is not installed: no module {' or '.join(_MODULES)}"
    except (ImportError, OSError) as error:
        # Built for another torch, mostly; the first line names the symbol.
        return f"flash-attn 3 cannot be imported: {str(error).splitlines()[0]}"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != _CAPABILITY:
        return "flash-attn 3 is for compute capability 9.0"
    return None


def why_not_flash_attention_3(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    block_size: int,
    *,
    window: int | None,
    has_sinks: bool,
) -> str | None:
    """What keeps flash-attn 3 from heads of such sizes (key, value); None if nothing does."""
    if block_size >= _MIN_WHOLE_PAGE:
        return (
            f"block_size {block_size}: flash-attn 3 reads such pages whole, written or not;"
            f" allowed: 1 to {_MIN_WHOLE_PAGE - 1}"
        )
    if dtype not in _DTYPES:
        return f"{dtype}: flash-attn 3 takes float16 and bfloat16 only"
    if has_sinks:
        return "attention sinks: flash-attn 3 has none"
    if window is not None and window < block_size:
        return f"a sliding window of {window} in blocks of {block_size}: allowed: a block or more"
    return _why_not_heads(*head_dims)


def _why_not_heads(key_dim: int, value_dim: int) -> str | None:
    if key_dim % 8 or value_dim % 8 or key_dim > _MAX_HEAD_DIM:
        return (
            f"key heads of {key_dim} and value heads of {value_dim}: flash-attn 3 takes multiples"
            f" of 8, keys up to {_MAX_HEAD_DIM}"
        )
    is_latent = 128 < key_dim <= 192 and 96 < value_dim <= 128
    is_wide = key_dim <= 64 and value_dim <= 512
    if key_dim == value_dim or is_latent or is_wide:
        return None
    return f"key heads of {key_dim} and value heads of {value_dim}: flash-attn 3 has no such pair"
