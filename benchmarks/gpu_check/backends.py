"""The attention backends that can run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu_check.sizes import Sizes
from executor_service.backends.attention_candidates import (
    CANDIDATES,
    DEFAULT_BLOCK_SIZE,
    Candidate,
)
from executor_service.device.kv_cache import LayerShape
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions

TRITON, FLASH_ATTENTION_3 = "triton", "flash-attn-3"


def present_backends() -> list[Candidate]:
    """Those that can run here; each is measured with the block size that is its own choice."""
    return [candidate for candidate in all_backends() if candidate.why_absent() is None]


def timed_backends(sizes: Sizes) -> list[Candidate]:
    """Those that are timed. On a CPU nothing is to be learned of interpreted kernels' time."""
    return present_backends() if sizes.device.type == "cuda" else [_plain_torch()]


def why_not(
    candidate: Candidate,
    layer: LayerShape,
    options: AttentionOptions,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> str | None:
    """What keeps a backend from such layers, on blocks of its choice; None if nothing does."""
    if kv_dtype != dtype and not candidate.mixes_dtypes:
        return f"{candidate.name} takes no {kv_dtype} keys and values"
    return candidate.why_not_layer(layer, options, dtype, candidate.block_size)


def all_backends() -> Sequence[Candidate]:
    """Whether they can run here or not; the first that can serve is the default."""
    return CANDIDATES


def why_absent() -> dict[str, str]:
    """The backends that cannot run here, and why."""
    reasons = {candidate.name: candidate.why_absent() for candidate in all_backends()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _plain_torch() -> Candidate:
    triton = next(each for each in all_backends() if each.name == TRITON)
    return replace(
        triton,
        name="torch",
        block_size=DEFAULT_BLOCK_SIZE,
        make=_reference,
        why_absent=lambda: None,
        mixes_dtypes=False,
    )


def _reference() -> AttentionBackend:
    return reference
