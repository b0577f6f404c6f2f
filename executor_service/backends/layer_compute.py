"""What computes a layer on a CPU that is no part of a model of `transformers`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from executor_service.backends.attention_trial import try_layer
from executor_service.backends.choose import TORCH
from executor_service.errors import BackendUnavailable, TrialFailed
from executor_service.model.loaded_model import LayerKind
from splitserve_kernels import reference
from splitserve_kernels.cpu.attention import NativeAttention, why_not_native_attention
from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.cpu.library import load_library
from splitserve_kernels.cpu.linear import WeightRows, linear, pack
from splitserve_kernels.paged_batch import AttentionBackend

# Multiplies rows [T, inputs] with a matrix: [T, outputs].
Linear = Callable[[Tensor], Tensor]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerCompute:
    """`linear`: what multiplies with a weight [outputs, inputs]. `description`: for people."""

    attention: AttentionBackend
    linear: Callable[[Tensor], Linear]
    description: str


def choose_layer_compute(
    kind: LayerKind, dtype: torch.dtype, name: str, block_size: int
) -> LayerCompute:
    """Native kernels, if they attend as plain torch does, and that if not.

    `name`: as --attention-backend takes it. `block_size`: of the pools.
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
        _log.warning("native_layer_refused reason=%r: plain torch serves", str(error))
        return in_torch

    def native_linear(weight: Tensor) -> Linear:
        if weight.shape[1] % 2:
            return _linear_in_torch(weight)
        packed = pack(library, WeightRows.of(weight))
        return lambda rows: linear(library, packed, rows)

    return LayerCompute(backend, native_linear, f"native kernels ({library.variant})")


def _linear_in_torch(weight: Tensor) -> Linear:
    return lambda rows: F.linear(rows, weight)
