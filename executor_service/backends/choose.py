"""Choice of the code that computes a model: the fastest that computes the same as plain torch.

On a GPU: attention in Triton or by flash-attn 3, and for models of the Llama kind our own decoder
around it. On the CPU: native kernels, with the whole decoder in one call for models of that kind.
Each choice was tried on this machine first; code that fails its trial is refused with an error in
the log. Code that was not made for a class of models is one line at INFO, which names the code that
serves instead. If a model runs in slower code than others of its class, a warning says why and at
what price.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from executor_service.backends.attention_candidates import (
    DEFAULT_BLOCK_SIZE,
    Candidate,
    gpu_candidates,
    time_attention,
)
from executor_service.backends.compute import (
    PRICE_OF_NO_DECODER,
    PRICE_OF_NO_GPU_DECODER,
    PRICE_OF_NO_PACKED_MATRICES,
    PRICE_OF_TORCH_FOR_TEXTS,
    PRICE_OF_TORCH_ON_CPU,
    PRICE_OF_TORCH_ON_GPU,
    Compute,
    log_decoder_refused,
    log_matrices_refused,
    log_not_used,
)
from executor_service.backends.gpu_kernels import (
    choose_gpu_adding,
    choose_gpu_adjust,
    choose_gpu_copy,
    choose_gpu_draw,
    static_draw_of,
)
from executor_service.decoders import (
    NativeModel,
    NativePagedModel,
    build_native_model,
    pack_linears,
    pack_linears_on_gpu,
    release_weights,
    why_not_llama,
    why_not_native,
)
from executor_service.device import KVCache, release_cached_memory, release_freed_memory
from executor_service.errors import BackendUnavailable, TrialFailed, one_line
from executor_service.model import (
    ChooseAdding,
    LayerKind,
    LoadedModel,
    PagedModel,
    attending_with,
    dequantize_layers,
    quantized_linears,
    torch_model,
    weights_bytes,
)
from executor_service.sampling import Draw, SamplingRows, draw_rows
from executor_service.trials import try_backend, try_layer
from splitserve_kernels import reference
from splitserve_kernels.cpu import (
    NativeAttention,
    NativeLibrary,
    WeightRows,
    choose_tokens,
    linear,
    load_library,
    pack,
    why_not_native_attention,
)
from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.gpu.attention.flash_attention_3_op import INSTALLED
from splitserve_kernels.paged_batch import AttentionBackend

if TYPE_CHECKING:
    from executor_service.decoders.gpu_decoder import GpuDecoder

# Values of --attention-backend beside the names of `gpu_candidates`: the fastest backend that
# passes its trial, plain torch, and compiled CPU kernels.
AUTO, TORCH, NATIVE = "auto", "torch", "native"

_log = logging.getLogger(__name__)


def choose_compute(
    load: Callable[[], LoadedModel],
    name: str,
    block_size: int | None,
    *,
    is_deterministic: bool = False,
    is_int8: bool = False,
    flash_attention_3: str = INSTALLED,
) -> Compute:
    """Loads the model and chooses the code that runs it.

    `name`: a value of --attention-backend. `block_size`: None for the backend's best.
    `is_deterministic`: results must be batch invariant. `is_int8`: matrices are rounded to 8 bits.
    `flash_attention_3`: a value of --flash-attn-3-from. Raises BackendUnavailable if these demands
    cannot be met, or if `name` is not AUTO and that backend cannot serve.
    """
    compute = _choose(
        load,
        name,
        block_size,
        is_int8=is_int8,
        is_exact=is_deterministic,
        flash_attention_3=flash_attention_3,
    )
    if is_int8 and not compute.is_int8:
        raise BackendUnavailable(
            f"quantization int8: {compute.loaded.architecture} runs with {compute.description}"
            f"{_because(compute)}; allowed: float32 or bfloat16 on a CPU, with --attention-backend"
            " auto or native"
        )
    if is_deterministic and not compute.is_batch_invariant:
        raise BackendUnavailable(
            f"deterministic: {compute.loaded.architecture} runs with {compute.description}, whose"
            f" results depend on the batch{_because(compute)}; allowed: models that the native"
            " decoder of CPUs supports"
        )
    if is_int8 and compute.loaded.quantization is not None:
        _log.warning(
            "weights_rounded_again format=%s: int8 rounds weights that the checkpoint has rounded"
            " already",
            compute.loaded.quantization,
        )
    return finished_compute(compute)


def finished_compute(compute: Compute) -> Compute:
    """Returns `compute` as it serves: no replacement of its model comes later.

    The model's expected logits go.
    """
    loaded = replace(compute.loaded, expected=None)
    release_freed_memory()
    description = f"{compute.description}, int8" if compute.is_int8 else compute.description
    return replace(compute, loaded=loaded, description=description)


def _choose(
    load: Callable[[], LoadedModel],
    name: str,
    block_size: int | None,
    *,
    is_int8: bool,
    is_exact: bool,
    flash_attention_3: str,
) -> Compute:
    loaded = load()
    is_for_cpu = loaded.device.type == "cpu"
    if name not in (AUTO, TORCH) and is_for_cpu != (name == NATIVE):
        raise BackendUnavailable(f"{name}: not for {loaded.device.type}")
    if loaded.vector_parts is not None and loaded.vector_parts.uncached is not None:
        return _uncached(load, loaded, loaded.vector_parts.description, name, is_int8=is_int8)
    in_torch = Compute(loaded, torch_model, "torch", block_size or DEFAULT_BLOCK_SIZE)
    if name == TORCH:
        return _dequantized(replace(in_torch, why_slow="--attention-backend is torch"))
    try:
        if is_for_cpu:
            size = block_size or DEFAULT_BLOCK_SIZE
            return compute_on_cpu(load, loaded, size, is_int8=is_int8, is_exact=is_exact)
        only = None if name == AUTO else name
        return compute_on_gpu(load, loaded, only, block_size, flash_attention_3)
    except (BuildFailed, TrialFailed, BackendUnavailable) as error:
        if name != AUTO:
            raise BackendUnavailable(f"{name}: {error}") from error
        # A kernel that computes wrong results on this machine is an error, for the operator.
        level = logging.ERROR if isinstance(error, TrialFailed) else logging.WARNING
        message = "attention_backends_refused device=%s reason=%r price=%r: using plain torch"
        price = PRICE_OF_TORCH_ON_CPU if is_for_cpu else PRICE_OF_TORCH_ON_GPU
        _log.log(level, message, loaded.device.type, str(error), price)
        return _dequantized(replace(in_torch, why_slow=str(error)))


def _uncached(
    load: Callable[[], LoadedModel],
    loaded: LoadedModel,
    description: str,
    name: str,
    *,
    is_int8: bool,
) -> Compute:
    """Returns native matrices on a CPU, otherwise plain torch, for a model without KV blocks."""
    in_torch = Compute(loaded, torch_model, f"torch, {description}", loaded.max_model_len)
    if loaded.device.type != "cpu":
        if name not in (AUTO, TORCH):
            raise BackendUnavailable(f"{name}: not for models without KV blocks")
        return in_torch
    if name == TORCH:
        return replace(in_torch, why_slow="--attention-backend is torch")
    try:
        library = load_library()
        loaded = pack_linears(loaded, library, is_int8=is_int8)
    except (BuildFailed, TrialFailed) as error:
        if name != AUTO:
            raise BackendUnavailable(f"{name}: {error}") from error
        log_matrices_refused(loaded, error, PRICE_OF_TORCH_FOR_TEXTS)
        kept = loaded if isinstance(error, BuildFailed) else load()  # a trial takes it apart
        return replace(in_torch, loaded=kept, why_slow=str(error))
    return replace(
        in_torch,
        loaded=loaded,
        description=f"native matrices ({library.variant}), {description}",
        is_int8=is_int8,
    )


def _dequantized(compute: Compute) -> Compute:
    """Returns `compute` with plain weights: torch would dequantise others at each use."""
    model = compute.loaded.model
    if not dequantize_layers(model):
        return compute
    return replace(compute, loaded=replace(compute.loaded, weights_bytes=weights_bytes(model)))


def _because(compute: Compute) -> str:
    return "" if compute.why_slow is None else f" ({compute.why_slow})"


# -- Choice on a CPU: native kernels that attend, multiply and draw, or a native decoder -----------


def compute_on_cpu(
    load: Callable[[], LoadedModel],
    loaded: LoadedModel,
    block_size: int,
    *,
    is_int8: bool,
    is_exact: bool = False,
) -> Compute:
    """Returns native kernels, or the native decoder, for `loaded`; `load` loads it again.

    `is_exact`: activations are never rounded to 8 bits. Raises BuildFailed or BackendUnavailable if
    native kernels cannot be used, TrialFailed if their attention computes something else. Other
    parts that fail their trial are left to `transformers`.
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
            return _native_decoder(loaded, library, block_size, is_int8=is_int8, is_exact=is_exact)
        except TrialFailed as error:
            why_slow = log_decoder_refused("native", loaded, error, PRICE_OF_NO_DECODER)
            loaded = load()  # the trial took it apart
    else:
        log_not_used("native_decoder", loaded, reason, "native attention")
    description = f"native attention ({library.variant})"
    draw, is_packed = native_draw(library), True
    try:
        loaded = pack_linears(loaded, library, is_int8=is_int8, is_exact=is_exact)
        description = f"native attention and matrices ({library.variant})"
    except TrialFailed as error:
        log_matrices_refused(loaded, error, PRICE_OF_TORCH_ON_CPU)
        loaded, is_packed, why_slow = load(), False, str(error)
    make_model = attending_with(backend)
    is_int8 &= is_packed
    compute = Compute(
        loaded, make_model, description, block_size, draw, is_int8=is_int8, why_slow=why_slow
    )
    return _dequantized(compute)


