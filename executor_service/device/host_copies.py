"""What crosses between host and device while a step is asked for.

On a GPU a copy to the host waits for everything asked before it, unless nobody reads it yet. So a
step makes one, and reads it when it is finished.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return HostCopy(tensors, Tensor.cpu).arrays()


class HostCopy:
    """Tensors of one device, of 32-bit or of boolean numbers, on their way to the host."""

    def __init__(self, tensors: tuple[Tensor, ...], copy: Callable[[Tensor], Tensor]) -> None:
        """`copy` brings one tensor to the host; it is called once, and not for nothing."""
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if len(tensors) > 1:
            words = [_as_words(tensor).flatten() for tensor in tensors]
            self._copied = copy(torch.cat(words))
        elif tensors:
            self._copied = copy(tensors[0])

    def arrays(self) -> tuple[Array, ...]:
        """The tensors; to be asked for when what copies has done so."""
        if len(self._kinds) == 1:
            return (self._copied.numpy(),)
        arrays, start = [], 0
        for shape, dtype in self._kinds:
            end = start + shape.numel()
            is_bool = dtype == torch.bool
            part = self._copied[start:end].view(torch.int32 if is_bool else dtype)
            arrays.append(part.view(shape).to(dtype).numpy())
            start = end
        return tuple(arrays)


def _as_words(tensor: Tensor) -> Tensor:
    """Its bits as 32-bit numbers."""
    numbers = tensor.int() if tensor.dtype == torch.bool else tensor
    return numbers.contiguous().view(torch.int32)
