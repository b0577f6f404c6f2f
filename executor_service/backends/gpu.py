"""What computes on a GPU: attention, tried and timed, and a decoder of our own around it.

The reasons are in docs/adr/0007-gpu-backends.md.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from executor_service.backends.attention_trial import time_attention, try_backend
from executor_service.backends.compute import Compute, log_not_used
from executor_service.backends.gpu_kernels import choose_gpu_copy, choose_gpu_draw
from executor_service.decoders.decoder import DecoderModel
from executor_service.decoders.llama_parts import release_weights, why_not_llama
from executor_service.decoders.recorded_pieces import in_recorded_pieces
from executor_service.device.errors import release_cached_memory
from executor_service.device.kv_cache import LayerShape
from executor_service.errors import BackendUnavailable, TrialFailed, one_line
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import attending_with
from splitserve_kernels.gpu.attention.flash_attention_rules import (
    PAGE_SIZE,
    why_no_flash_attention,
    why_not_flash_attention,
)
from splitserve_kernels.gpu.availability import why_unavailable
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions

if TYPE_CHECKING:
    # It needs Triton already when it is imported.
    from executor_service.decoders.gpu_decoder import GpuDecoder

DEFAULT_BLOCK_SIZE = 16
# As many times as fast must attention be to be worth coarser blocks than the default.
_WORTH_COARSE_BLOCKS = 1.25

_log = logging.getLogger(__name__)

# Seconds that attention of a model takes with a backend and a block size.
TimeAttention = Callable[[AttentionBackend, LoadedModel, int], float]
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


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """What attends, on blocks of `block_size` tokens."""

    name: str
    backend: AttentionBackend
    block_size: int


def choose_gpu_attention(
    loaded: LoadedModel,
    only: str | None,
    block_size: int | None,
    candidates: Sequence[Candidate],
    time_backend: TimeAttention = time_attention,
) -> GpuAttention:
    """The fastest of those `candidates` that compute what plain torch does; the first is default.

    `only`: the name of the one that may be taken; None for any. `block_size`: None for the
    backend's own choice. Raises BackendUnavailable if none can be had, TrialFailed if that is
    because of what it computes.
    """
    usable = []
    refusal: BackendUnavailable | TrialFailed = BackendUnavailable("no such backend")
    for candidate in candidates:
        if only not in (None, candidate.name):
            continue
        try:
            usable.append(_try(candidate, loaded, block_size))
        except (BackendUnavailable, TrialFailed) as error:
            is_wrong = isinstance(error, TrialFailed)
            _log.log(
                logging.ERROR if is_wrong else logging.INFO,
                "attention_backend_refused backend=%s reason=%r",
                candidate.name,
                str(error),
            )
            if is_wrong or not isinstance(refusal, TrialFailed):
                refusal = error
    if not usable:
        raise refusal
    return usable[0] if len(usable) == 1 else _fastest(usable, loaded, time_backend)


def _try(candidate: Candidate, loaded: LoadedModel, block_size: int | None) -> GpuAttention:
    size = block_size or candidate.block_size
    reason = candidate.why_not(loaded, size)
    if reason is not None:
        raise BackendUnavailable(reason)
    backend = candidate.make()
    try_backend(backend, loaded, size)
    return GpuAttention(candidate.name, backend, size)


def _fastest(
    usable: Sequence[GpuAttention], loaded: LoadedModel, time_backend: TimeAttention
) -> GpuAttention:
    default = usable[0]
    try:
        times_s = [time_backend(each.backend, loaded, each.block_size) for each in usable]
    except RuntimeError as error:
        # Too little memory, mostly.
        _log.warning("attention_backends_not_timed reason=%r", one_line(error))
        return default
    for each, time_s in zip(usable, times_s, strict=True):
        _log.info("attention_backend_timed backend=%s us=%.1f", each.name, time_s * 1e6)
    best = min(range(len(usable)), key=times_s.__getitem__)
    is_coarser = usable[best].block_size > default.block_size
    if is_coarser and times_s[best] * _WORTH_COARSE_BLOCKS > times_s[0]:
        return default
    return usable[best]


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


# The first is the default.
CANDIDATES = (
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


def compute_on_gpu(
    load: Callable[[], LoadedModel], loaded: LoadedModel, only: str | None, block_size: int | None
) -> Compute:
    """What runs `loaded` by Triton's kernels, or where these are interpreted, as on a GPU.

    `load` loads it again. For `only`, `block_size` and what is raised see `choose_gpu_attention`.
    """
    chosen = choose_gpu_attention(loaded, only, block_size, CANDIDATES)
    compute = Compute(
        loaded,
        attending_with(chosen.backend),
        f"{chosen.name} attention",
        chosen.block_size,
        choose_gpu_draw(loaded.vocab_size, loaded.device),
        choose_gpu_copy(loaded.device),
        is_recordable=loaded.device.type == "cuda",
    )
    reason = why_not_llama(loaded)
    if reason is not None:
        log_not_used("gpu_decoder", loaded, reason, compute.description)
        return compute
    decoder = _gpu_decoder(loaded, chosen)
    if decoder is not None:
        return _with_decoder(compute, decoder)
    # Memory need not hold the model twice. (By now the error does not hold on to its parts either.)
    release_weights(loaded.model)
    release_cached_memory(loaded.device)
    return replace(compute, loaded=load())


def _gpu_decoder(loaded: LoadedModel, chosen: GpuAttention) -> GpuDecoder | None:
    """None if it was refused; the model may be lost then."""
    # It needs Triton already when it is imported.
    from executor_service.decoders.gpu_decoder import build_gpu_decoder

    try:
        return build_gpu_decoder(loaded, chosen.backend, chosen.block_size)
    except TrialFailed as error:
        _log.error("gpu_decoder_refused model=%s reason=%r", loaded.architecture, str(error))
        return None


def _with_decoder(compute: Compute, decoder: GpuDecoder) -> Compute:
    return replace(
        compute,
        loaded=replace(compute.loaded, weights_bytes=decoder.num_bytes),
        make_model=lambda _loaded, cache: DecoderModel(decoder, cache),
        description=f"GPU decoder, {compute.description}",
        make_in_pieces=lambda max_num_tokens: in_recorded_pieces(decoder, max_num_tokens),
    )
