"""Which code computes a model: the fastest there is that computes the same as plain torch.

On a GPU: attention in Triton or by flash-attn 3, and for models of the Llama kind a decoder of our
own around it. On the CPU: native kernels, with the whole decoder in one call for these models.
Whatever is chosen was tried on this machine first; what fails its trial is refused, loudly. What
was not made for a class of models is one line at INFO, which says what serves it instead. Where a
model runs in slower code than others of its class, a warning says why and at what price.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from executor_service.backends.attention_candidates import DEFAULT_BLOCK_SIZE
from executor_service.backends.compute import PRICE_OF_TORCH_ON_CPU, PRICE_OF_TORCH_ON_GPU, Compute
from executor_service.backends.cpu import compute_on_cpu
from executor_service.backends.gpu import compute_on_gpu
from executor_service.errors import BackendUnavailable, TrialFailed
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import torch_model
from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.gpu.attention.flash_attention_3_sources import INSTALLED

# What --attention-backend takes beside the names of `attention_candidates.gpu_candidates`: the
# fastest that passes its trial, plain torch, and compiled CPU kernels.
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
    """Loads the model and decides what runs it.

    `name`: as --attention-backend takes it. `block_size`: None for what suits the backend best.
    `is_deterministic`: it must be batch invariant. `is_int8`: its matrices are rounded to 8 bits.
    `flash_attention_3`: where that is from, as --flash-attn-3-from takes it.
    Raises BackendUnavailable if these cannot be had, or if `name` is not AUTO and cannot.
    """
    compute = _choose(load, name, block_size, is_int8=is_int8, flash_attention_3=flash_attention_3)
    if is_int8 and not compute.is_int8:
        raise BackendUnavailable(
            f"quantization int8: {compute.loaded.architecture} runs with {compute.description}"
            f"{_because(compute)}; allowed: float32 or bfloat16 on a CPU, with --attention-backend"
            " auto or native"
        )
    if is_deterministic and not compute.is_batch_invariant:
        raise BackendUnavailable(
            f"deterministic: {compute.loaded.architecture} runs with {compute.description}, whose"
            f" results depend on the batch{_because(compute)}; allowed: what the native decoder of"
            " CPUs runs"
        )
    description = f"{compute.description}, int8" if is_int8 else compute.description
    # Nothing will replace the model any more.
    loaded = replace(compute.loaded, expected=None)
    return replace(compute, loaded=loaded, description=description)


def _choose(
    load: Callable[[], LoadedModel],
    name: str,
    block_size: int | None,
    *,
    is_int8: bool,
    flash_attention_3: str,
) -> Compute:
    loaded = load()
    in_torch = Compute(loaded, torch_model, "torch", block_size or DEFAULT_BLOCK_SIZE)
    if name == TORCH:
        return replace(in_torch, why_slow="--attention-backend torch asks for it")
    is_for_cpu = loaded.device.type == "cpu"
    if name != AUTO and is_for_cpu != (name == NATIVE):
        raise BackendUnavailable(f"{name}: not for {loaded.device.type}")
    try:
        if is_for_cpu:
            return compute_on_cpu(load, loaded, block_size or DEFAULT_BLOCK_SIZE, is_int8=is_int8)
        only = None if name == AUTO else name
        return compute_on_gpu(load, loaded, only, block_size, flash_attention_3)
    except (BuildFailed, TrialFailed, BackendUnavailable) as error:
        if name != AUTO:
            raise BackendUnavailable(f"{name}: {error}") from error
        # An operator has to know of a kernel that is wrong on this machine.
        level = logging.ERROR if isinstance(error, TrialFailed) else logging.WARNING
        message = "attention_backends_refused device=%s reason=%r price=%r: plain torch serves"
        price = PRICE_OF_TORCH_ON_CPU if is_for_cpu else PRICE_OF_TORCH_ON_GPU
        _log.log(level, message, loaded.device.type, str(error), price)
        return replace(in_torch, why_slow=str(error))


def _because(compute: Compute) -> str:
    return "" if compute.why_slow is None else f" ({compute.why_slow})"
