"""Which code computes a model: the fastest there is that computes the same as plain torch.

On a GPU: attention in Triton or by flash-attn, and for models of the Llama kind a decoder of our
own around it. On the CPU: native kernels, with the whole decoder in one call for these models.
Whatever is chosen was tried on this machine first; what fails its trial is refused, loudly. What
was not made for a model is one line at INFO, which says what serves it instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from executor_service.attention import AttentionBackend
from executor_service.attention_check import BackendWrong, check_backend
from executor_service.decoder_model import Decoder, DecoderModel
from executor_service.device_errors import release_cached_memory
from executor_service.errors import BackendUnavailable
from executor_service.gpu_attention import (
    CANDIDATES,
    DEFAULT_BLOCK_SIZE,
    GpuAttention,
    choose_gpu_attention,
)
from executor_service.gpu_kernels import choose_gpu_copy, choose_gpu_draw
from executor_service.kv_cache import CopyBlocks, KVCache, copy_in_torch
from executor_service.llama_parts import release, why_not_llama
from executor_service.loaded_model import LoadedModel
from executor_service.memory import MakeModel, torch_model
from executor_service.native_model import build_native_model, why_not_native
from executor_service.native_sampler import native_draw
from executor_service.packed_linears import pack_linears
from executor_service.paged_model import PagedModel, TransformersModel
from executor_service.sampler import Draw, draw_in_torch
from executor_service.self_check import ReplacementWrong
from splitserve_kernels.cpu.attention import NativeAttention, why_not_native_attention
from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.cpu.library import NativeLibrary, load_library

_log = logging.getLogger(__name__)
# An operator can mend a build, and has to know of a kernel that is wrong on this machine.
_LEVELS = {
    BackendUnavailable: logging.INFO,
    BuildFailed: logging.WARNING,
    BackendWrong: logging.ERROR,
}


class AttentionBackendName(Enum):
    """What attends.

    AUTO: the fastest that passes its trial. TORCH: plain torch. NATIVE: compiled CPU kernels.
    TRITON: our GPU kernels. FLASH_ATTN: the package flash-attn, on a GPU.
    """

    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"
    FLASH_ATTN = "flash-attn"


@dataclass(frozen=True, slots=True)
class Compute:
    """`make_model` makes what runs `loaded`, `draw` chooses tokens. `description`: for people.

    `block_size`: tokens of a KV block. `copy_blocks`: copies them within the device pool.
    `is_batch_invariant`: a sequence's logits are the same bits whatever shares its batch, and
    however its tokens are cut into steps. `is_int8`: matrices are rounded to 8 bits.
    `is_recordable`: a CUDA graph can record its decodes.
    """

    loaded: LoadedModel
    make_model: MakeModel
    description: str
    block_size: int
    draw: Draw = draw_in_torch
    copy_blocks: CopyBlocks = copy_in_torch
    is_batch_invariant: bool = False
    is_int8: bool = False
    is_recordable: bool = False


def choose_compute(
    load: Callable[[], LoadedModel],
    name: AttentionBackendName,
    block_size: int | None,
    *,
    is_deterministic: bool = False,
    is_int8: bool = False,
) -> Compute:
    """Loads the model and decides what runs it.

    `block_size`: None for what suits the backend best. `is_deterministic`: it must be batch
    invariant. `is_int8`: its matrices are rounded to 8 bits. Raises BackendUnavailable if these
    cannot be had, or if `name` is not AUTO and cannot.
    """
    compute = _choose(load, name, block_size, is_int8=is_int8)
    if is_int8 and not compute.is_int8:
        raise BackendUnavailable(
            f"quantization int8: {compute.loaded.architecture} runs with {compute.description};"
            " allowed: float32 or bfloat16 on a CPU, with --attention-backend auto or native"
        )
    if is_deterministic and not compute.is_batch_invariant:
        raise BackendUnavailable(
            f"deterministic: {compute.loaded.architecture} runs with {compute.description}, whose"
            " results depend on the batch; allowed: what the native decoder of CPUs runs"
        )
    description = f"{compute.description}, int8" if is_int8 else compute.description
    # Nothing will replace the model any more.
    loaded = replace(compute.loaded, probe=None)
    return replace(compute, loaded=loaded, description=description)


def _choose(
    load: Callable[[], LoadedModel],
    name: AttentionBackendName,
    block_size: int | None,
    *,
    is_int8: bool,
) -> Compute:
    loaded = load()
    in_torch = Compute(loaded, torch_model, "torch", block_size or DEFAULT_BLOCK_SIZE)
    if name is AttentionBackendName.TORCH:
        return in_torch
    is_for_cpu = loaded.device.type == "cpu"
    if name is not AttentionBackendName.AUTO and is_for_cpu != (
        name is AttentionBackendName.NATIVE
    ):
        raise BackendUnavailable(f"{name.value}: not for {loaded.device.type}")
    try:
        if is_for_cpu:
            return _native(load, loaded, block_size or DEFAULT_BLOCK_SIZE, is_int8=is_int8)
        only = None if name is AttentionBackendName.AUTO else name.value
        return compute_on_gpu(load, loaded, only, block_size)
    except (BuildFailed, BackendWrong, BackendUnavailable) as error:
        if name is not AttentionBackendName.AUTO:
            raise BackendUnavailable(f"{name.value}: {error}") from error
        message = "attention_backends_refused device=%s reason=%r: plain torch serves"
        _log.log(_LEVELS[type(error)], message, loaded.device.type, str(error))
        return in_torch


def _native(
    load: Callable[[], LoadedModel], loaded: LoadedModel, block_size: int, *, is_int8: bool
) -> Compute:
    for layer in loaded.layers:
        reason = why_not_native_attention((layer.key_dim, layer.value_dim), loaded.dtype)
        if reason is not None:
            raise BackendUnavailable(reason)
    library = load_library()
    backend = NativeAttention(library)
    check_backend(backend, loaded, block_size)
    reason = why_not_native(loaded)
    if reason is None:
        try:
            return _native_decoder(loaded, library, block_size, is_int8=is_int8)
        except ReplacementWrong as error:
            reason = str(error)
            _log.error("native_decoder_refused model=%s reason=%r", loaded.architecture, reason)
            loaded = load()  # the trial took it apart
    else:
        _log_not_used("native_decoder", loaded, reason, "native attention")
    description = f"native attention ({library.variant})"
    draw, is_packed = native_draw(library), True
    try:
        loaded = pack_linears(loaded, library, is_int8=is_int8)
        description = f"native attention and matrices ({library.variant})"
    except ReplacementWrong as error:
        _log.error("packed_matrices_refused model=%s reason=%r", loaded.architecture, str(error))
        loaded, is_packed = load(), False
    make_model = attending_with(backend)
    is_int8 &= is_packed
    return Compute(loaded, make_model, description, block_size, draw, is_int8=is_int8)


def _native_decoder(
    loaded: LoadedModel, library: NativeLibrary, block_size: int, *, is_int8: bool
) -> Compute:
    native = build_native_model(loaded, library, is_int8=is_int8)
    loaded = replace(loaded, weights_bytes=native.num_bytes)

    def make_model(_loaded: LoadedModel, cache: KVCache) -> PagedModel:
        return DecoderModel(native, cache)

    return Compute(
        loaded,
        make_model,
        f"native decoder ({library.variant})",
        block_size,
        native_draw(library),
        is_batch_invariant=True,
        is_int8=is_int8,
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
        _log_not_used("gpu_decoder", loaded, reason, compute.description)
        return compute
    decoder = _gpu_decoder(loaded, chosen)
    if decoder is not None:
        return _with_decoder(compute, decoder)
    # Memory need not hold the model twice. (By now the error does not hold on to its parts either.)
    release(loaded.model)
    release_cached_memory(loaded.device)
    return replace(compute, loaded=load())


def _gpu_decoder(loaded: LoadedModel, chosen: GpuAttention) -> Decoder | None:
    """None if it was refused; the model may be lost then."""
    # It needs Triton already when it is imported.
    from executor_service.gpu_decoder import build_gpu_decoder

    try:
        return build_gpu_decoder(loaded, chosen.backend, chosen.block_size)
    except ReplacementWrong as error:
        _log.error("gpu_decoder_refused model=%s reason=%r", loaded.architecture, str(error))
        return None


def _log_not_used(what: str, loaded: LoadedModel, reason: str, instead: str) -> None:
    """One line, not urgent: `what` is not made for the model, which is served well without it."""
    _log.info(
        "%s_not_used model=%s reason=%r: %s serves", what, loaded.architecture, reason, instead
    )


def _with_decoder(compute: Compute, decoder: Decoder) -> Compute:
    return replace(
        compute,
        loaded=replace(compute.loaded, weights_bytes=decoder.num_bytes),
        make_model=lambda _loaded, cache: DecoderModel(decoder, cache),
        description=f"GPU decoder, {compute.description}",
    )


def attending_with(backend: AttentionBackend) -> MakeModel:
    """Makes the model as `transformers` has it, attending by `backend`."""
    return lambda loaded, cache: TransformersModel(loaded, cache, backend)
