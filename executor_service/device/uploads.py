"""Arrays of a step on their way to the device: all in one copy, which nobody waits for.

What is copied has to lie in pinned memory: from other memory the driver may wait for all that the
device was asked before, and the host could not be a step ahead. Pinned buffers take turns. Each is
written again only when what was copied out of it has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_service.device.streams import DeviceStreams, Mark

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Of three steps, which may be on their way before the host waits: what rows there are, which of
# their logits are wanted, and whose tokens the step after awaits.
_NUM_BUFFERS = 3 * 3
_SMALLEST_BUFFER = 2**16
# Of each array. Kernels are compiled anew for pointers that are less aligned.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Numbers:
    """Some of each kind: `longs` become int64 tensors, `ints` int32 ones; of any shape."""

    longs: Sequence[Int64Array]
    ints: Sequence[Int32Array]

    @property
    def kinds(self) -> tuple[Sequence[Array], Sequence[Array]]:
        """Longs and ints."""
        return self.longs, self.ints

    @property
    def num_bytes(self) -> int:
        """What they take beside each other."""
        return sum(aligned(array.nbytes) for arrays in self.kinds for array in arrays)


@dataclass(slots=True)
class _Buffer:
    """`read`: when all that was copied out of it has been read; None if nothing ever was."""

    memory: Tensor
    read: Mark | None = None


class Uploads:
    """Copies to one device, in the order in which they are asked for."""

    def __init__(self, device: torch.device, streams: DeviceStreams) -> None:
        """Buffers are made when they are needed, and grow."""
        self._device = device
        self._streams = streams
        self._buffers = [_Buffer(torch.empty(0, dtype=torch.uint8)) for _ in range(_NUM_BUFFERS)]
        self._next = 0

    @property
    def shares_memory(self) -> bool:
        """Whether the device reads the memory of the host, so that nothing is copied."""
        return self._streams.shares_memory

    def send(self, numbers: Numbers) -> tuple[list[Tensor], list[Tensor]]:
        """`numbers` on the device, in memory of their own: longs and ints, shaped as they are.

        Where the device reads the host's memory, the arrays themselves: nobody may change them.
        """
        if self.shares_memory:
            longs, ints = ([torch.from_numpy(a) for a in arrays] for arrays in numbers.kinds)
            return longs, ints
        target = torch.empty(numbers.num_bytes, dtype=torch.uint8, device=self._device)
        self.send_to(target, numbers)
        return views(target, numbers)

    def send_to(self, target: Tensor, numbers: Numbers) -> None:
        """Copies `numbers` over the start of `target`, uint8 on the device, as `views` sees them.

        What was asked of the device before still finds what was there.
        """
        num_bytes = numbers.num_bytes
        if not num_bytes:
            return
        buffer = self._take_turn(num_bytes)
        source = buffer.memory[:num_bytes]
        _write(source.numpy(), numbers)
        self._streams.copy_to_device(source, target[:num_bytes])
        buffer.read = self._streams.mark()

    def _take_turn(self, num_bytes: int) -> _Buffer:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        if buffer.read is not None:
            buffer.read.wait()
        if len(buffer.memory) < num_bytes:
            size = max(_SMALLEST_BUFFER, 2 ** (num_bytes - 1).bit_length())
            buffer.memory = self._streams.host_buffer(size)
        return buffer


def aligned(num_bytes: int) -> int:
    """`num_bytes`, or a few more."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def views(memory: Tensor, numbers: Numbers) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that `numbers` are in `memory`, uint8, one after the other."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    start = 0
    for tensors, arrays, dtype in zip(
        found, numbers.kinds, (torch.int64, torch.int32), strict=True
    ):
        for array in arrays:
            part = memory[start : start + array.nbytes]
            tensors.append(part.view(dtype).view(array.shape))
            start += aligned(array.nbytes)
    return found


def _write(memory: npt.NDArray[np.uint8], numbers: Numbers) -> None:
    start = 0
    for arrays in numbers.kinds:
        for array in arrays:
            part = memory[start : start + array.nbytes]
            part.view(array.dtype).reshape(array.shape)[...] = array
            start += aligned(array.nbytes)
