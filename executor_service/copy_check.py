"""Tries what copies blocks within the device pool; see kv_cache.py."""

from __future__ import annotations

import torch

from executor_service.kernel_trial import KernelWrong
from executor_service.kv_cache import CopyBlocks, copy_in_torch

_NUM_BLOCKS = 40
# No multiple of what a program copies.
_NUM_WORDS = 9001


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
