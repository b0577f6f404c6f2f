"""What crosses between host and device while a step samples.

On a GPU a copy to the host waits for everything asked before it, so a step makes as few as it can.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def to_device(array: Array, device: torch.device) -> Tensor:
    """`array` on `device`. Waits for nothing that was asked of the device before."""
    # Of memory that is not pinned, what is to be copied has been read when this returns.
    return torch.from_numpy(array).to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> tuple[Array, ...]:
    """`tensors` of one device, of 32-bit or of boolean numbers, in one copy; waits for it."""
    if len(tensors) == 1:
        return (tensors[0].cpu().numpy(),)
    words = [(t.int() if t.dtype == torch.bool else t).contiguous() for t in tensors]
    packed = torch.cat([word.view(torch.int32).flatten() for word in words]).cpu().numpy()
    arrays, start = [], 0
    for tensor, word in zip(tensors, words, strict=True):
        part = packed[start : start + word.numel()]
        array = torch.from_numpy(part).view(word.dtype).view(word.shape).to(tensor.dtype)
        arrays.append(array.numpy())
        start += word.numel()
    return tuple(arrays)
