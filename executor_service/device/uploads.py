"""Uploads of a step's arrays to the device, in one asynchronous copy from pinned memory.

Memory must be pinned: with other memory the driver may wait for all work queued before, and the
host could not be a step ahead.

Also holds the ring of pinned memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_service.device.kv_cache import Array
from executor_service.device.streams import DeviceStreams, StreamMark

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Three steps of the largest kinds: masks for 256 rows, histories of some rows with 131 072 tokens.
MAX_PINNED_BYTES = 2**26
# Larger arrays are copied in parts of a quarter of the ring, so that other copies have room.
_PARTS = 4
# Alignment of each array in bytes. Kernels are compiled anew for pointers that are less aligned.
ALIGNMENT = 16
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


@dataclass(frozen=True, slots=True)
class IntegerArrays:
    """Arrays of any shape: `longs` become int64 tensors, `ints` int32 tensors."""

    longs: Sequence[Int64Array]
    ints: Sequence[Int32Array]

    @property
    def kinds(self) -> tuple[Sequence[Array], Sequence[Array]]:
        """Arrays by kind: longs, then ints."""
        return self.longs, self.ints

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays side by side, aligned."""
        return sum(aligned(array.nbytes) for arrays in self.kinds for array in arrays)

    def layout(self) -> Iterator[tuple[int, Array]]:
        """Yields each array with its start in bytes."""
        start = 0
        for arrays in self.kinds:
            for array in arrays:
                yield start, array
                start += aligned(array.nbytes)


class Uploads:
    """Copies arrays to one device, in the order of the calls."""

    def __init__(
        self,
        device: torch.device,
        streams: DeviceStreams,
        max_pinned_bytes: int = MAX_PINNED_BYTES,
    ) -> None:
        """Takes pinned memory on demand; the host waits while `max_pinned_bytes` are in use."""
        self._device = device
        self._streams = streams
        self._ring = PinnedRing(streams, max_pinned_bytes)
        self._max_part_bytes = max_pinned_bytes // _PARTS

    @property
    def shares_memory(self) -> bool:
        """Whether the device reads the memory of the host, so that nothing is copied."""
        return self._streams.shares_memory

    def send(self, numbers: IntegerArrays) -> tuple[list[Tensor], list[Tensor]]:
        """Copies `numbers` to new device memory: longs and ints, in their shapes.

        Where the device reads host memory, the tensors share memory with the arrays, which nobody
        may change then.
        """
        if self.shares_memory:
            longs, ints = ([torch.from_numpy(a) for a in arrays] for arrays in numbers.kinds)
            return longs, ints
        target = torch.empty(numbers.num_bytes, dtype=torch.uint8, device=self._device)
        self.send_to(target, numbers)
        return views(target, numbers)

    def send_to(self, target: Tensor, numbers: IntegerArrays) -> None:
        """Copies `numbers` over the start of `target`, uint8 on the device, laid out as in `views`.

        Work queued on the device before still sees the old contents.
        """
        num_bytes = numbers.num_bytes
        if num_bytes > self._max_part_bytes:
            for start, array in numbers.layout():
                self._send_in_parts(array, target[start : start + array.nbytes])
        elif num_bytes:
            part = self._ring.take(num_bytes)
            memory = part.numpy()
            for start, array in numbers.layout():
                place = memory[start : start + array.nbytes].view(array.dtype)
                place.reshape(array.shape)[...] = array
            self._ring.copy_to(target[:num_bytes], part)

    def send_array(self, array: Array) -> Tensor:
        """Copies `array` to the device, with its dtype; shares memory where `send` does."""
        source = torch.from_numpy(array)
        if self.shares_memory:
            return source
        target = torch.empty(array.shape, dtype=source.dtype, device=self._device)
        self._send_in_parts(array, target.view(-1).view(torch.uint8))
        return target

    def _send_in_parts(self, array: Array, target: Tensor) -> None:
        """Copies `array` over `target`, uint8 of as many bytes, in parts of the ring."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(content), self._max_part_bytes):
            end = start + self._max_part_bytes
            part = self._ring.take(len(content[start:end]))
            part.numpy()[...] = content[start:end]
            self._ring.copy_to(target[start:end], part)


def aligned(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def views(memory: Tensor, numbers: IntegerArrays) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors of `numbers` in `memory`, uint8, one after the other: longs and ints."""
    found = [
        memory[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for start, array in numbers.layout()
    ]
    return found[: len(numbers.longs)], found[len(numbers.longs) :]


# -- Ring of pinned memory for uploads -------------------------------------------------------------
#
# Parts are reused once they are read. The host waits for the device only when the bytes in transit
# exceed a bound; the number of copies does not matter.

_FIRST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Unread:
    """Ring segment with a pending copy. `read`: event after which the segment is writable again."""

    start: int
    read: StreamMark


class PinnedRing:
    """Hands out parts of pinned memory in turn; parts become free in the same order."""

    def __init__(self, streams: DeviceStreams, max_bytes: int) -> None:
        """Allocates pinned memory on demand, at most `max_bytes`, a multiple of 16."""
        self._streams = streams
        self._max_bytes = max_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)
        # `_taken`: start of the latest part. `_head`: start of the next part. Free room ends where
        # the oldest unread part begins.
        self._taken = self._head = 0
        self._unread: deque[_Unread] = deque()

    def copy_to(self, target: Tensor, part: Tensor) -> None:
        """Queues a copy of `part`, the latest one, to `target`; the part is free after that."""
        self._streams.copy_to_device(part, target)
        self._unread.append(_Unread(self._taken, self._streams.mark()))

    def take(self, num_bytes: int) -> Tensor:
        """Returns free memory, [num_bytes] uint8, 1 to `max_bytes`; to be copied from at once."""
        while self._unread and self._unread[0].read.is_over:
            self._unread.popleft()
        # Rounded up so that the next part is aligned, too.
        room = aligned(num_bytes)
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
        """Returns the start of `num_bytes` free bytes, None if there is no such room."""
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