def native_draw(library: NativeLibrary) -> Draw:
    """Returns a draw for logits on the CPU, equal to `draw_in_torch` and many times faster."""

    def draw(adjusted: Tensor, rows: SamplingRows) -> Tensor:
        return choose_tokens(library, adjusted, draw_rows(rows, adjusted.shape[1]))

    return draw


def _native_decoder(
    loaded: LoadedModel,
    library: NativeLibrary,
    block_size: int,
    *,
    is_int8: bool,
    is_exact: bool,
) -> Compute:
    native = build_native_model(loaded, library, is_int8=is_int8, is_exact=is_exact)
    return native_compute(loaded, native, library, block_size, is_int8=is_int8)


def native_compute(
    loaded: LoadedModel,
    native: NativeModel,
    library: NativeLibrary,
    block_size: int,
    *,
    is_int8: bool,
) -> Compute:
    """Returns `native`, which passed its trials, as the code that runs `loaded`."""
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
        native=native,
    )


# -- Choice on a GPU: attention, tried and timed, and our own decoder around it --------------------
#
# The reasons are in docs/adr/0007-gpu-backends.md.


# Returns the seconds that a model's attention takes with a backend and a block size.
TimeAttention = Callable[[AttentionBackend, LoadedModel, int], float]


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """A chosen attention backend, on blocks of `block_size` tokens."""

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
    """Returns the fastest of the `candidates` that compute what plain torch does.

    The first usable candidate is the default if they cannot be timed. `only`: name of the only
    candidate allowed; None for any. `block_size`: None for the default. Raises BackendUnavailable
    if no candidate can serve, TrialFailed if one computed something else.
    """
    usable = []
    refusal: BackendUnavailable | TrialFailed = BackendUnavailable("unknown backend")
    for candidate in candidates:
        if only not in (None, candidate.name):
            continue
        try:
            is_named = only is not None
            # Large blocks make cached prefixes coarse, so they are never chosen for their speed.
            size = block_size or (candidate.block_size if is_named else DEFAULT_BLOCK_SIZE)
            usable.append(_try(candidate, loaded, size, is_named=is_named))
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
        # The usual cause is too little memory.
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
    """Returns Triton kernels for `loaded`, on a GPU or where Triton is interpreted.

    `load` loads the model again. `only`, `block_size` and errors are as in `choose_gpu_attention`,
    `flash_attention_3` as in `gpu_candidates`.
    """
    chosen = choose_gpu_attention(loaded, only, block_size, gpu_candidates(flash_attention_3))
    draw = choose_gpu_draw(loaded.vocab_size, loaded.device)
    choose_adding = cache(partial(choose_gpu_adding, loaded.dtype, loaded.device))
    compute = Compute(
        loaded,
        attending_with(chosen.backend, choose_adding),
        f"{chosen.name} attention",
        chosen.block_size,
        draw,
        choose_gpu_copy(loaded.device),
        is_recordable=loaded.device.type == "cuda"
        and not loaded.has_encoder
        and loaded.vectors is None,
        adjust=choose_gpu_adjust(loaded.vocab_size, loaded.device),
        static_draw=static_draw_of(draw),
    )
    reason = why_not_llama(loaded)
    if reason is None:
        decoder = _gpu_decoder(loaded, chosen)
        if not isinstance(decoder, str):
            return _with_decoder(compute, decoder, choose_adding)
        # Memory need not hold the model twice. (The error no longer references its parts either.)
        release_weights(loaded.model)
        release_cached_memory(loaded.device)
        compute = replace(compute, loaded=load(), why_slow=decoder)
    else:
        log_not_used("gpu_decoder", loaded, reason, compute.description)
    return _with_packed_linears(load, compute)


