"""Which kernels beside attention serve on a GPU: those of Triton that pass their trial.

The reasons are in docs/adr/0007-gpu-backends.md.
"""

from __future__ import annotations

import torch

from executor_service.copy_check import check_copy
from executor_service.draw_check import check_draw
from executor_service.kernel_trial import tried
from executor_service.kv_cache import CopyBlocks, copy_in_torch
from executor_service.sampler import Draw, draw_in_torch


def choose_gpu_draw(vocab_size: int, device: torch.device) -> Draw:
    """The Triton kernel, or plain torch where it chooses other tokens."""

    def make() -> Draw:
        # It needs Triton already when it is imported.
        from executor_service.gpu_sampler import triton_draw

        return triton_draw

    def check(draw: Draw) -> None:
        check_draw(draw, vocab_size, device)

    in_torch: Draw = draw_in_torch
    return tried("sampling", make, check, in_torch)


def choose_gpu_copy(device: torch.device) -> CopyBlocks:
    """The Triton kernel, or plain torch where it copies something else."""

    def make() -> CopyBlocks:
        from splitserve_kernels.gpu.block_copy import copy_blocks

        return copy_blocks

    in_torch: CopyBlocks = copy_in_torch
    return tried("block_copy", make, lambda copy: check_copy(copy, device), in_torch)
