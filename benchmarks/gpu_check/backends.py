"""The attention backends that can run here."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu_check.sizes import Sizes
from executor_service.backends.attention_candidates import (
    CANDIDATES,
    DEFAULT_BLOCK_SIZE,
    Candidate,
)
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionBackend

TRITON, FLASH_ATTENTION_3 = "triton", "flash-attn-3"


def present_backends() -> list[Candidate]:
    """Those that can run here; each is measured with the block size that is its own choice."""
    return [candidate for candidate in CANDIDATES if candidate.why_absent() is None]


def timed_backends(sizes: Sizes) -> list[Candidate]:
    """Those that are timed. On a CPU nothing is to be learned of interpreted kernels' time."""
    return present_backends() if sizes.device.type == "cuda" else [_plain_torch()]


def why_absent() -> dict[str, str]:
    """The backends that cannot run here, and why."""
    reasons = {candidate.name: candidate.why_absent() for candidate in CANDIDATES}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _plain_torch() -> Candidate:
    triton = next(each for each in CANDIDATES if each.name == TRITON)
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
