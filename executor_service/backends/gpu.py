"""What computes on a GPU: attention, tried and timed, and a decoder of our own around it.

The reasons are in docs/adr/0007-gpu-backends.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from executor_service.backends.attention_candidates import (
    DEFAULT_BLOCK_SIZE,
    Candidate,
    gpu_candidates,
)
from executor_service.backends.attention_trial import time_attention, try_backend
from executor_service.backends.compute import (
    PRICE_OF_NO_GPU_DECODER,
    Compute,
    log_decoder_refused,
    log_not_used,
)
from executor_service.backends.gpu_kernels import (
    choose_gpu_adjust,
    choose_gpu_copy,
    choose_gpu_draw,
    static_draw_of,
)
from executor_service.decoders.decoder import DecoderModel
from executor_service.decoders.llama_parts import release_weights, why_not_llama
from executor_service.device.errors import release_cached_memory
from executor_service.errors import BackendUnavailable, TrialFailed, one_line
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import attending_with
from splitserve_kernels.gpu.attention.flash_attention_3_sources import INSTALLED
from splitserve_kernels.paged_batch import AttentionBackend

if TYPE_CHECKING:
    # It needs Triton already when it is imported.
    from executor_service.decoders.gpu_decoder import GpuDecoder

_log = logging.getLogger(__name__)

# Seconds that attention of a model takes with a backend and a block size.
TimeAttention = Callable[[AttentionBackend, LoadedModel, int], float]


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

    `only`: the name of the one that may be taken; None for any. `block_size`: None for the default.
    Raises BackendUnavailable if none can be had, TrialFailed if that is because of what it
    computes.
    """
    size = block_size or DEFAULT_BLOCK_SIZE
    usable = []
    refusal: BackendUnavailable | TrialFailed = BackendUnavailable("no such backend")
    for candidate in candidates:
        if only not in (None, candidate.name):
            continue
        try:
            usable.append(_try(candidate, loaded, size, is_named=only is not None))
        except (BackendUnavailable, TrialFailed) as error:
            is_wrong = isinstance(error, TrialFailed)
            level = logging.WARNING if candidate.is_asked_for else logging.INFO
            _log.log(
                logging.ERROR if is_wrong else level,
                "attention_backend_refused backend=%s reason=%r",
                candidate.name,
                str(error),
            )
            if is_wrong or not isinstance(refusal, TrialFailed):
                refusal = error
    if not usable:
        raise refusal
    return usable[0] if len(usable) == 1 else _fastest(usable, loaded, time_backend)


def _try(
    candidate: Candidate, loaded: LoadedModel, block_size: int, *, is_named: bool
) -> GpuAttention:
    reason = candidate.why_not(loaded, block_size, is_named=is_named)
    if reason is not None:
        raise BackendUnavailable(reason)
    backend = candidate.make()
    try_backend(backend, loaded, block_size, rounds_queries=candidate.rounds(loaded))
    return GpuAttention(candidate.name, backend, block_size)


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
    return usable[min(range(len(usable)), key=times_s.__getitem__)]


def compute_on_gpu(
    load: Callable[[], LoadedModel],
    loaded: LoadedModel,
    only: str | None,
    block_size: int | None,
    flash_attention_3: str = INSTALLED,
) -> Compute:
    """What runs `loaded` by Triton's kernels, or where these are interpreted, as on a GPU.

    `load` loads it again. For `only`, `block_size` and what is raised see `choose_gpu_attention`,
    for `flash_attention_3` see `gpu_candidates`.
    """
    chosen = choose_gpu_attention(loaded, only, block_size, gpu_candidates(flash_attention_3))
    draw = choose_gpu_draw(loaded.vocab_size, loaded.device)
    compute = Compute(
        loaded,
        attending_with(chosen.backend),
        f"{chosen.name} attention",
        chosen.block_size,
        draw,
        choose_gpu_copy(loaded.device),
        is_recordable=loaded.device.type == "cuda",
        adjust=choose_gpu_adjust(loaded.vocab_size, loaded.device),
        static_draw=static_draw_of(draw),
    )
    reason = why_not_llama(loaded)
    if reason is not None:
        log_not_used("gpu_decoder", loaded, reason, compute.description)
        return compute
    decoder = _gpu_decoder(loaded, chosen)
    if not isinstance(decoder, str):
        return _with_decoder(compute, decoder)
    # Memory need not hold the model twice. (By now the error does not hold on to its parts either.)
    release_weights(loaded.model)
    release_cached_memory(loaded.device)
    return replace(compute, loaded=load(), why_slow=decoder)


def _gpu_decoder(loaded: LoadedModel, chosen: GpuAttention) -> GpuDecoder | str:
    """The reason if it was refused; the model may be lost then."""
    # It needs Triton already when it is imported.
    from executor_service.decoders.gpu_decoder import build_gpu_decoder

    try:
        return build_gpu_decoder(loaded, chosen.backend, chosen.block_size)
    except TrialFailed as error:
        return log_decoder_refused("gpu", loaded, error, PRICE_OF_NO_GPU_DECODER)


def _with_decoder(compute: Compute, decoder: GpuDecoder) -> Compute:
    return replace(
        compute,
        loaded=replace(compute.loaded, weights_bytes=decoder.num_bytes),
        make_model=lambda _loaded, cache: DecoderModel(decoder, cache),
        description=f"GPU decoder, {compute.description}",
    )