def _with_packed_linears(load: Callable[[], LoadedModel], compute: Compute) -> Compute:
    if not quantized_linears(compute.loaded.model):
        return compute
    try:
        return replace(compute, loaded=pack_linears_on_gpu(compute.loaded))
    except TrialFailed as error:
        log_matrices_refused(compute.loaded, error, PRICE_OF_NO_PACKED_MATRICES)
        release_weights(compute.loaded.model)
        release_cached_memory(compute.loaded.device)
        return _dequantized(replace(compute, loaded=load(), why_slow=str(error)))


def _gpu_decoder(loaded: LoadedModel, chosen: GpuAttention) -> GpuDecoder | str:
    """Returns the decoder, or the reason for its refusal, after which the model may be lost."""
    # The import needs Triton.
    from executor_service.decoders.gpu_decoder import build_gpu_decoder

    try:
        return build_gpu_decoder(loaded, chosen.backend, chosen.block_size)
    except TrialFailed as error:
        return log_decoder_refused("gpu", loaded, error, PRICE_OF_NO_GPU_DECODER)


def _with_decoder(compute: Compute, decoder: GpuDecoder, choose_adding: ChooseAdding) -> Compute:
    from executor_service.decoders.gpu_decoder import GpuDecoderModel, decoder_slots

    def make_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
        return GpuDecoderModel(decoder, cache, decoder_slots(loaded, choose_adding))

    return replace(
        compute,
        loaded=replace(compute.loaded, weights_bytes=decoder.num_bytes),
        make_model=make_model,
        description=f"GPU decoder, {compute.description}",
    )


