"""Which code computes a model: the fastest there is that computes the same as plain torch.

On a GPU: attention in Triton. On the CPU: native kernels, with the whole decoder in one call for
models of the Llama kind. Whatever is chosen was tried on this machine first; what fails its trial
is refused, loudly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from executor_service.attention import AttentionBackend
from executor_service.attention_check import BackendWrong, check_backend
from executor_service.errors import BackendUnavailable
from executor_service.kv_cache import KVCache, LayerShape
from executor_service.loaded_model import LoadedModel
from executor_service.memory import MakeModel, torch_model
from executor_service.native_model import NativePagedModel, build_native_model, why_not_native
from executor_service.native_sampler import native_draw
from executor_service.paged_model import PagedModel, TransformersModel
from executor_service.sampler import Draw, draw_in_torch
from executor_service.self_check import ReplacementWrong
from splitserve_kernels.cpu.attention import NativeAttention, why_not_native_attention
from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.cpu.library import NativeLibrary, load_library
from splitserve_kernels.gpu.availability import why_unavailable

_log = logging.getLogger(__name__)


class AttentionBackendName(Enum):
    """What attends.

    AUTO: the fastest that passes its trial. TORCH: plain torch. NATIVE: compiled CPU kernels.
    TRITON: GPU kernels.
    """

    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


@dataclass(frozen=True, slots=True)
class Compute:
    """`make_model` makes what runs `loaded`, `draw` chooses tokens. `description`: for people.

    `is_batch_invariant`: a sequence's logits are the same bits whatever shares its batch, and
    however its tokens are cut into steps.
    """

    loaded: LoadedModel
    make_model: MakeModel
    description: str
    draw: Draw = draw_in_torch
    is_batch_invariant: bool = False


def choose_compute(
    load: Callable[[], LoadedModel],
    name: AttentionBackendName,
    block_size: int,
    *,
    is_deterministic: bool = False,
) -> Compute:
    """Loads the model and decides what runs it.

    `is_deterministic`: it must be batch invariant. Raises BackendUnavailable if that cannot be had,
    or if `name` is not AUTO and cannot.
    """
    compute = _choose(load, name, block_size)
    if is_deterministic and not compute.is_batch_invariant:
        raise BackendUnavailable(
            f"deterministic: {compute.loaded.architecture} runs with {compute.description}, whose"
            " results depend on the batch; allowed: what the native decoder of CPUs runs"
        )
    return compute


def _choose(
    load: Callable[[], LoadedModel], name: AttentionBackendName, block_size: int
) -> Compute:
    loaded = load()
    if name is AttentionBackendName.TORCH:
        return Compute(loaded, torch_model, "torch")
    fastest = AttentionBackendName.TRITON
    if loaded.device.type == "cpu":
        fastest = AttentionBackendName.NATIVE
    if name not in (AttentionBackendName.AUTO, fastest):
        raise BackendUnavailable(f"{name.value}: not for {loaded.device.type}")
    try:
        if fastest is AttentionBackendName.NATIVE:
            return _native(load, loaded, block_size)
        return _triton(loaded, block_size)
    except (BuildFailed, BackendWrong, BackendUnavailable) as error:
        if name is fastest:
            raise BackendUnavailable(f"{name.value}: {error}") from error
        level = logging.ERROR if isinstance(error, BackendWrong) else logging.WARNING
        message = "attention_backend_refused backend=%s reason=%r: serving with plain torch"
        _log.log(level, message, fastest.value, str(error))
        return Compute(loaded, torch_model, "torch")


def _native(load: Callable[[], LoadedModel], loaded: LoadedModel, block_size: int) -> Compute:
    for layer in loaded.layers:
        reason = why_not_native_attention((layer.key_dim, layer.value_dim), loaded.dtype)
        if reason is not None:
            raise BackendUnavailable(reason)
    library = load_library()
    backend = NativeAttention(library)
    _check(backend, loaded, block_size)
    reason = why_not_native(loaded)
    if reason is None:
        try:
            return _native_decoder(loaded, library)
        except ReplacementWrong as error:
            reason = str(error)
            _log.error("native_decoder_refused model=%s reason=%r", loaded.architecture, reason)
            loaded = load()  # the trial took it apart
    _log.info("native_decoder_not_used model=%s reason=%r", loaded.architecture, reason)
    description = f"native attention ({library.variant})"
    return Compute(loaded, _attending_with(backend), description, native_draw(library))


def _triton(loaded: LoadedModel, block_size: int) -> Compute:
    reason = why_unavailable()
    if reason is not None:
        raise BackendUnavailable(reason)
    # It needs Triton already when it is imported.
    from splitserve_kernels.gpu import backend

    _check(backend, loaded, block_size)
    return Compute(loaded, _attending_with(backend), "triton attention")


def _check(backend: AttentionBackend, loaded: LoadedModel, block_size: int) -> None:
    for layer, num_heads, window in _distinct_layers(loaded):
        check_backend(
            backend,
            layer,
            num_heads,
            block_size,
            window,
            loaded.dtype,
            loaded.device,
            loaded.kv_dtype,
        )


def _native_decoder(loaded: LoadedModel, library: NativeLibrary) -> Compute:
    native = build_native_model(loaded, library)

    def make_model(_loaded: LoadedModel, cache: KVCache) -> PagedModel:
        return NativePagedModel(native, cache)

    description = f"native decoder ({library.variant})"
    return Compute(loaded, make_model, description, native_draw(library), is_batch_invariant=True)


def _distinct_layers(loaded: LoadedModel) -> set[tuple[LayerShape, int, int | None]]:
    """What is to be tried: each kind of layer, with its query heads and its window."""
    config: Any = loaded.model.config
    num_heads = int(config.get_text_config(decoder=True).num_attention_heads)
    return {
        (layer, max(num_heads // layer.num_kv_heads, 1) * layer.num_kv_heads, window)
        for layer, window in zip(loaded.layers, loaded.layer_windows, strict=True)
    }


def _attending_with(backend: AttentionBackend) -> MakeModel:
    return lambda loaded, cache: TransformersModel(loaded, cache, backend)
