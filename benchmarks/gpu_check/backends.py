"""The attention backends that can run here."""

from __future__ import annotations

import importlib

from splitserve_kernels.gpu.attention.flash_attention_rules import PAGE_SIZE, why_no_flash_attention
from splitserve_kernels.gpu.availability import why_unavailable
from splitserve_kernels.paged_batch import AttentionBackend


def gpu_backends() -> dict[str, tuple[AttentionBackend, int]]:
    """By name, with the block size that each is measured with."""
    backends: dict[str, tuple[AttentionBackend, int]] = {}
    if why_unavailable() is None:
        from splitserve_kernels.gpu.attention import backend

        backends["triton"] = (backend, 16)
        if why_no_flash_attention() is None:
            from splitserve_kernels.gpu.attention.flash_attention import FlashAttention

            package = importlib.import_module("flash_attn")
            backends["flash-attn"] = (FlashAttention(package), PAGE_SIZE)
    return backends


def why_absent() -> dict[str, str]:
    """The backends that cannot run here, and why."""
    reasons = {"triton": why_unavailable(), "flash-attn": why_no_flash_attention()}
    return {name: reason for name, reason in reasons.items() if reason is not None}