# -- Choice for a single layer on a CPU, outside a model of `transformers` -------------------------

# Multiplies rows [T, inputs] with a matrix: [T, outputs].
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerCompute:
    """Code for one layer. `linear`: makes a Linear of a weight [outputs, inputs].

    `description`: for people.
    """

    attention: AttentionBackend
    linear: Callable[[Tensor], Linear]
    description: str


def choose_layer_compute(
    kind: LayerKind, dtype: torch.dtype, name: str, block_size: int
) -> LayerCompute:
    """Returns native kernels if they attend as plain torch does, otherwise plain torch.

    `name`: a value of --attention-backend. `block_size`: of the pools.
    """
    in_torch = LayerCompute(reference, _linear_in_torch, "torch")
    reason = why_not_native_attention((kind.layer.key_dim, kind.layer.value_dim), dtype)
    if name == TORCH or reason is not None:
        return in_torch
    try:
        library = load_library()
        backend = NativeAttention(library)
        try_layer(backend, kind, block_size, dtype, torch.device("cpu"))
    except (BuildFailed, BackendUnavailable, TrialFailed) as error:
        _log.warning("native_layer_refused reason=%r: using plain torch", str(error))
        return in_torch

    def native_linear(weight: Tensor) -> Linear:
        if weight.shape[1] % 2:
            return _linear_in_torch(weight)
        packed = pack(library, WeightRows.of(weight))
        return lambda rows: linear(library, packed, rows)

    return LayerCompute(backend, native_linear, f"native kernels ({library.variant})")


def _linear_in_torch(weight: Tensor) -> Linear:
    return lambda rows: F.linear(rows, weight)
