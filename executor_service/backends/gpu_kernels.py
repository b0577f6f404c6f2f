"""Which kernels beside attention serve on a GPU: those of Triton that pass their trial.

The reasons are in docs/adr/0007-gpu-backends.md.
"""

from __future__ import annotations

import torch

from executor_service.backends.draw_trial import check_draw
from executor_service.backends.trial import KernelWrong, tried
from executor_service.device.kv_cache import CopyBlocks, copy_in_torch
from executor_service.sampling.sampler import Draw, draw_in_torch

_NUM_BLOCKS = 40
# No multiple of what a program copies.
_NUM_WORDS = 9001


def choose_gpu_draw(vocab_size: int, device: torch.device) -> Draw:
    """The Triton kernel, or plain torch where it chooses other tokens."""

    def make() -> Draw:
        # It needs Triton already when it is imported.
        from executor_service.backends.gpu_draw import triton_draw

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


@torch.inference_mode()
def check_copy(copy: CopyBlocks, device: torch.device) -> None:
    """Copies random blocks by `copy` and in plain torch. Raises KernelWrong if bits differ."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2**62, (_NUM_BLOCKS, _NUM_WORDS), generator=generator).to(device)
    order = torch.randperm(_NUM_BLOCKS, generator=generator).to(device)
    sources, destinations = order[:10].repeat(2), order[10:30]
    expected, actual = bits.clone(), bits.clone()
    copy_in_torch(expected, sources, destinations)
    copy(actual, sources, destinations)
    wrong = (actual != expected).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise KernelWrong(f"{len(wrong)} of {_NUM_BLOCKS} blocks hold something else")
