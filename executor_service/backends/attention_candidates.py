"""The attention backends of GPUs: what keeps each from a machine or a model, and how it is made.

The reasons are in docs/adr/0007-gpu-backends.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor_service.device.kv_cache import LayerShape
from executor_service.model.loaded_model import LoadedModel
from splitserve_kernels.gpu.attention.flash_attention_3_op import FlashAttention3Op
from splitserve_kernels.gpu.attention.flash_attention_3_rules import why_not_flash_attention_3
from splitserve_kernels.gpu.attention.flash_attention_3_sources import (
    INSTALLED,
    FlashAttention3Missing,
    load_flash_attention_3,
    why_no_hopper,
)
from splitserve_kernels.gpu.availability import why_unavailable
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """A layer and how it attends; `dtype` of queries, `kv_dtype` of the pools, their blocks."""

    layer: LayerShape
    options: AttentionOptions
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int


# What keeps a backend from a layer; None: nothing.
WhyNotLayer = Callable[[LayerDemand], str | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may serve, by its name in --attention-backend.

    `why_absent` tells what keeps it from this machine, `why_not_layer` what keeps it from a layer;
    None if nothing does. `make` is called only if nothing does. `rounds_queries`: over float8 pools
    it rounds queries and weights to float8, too; then it serves only if it is asked for by name.
    `is_asked_for`: whoever started us wants it, and has to know why not.
    """

    name: str
    make: Callable[[], AttentionBackend]
    why_absent: Callable[[], str | None]
    why_not_layer: WhyNotLayer = lambda _demand: None
    rounds_queries: bool = False
    is_asked_for: bool = False

    def why_not(self, loaded: LoadedModel, block_size: int, *, is_named: bool = True) -> str | None:
        """What keeps it from a model here, None if nothing does. `is_named`: no other may serve."""
        if self.rounds(loaded) and not is_named:
            return (
                f"over {loaded.kv_dtype_name} keys and values {self.name} rounds queries, too:"
                " taken by name only"
            )
        reason = self.why_absent()
        for layer, options in zip(loaded.layers, loaded.layer_options, strict=True):
            demand = LayerDemand(layer, options, loaded.dtype, loaded.kv_dtype, block_size)
            reason = reason or self.why_not_layer(demand)
        return reason

    def rounds(self, loaded: LoadedModel) -> bool:
        """Whether it rounds what others do not."""
        return self.rounds_queries and loaded.kv_dtype.itemsize == 1


def gpu_candidates(flash_attention_3: str = INSTALLED) -> tuple[Candidate, ...]:
    """The first that can serve is the default.

    `flash_attention_3`: where that is from, see `load_flash_attention_3`.
    """
    triton = Candidate("triton", _make_triton, why_unavailable, _why_not_triton)
    return (_flash_attention_3(flash_attention_3), triton)


def _make_triton() -> AttentionBackend:
    # It needs Triton already when it is imported.
    from splitserve_kernels.gpu.attention import backend

    return backend


def _why_not_triton(demand: LayerDemand) -> str | None:
    if demand.kv_dtype.itemsize != 1 or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() < (8, 9):
        return "float8 keys and values: Triton converts them on compute capability 8.9 and later"
    return None


def _flash_attention_3(source: str) -> Candidate:
    @functools.cache
    def load() -> FlashAttention3Op:
        return load_flash_attention_3(source)

    def why_absent() -> str | None:
        # Nothing is loaded, or downloaded, for a device that it is not for.
        reason = why_no_hopper() or why_unavailable()
        if reason is not None:
            return reason
        try:
            load()
        except FlashAttention3Missing as error:
            return str(error)
        return None

    def make() -> AttentionBackend:
        from splitserve_kernels.gpu.attention.flash_attention_3 import FlashAttention3

        return FlashAttention3(load())

    return Candidate(
        "flash-attn-3",
        make,
        why_absent,
        _why_not_flash_attention_3,
        rounds_queries=True,
        is_asked_for=source != INSTALLED,
    )


def _why_not_flash_attention_3(demand: LayerDemand) -> str | None:
    return why_not_flash_attention_3(
        (demand.layer.key_dim, demand.layer.value_dim),
        demand.dtype,
        demand.kv_dtype,
        demand.block_size,
        demand.options.sliding_window,
    )
