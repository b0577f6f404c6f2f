"""Pinned memory for what is on its way to a device: a ring that is written again once it was read.

As many bytes as are on their way have room before the host waits for the device, up to a bound;
in how many copies makes no difference.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_service.device.streams import DeviceStreams, Mark

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
