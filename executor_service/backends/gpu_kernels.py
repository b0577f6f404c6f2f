"""Choice of GPU kernels beside attention: those of Triton that pass their trial.

The reasons are in docs/adr/0007-gpu-backends.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from executor_service.device import CopyBlocks, copy_in_torch
from executor_service.errors import TrialFailed
from executor_service.model import AddLowRank
from executor_service.sampling import (
    Adjust,
    Draw,
    StaticDraw,
    adjust_in_torch,
    draw_unseen_in_torch,
)
from executor_service.trials import trial_failures, try_adjust, try_copy, try_draw, try_low_rank

_log = logging.getLogger(__name__)
_Kernel = TypeVar("_Kernel")


def choose_gpu_draw(vocab_size: int, device: torch.device) -> Draw:
    """Returns the Triton kernel, or plain torch if the kernel chooses other tokens."""

    def make() -> Draw:
        # The import needs Triton.
        from executor_service.backends.gpu_draw import triton_draw

        return triton_draw

    def trial(draw: Draw) -> None:
        try_draw(draw, vocab_size, device)

    in_torch: Draw = draw_unseen_in_torch
    return tried_kernel("sampling", make, trial, in_torch)


def choose_gpu_adjust(vocab_size: int, device: torch.device) -> Adjust:
    """Returns the Triton kernel, or plain torch if the kernel changes logits differently."""

    def make() -> Adjust:
        from executor_service.backends.gpu_draw import triton_adjust

        return triton_adjust

    def trial(adjust: Adjust) -> None:
        try_adjust(adjust, vocab_size, device)

    in_torch: Adjust = adjust_in_torch
    return tried_kernel("adjusting", make, trial, in_torch)


def static_draw_of(draw: Draw) -> StaticDraw | None:
    """Returns the draw for recordings that equals `draw`, a result of `choose_gpu_draw`.

    Returns None if there is none.
    """
    if draw is draw_unseen_in_torch:
        return None
    from executor_service.backends.gpu_draw import TritonStaticDraw

    return TritonStaticDraw()


def choose_gpu_copy(device: torch.device) -> CopyBlocks:
    """Returns the Triton kernel, or plain torch if the kernel copies something else."""

    def make() -> CopyBlocks:
        from splitserve_kernels.gpu.kv_write import copy_blocks

        return copy_blocks

    in_torch: CopyBlocks = copy_in_torch
    return tried_kernel("block_copy", make, lambda copy: try_copy(copy, device), in_torch)


def choose_gpu_adding(dtype: torch.dtype, device: torch.device) -> AddLowRank | None:
    """Returns the Triton kernels for adapters; None if they compute something else.

    Models of `transformers` then apply adapters in plain torch, and the GPU decoder takes none.
    """

    def make() -> AddLowRank | None:
        from splitserve_kernels.gpu.low_rank import add_low_rank

        return add_low_rank

    def trial(add: AddLowRank | None) -> None:
        assert add is not None, "it was made"
        try_low_rank(add, dtype, device)

    return tried_kernel("adapters", make, trial, None)


def tried_kernel(
    name: str,
    make: Callable[[], _Kernel],
    trial: Callable[[_Kernel], None],
    in_torch: _Kernel,
) -> _Kernel:
    """Returns the kernel that `make` makes, if it passes `trial`.

    If either raises, it logs an error and returns `in_torch`.
    """
    try:
        with trial_failures():
            kernel = make()
            trial(kernel)
    except TrialFailed as error:
        _log.error("kernel_refused kernel=%s reason=%r: using plain torch", name, str(error))
        return in_torch
    return kernel
