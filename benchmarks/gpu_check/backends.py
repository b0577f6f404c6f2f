"""The attention backends that can run here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu_check.part_process import FLASH_ATTENTION_3_FROM
from benchmarks.gpu_check.sizes import Sizes
from executor_service.backends import Candidate, LayerDemand, gpu_candidates
from executor_service.device import LayerShape
from splitserve_kernels import reference
from splitserve_kernels.gpu.attention.flash_attention_3_op import INSTALLED
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions

TRITON, FLASH_ATTENTION_3 = "triton", "flash-attn-3"


def flash_attention_3_source() -> str:
    """Where that is from, as --flash-attn-3-from takes it."""
    return os.environ.get(FLASH_ATTENTION_3_FROM) or INSTALLED


def all_backends() -> Sequence[Candidate]:
    """Whether they can run here or not; the first that can serve is the default."""
    return gpu_candidates(flash_attention_3_source())


def present_backends() -> list[Candidate]:
    """Those that can run here."""
    return [candidate for candidate in all_backends() if candidate.why_absent() is None]


def timed_backends(sizes: Sizes) -> list[Candidate]:
    """Those that are timed. On a CPU nothing is to be learned of interpreted kernels' time."""
    return present_backends() if sizes.device.type == "cuda" else [_plain_torch()]


def why_absent() -> dict[str, str]:
    """The backends that cannot run here, and why."""
    reasons = {candidate.name: candidate.why_absent() for candidate in all_backends()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def why_not(
    candidate: Candidate,
    layer: LayerShape,
    options: AttentionOptions,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> str | None:
    """What keeps a backend from such layers, on its own blocks; None if nothing does."""
    demand = LayerDemand(layer, options, dtype, kv_dtype, candidate.block_size)
    return candidate.why_not_layer(demand)


def _plain_torch() -> Candidate:
    triton = next(each for each in all_backends() if each.name == TRITON)
    return replace(triton, name="torch", make=_reference, why_absent=lambda: None)


def _reference() -> AttentionBackend:
    return reference
