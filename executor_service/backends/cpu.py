"""What computes on a CPU: native kernels that attend, multiply and draw, or a native decoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from executor_service.backends.attention_trial import try_backend
from executor_service.backends.compute import (
    PRICE_OF_NO_DECODER,
    PRICE_OF_TORCH_ON_CPU,
    Compute,
    log_decoder_refused,
    log_not_used,
)
from executor_service.decoders.cpu_decoder import (
    NativePagedModel,
    build_native_model,
    why_not_native,
)
from executor_service.decoders.packed_linears import pack_linears
from executor_service.device.kv_cache import KVCache
from executor_service.errors import BackendUnavailable, TrialFailed
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel, attending_with
from executor_service.sampling.sampler import Draw, SamplingRows, draw_rows
from splitserve_kernels.cpu.attention import NativeAttention, why_not_native_attention
from splitserve_kernels.cpu.library import NativeLibrary, load_library
from splitserve_kernels.cpu.sampling import choose_tokens

_log = logging.getLogger(__name__)


def compute_on_cpu(
    load: Callable[[], LoadedModel], loaded: LoadedModel, block_size: int, *, is_int8: bool
) -> Compute:
    """What runs `loaded` by native kernels; `load` loads it again.

    Raises BuildFailed or BackendUnavailable if these cannot be had, TrialFailed if their attention
    computes something else. What else fails its trial is left to `transformers`.
    """
    for layer in loaded.layers:
        reason = why_not_native_attention((layer.key_dim, layer.value_dim), loaded.dtype)
        if reason is not None:
            raise BackendUnavailable(reason)
    library = load_library()
    backend = NativeAttention(library)
    try_backend(backend, loaded, block_size)
    reason, why_slow = why_not_native(loaded), None
    if reason is None:
        try:
            return _native_decoder(loaded, library, block_size, is_int8=is_int8)
        except TrialFailed as error:
            why_slow = log_decoder_refused("native", loaded, error, PRICE_OF_NO_DECODER)
            loaded = load()  # the trial took it apart
    else:
        log_not_used("native_decoder", loaded, reason, "native attention")
    description = f"native attention ({library.variant})"
    draw, is_packed = native_draw(library), True
    try:
        loaded = pack_linears(loaded, library, is_int8=is_int8)
        description = f"native attention and matrices ({library.variant})"
    except TrialFailed as error:
        message = "packed_matrices_refused model=%s reason=%r price=%r"
        _log.error(message, loaded.architecture, str(error), PRICE_OF_TORCH_ON_CPU)
        loaded, is_packed, why_slow = load(), False, str(error)
    make_model = attending_with(backend)
    is_int8 &= is_packed
    return Compute(
        loaded, make_model, description, block_size, draw, is_int8=is_int8, why_slow=why_slow
    )


def native_draw(library: NativeLibrary) -> Draw:
    """Chooses as `draw_in_torch` does, many times faster. Logits must be on the CPU."""

    def draw(adjusted: Tensor, rows: SamplingRows) -> Tensor:
        return choose_tokens(library, adjusted, draw_rows(rows, adjusted.shape[1]))

    return draw


def _native_decoder(
    loaded: LoadedModel, library: NativeLibrary, block_size: int, *, is_int8: bool
) -> Compute:
    native = build_native_model(loaded, library, is_int8=is_int8)
    loaded = replace(loaded, weights_bytes=native.num_bytes)

    def make_model(_loaded: LoadedModel, cache: KVCache) -> PagedModel:
        return NativePagedModel(native, cache)

    return Compute(
        loaded,
        make_model,
        f"native decoder ({library.variant})",
        block_size,
        native_draw(library),
        is_batch_invariant=True,
        is_int8=is_int8,
    )
