"""The attention backends of GPUs: what keeps each from a machine or a model, and how it is made.

The reasons are in docs/adr/0007-gpu-backends.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor_service.device.kv_cache import LayerShape
from executor_service.model.loaded_model import LoadedModel
from splitserve_kernels.gpu.attention.flash_attention_3_rules import (
    flash_attention_3,
    why_no_flash_attention_3,
    why_not_flash_attention_3,
)
from splitserve_kernels.gpu.attention.flash_attention_rules import (
    PAGE_SIZE,
    why_no_flash_attention,
    why_not_flash_attention,
)
from splitserve_kernels.gpu.availability import why_unavailable
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions

DEFAULT_BLOCK_SIZE = 16

# What keeps a backend from layers of a shape and options, a dtype and a block size; None: nothing.
WhyNotLayer = Callable[[LayerShape, AttentionOptions, torch.dtype, int], str | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may serve, by its name in --attention-backend. `block_size`: its own choice.

    `why_absent` tells what keeps it from this machine, `why_not_layer` what keeps it from layers
    whose queries have a dtype, on blocks of a size; None if nothing does. `make` is called only if
    nothing does. `mixes_dtypes`: it takes keys and values of another dtype than queries.
    """

    name: str
    block_size: int
    make: Callable[[], AttentionBackend]
    why_absent: Callable[[], str | None]
    why_not_layer: WhyNotLayer = lambda _layer, _options, _dtype, _block_size: None
    mixes_dtypes: bool = True

    def why_not(self, loaded: LoadedModel, block_size: int) -> str | None:
        """What keeps it from a model here, None if nothing does."""
        reason = self.why_absent()
        if loaded.kv_dtype != loaded.dtype and not self.mixes_dtypes:
            reason = reason or f"{self.name} takes no {loaded.kv_dtype_name} keys and values"
        for layer, options in zip(loaded.layers, loaded.layer_options, strict=True):
            reason = reason or self.why_not_layer(layer, options, loaded.dtype, block_size)
        return reason


def _make_triton() -> AttentionBackend:
    # It needs Triton already when it is imported.
    from splitserve_kernels.gpu.attention import backend

    return backend


def _why_flash_attention_is_absent() -> str | None:
    # Keys and values are written by a kernel of ours.
    return why_no_flash_attention() or why_unavailable()


def _why_not_flash_attention(
    layer: LayerShape, options: AttentionOptions, dtype: torch.dtype, block_size: int
) -> str | None:
    head_dims = (layer.key_dim, layer.value_dim)
    has_sinks = options.sinks is not None
    return why_not_flash_attention(head_dims, dtype, block_size, has_sinks=has_sinks)


def _make_flash_attention() -> AttentionBackend:
    from splitserve_kernels.gpu.attention.flash_attention import FlashAttention

    return FlashAttention(importlib.import_module("flash_attn"))


def _why_flash_attention_3_is_absent() -> str | None:
    return why_no_flash_attention_3() or why_unavailable()


def _why_not_flash_attention_3(
    layer: LayerShape, options: AttentionOptions, dtype: torch.dtype, block_size: int
) -> str | None:
    return why_not_flash_attention_3(
        (layer.key_dim, layer.value_dim),
        dtype,
        block_size,
        window=options.sliding_window,
        has_sinks=options.sinks is not None,
    )


def _make_flash_attention_3() -> AttentionBackend:
    from splitserve_kernels.gpu.attention.flash_attention_3 import FlashAttention3

    return FlashAttention3(flash_attention_3())


# The first that can serve is the default.
CANDIDATES = (
    Candidate(
        "flash-attn-3",
        DEFAULT_BLOCK_SIZE,
        _make_flash_attention_3,
        _why_flash_attention_3_is_absent,
        _why_not_flash_attention_3,
        mixes_dtypes=False,
    ),
    Candidate("triton", DEFAULT_BLOCK_SIZE, _make_triton, why_unavailable),
    Candidate(
        "flash-attn",
        PAGE_SIZE,
        _make_flash_attention,
        _why_flash_attention_is_absent,
        _why_not_flash_attention,
        mixes_dtypes=False,
    ),
)
