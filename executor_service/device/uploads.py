"""Arrays of a step on their way to the device: all in one copy, which nobody waits for.

What is copied has to lie in pinned memory: from other memory the driver may wait for all that the
device was asked before, and the host could not be a step ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_service.device.pinned_ring import PinnedRing
from executor_service.device.streams import DeviceStreams

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Three steps of the largest kinds: masks for 256 rows, histories of some rows with 131 072 tokens.
MAX_PINNED_BYTES = 2**26
# What is larger is copied in parts, which other copies go on beside.
_PARTS = 4
# Of each array. Kernels are compiled anew for pointers that are less aligned.
ALIGNMENT = 16
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


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

    def places(self) -> Iterator[tuple[int, Array]]:
        """All arrays, and where each begins, in bytes."""
        start = 0
        for arrays in self.kinds:
            for array in arrays:
                yield start, array
                start += aligned(array.nbytes)


class Uploads:
    """Copies to one device, in the order in which they are asked for."""

    def __init__(
        self,
        device: torch.device,
        streams: DeviceStreams,
        max_pinned_bytes: int = MAX_PINNED_BYTES,
    ) -> None:
        """Pinned memory is taken when it is needed; the host waits where that is not enough."""
        self._device = device
        self._streams = streams
        self._ring = PinnedRing(streams, max_pinned_bytes)
        self._max_part_bytes = max_pinned_bytes // _PARTS

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
        if num_bytes > self._max_part_bytes:
            for start, array in numbers.places():
                self._send_in_parts(array, target[start : start + array.nbytes])
        elif num_bytes:
            part = self._ring.take(num_bytes)
            memory = part.numpy()
            for start, array in numbers.places():
                place = memory[start : start + array.nbytes].view(array.dtype)
                place.reshape(array.shape)[...] = array
            self._ring.copy_to(target[:num_bytes], part)

    def send_array(self, array: Array) -> Tensor:
        """`array` on the device, of its dtype; as in `send`."""
        source = torch.from_numpy(array)
        if self.shares_memory:
            return source
        target = torch.empty(array.shape, dtype=source.dtype, device=self._device)
        self._send_in_parts(array, target.view(-1).view(torch.uint8))
        return target

    def _send_in_parts(self, array: Array, target: Tensor) -> None:
        """Over `target`, uint8 of as many bytes."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(content), self._max_part_bytes):
            end = start + self._max_part_bytes
            part = self._ring.take(len(content[start:end]))
            part.numpy()[...] = content[start:end]
            self._ring.copy_to(target[start:end], part)


def aligned(num_bytes: int) -> int:
    """`num_bytes`, or a few more."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def views(memory: Tensor, numbers: Numbers) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that `numbers` are in `memory`, uint8, one after the other."""
    found = [
        memory[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for start, array in numbers.places()
    ]
    return found[: len(numbers.longs)], found[len(numbers.longs) :]
