"""Arrays of a step on their way to the device: all in one copy, which nobody waits for.

What is copied has to lie in pinned memory: from other memory the driver may wait for all that the
device was asked before, and the host could not be a step ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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


# --------------------------------------------------------------------------------------------------
# Pinned memory for what is on its way to a device: a ring that is written again once it was read.
#
# As many bytes as are on their way have room before the host waits for the device, up to a bound;
# in how many copies makes no difference.

_FIRST_BYTES = 2**20
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Unread:
    """A part of the ring; `read`: from when on it may be written."""

    start: int
    read: Mark


class PinnedRing:
    """Parts are given out in turn, and are free again in that order."""

    def __init__(self, streams: DeviceStreams, max_bytes: int) -> None:
        """Takes no memory before it is needed, and `max_bytes`, a multiple of 16, at most."""
        self._streams = streams
        self._max_bytes = max_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)
        # Where the part begins that was taken last, and the next. The oldest unread one begins
        # where the free room ends.
        self._taken = self._head = 0
        self._unread: deque[_Unread] = deque()

    def copy_to(self, target: Tensor, part: Tensor) -> None:
        """Asks the stream in use to copy `part`, taken last, to `target`; it is free after that."""
        self._streams.copy_to_device(part, target)
        self._unread.append(_Unread(self._taken, self._streams.mark()))

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 that nobody reads, 1 to `max_bytes`; to be copied from at once."""
        while self._unread and self._unread[0].read.is_over:
            self._unread.popleft()
        # So that the next one is aligned, too.
        room = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        start = self._free_start(room)
        while start is None:
            if len(self._memory) < self._max_bytes:
                self._grow_to(room)
            else:
                self._unread.popleft().read.wait()
            start = self._free_start(room)
        self._taken, self._head = start, start + room
        return self._memory[start : start + num_bytes]

    def _free_start(self, num_bytes: int) -> int | None:
        """Where so many bytes are free, None if nowhere."""
        if not self._unread:
            return 0 if num_bytes <= len(self._memory) else None
        oldest = self._unread[0].start
        if self._head <= oldest:
            return self._head if self._head + num_bytes <= oldest else None
        if self._head + num_bytes <= len(self._memory):
            return self._head
        return 0 if num_bytes <= oldest else None

    def _grow_to(self, num_bytes: int) -> None:
        while self._unread:
            self._unread.popleft().read.wait()
        wanted = max(2 * len(self._memory), 2 ** (num_bytes - 1).bit_length(), _FIRST_BYTES)
        self._memory = self._streams.host_buffer(min(wanted, self._max_bytes))
