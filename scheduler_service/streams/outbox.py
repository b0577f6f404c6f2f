"""What a client's stream has still to send, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque

from google.protobuf.message import Message

from splitserve_rpc.domain_error import DomainError

# What a queued message takes beside its bytes.
_ENTRY_BYTES = 64


class Unread:
    """How much a stream may hold that its client has not read, and all streams together."""

    def __init__(self, max_stream_bytes: int, max_total_bytes: int) -> None:
        self.max_stream_bytes = max_stream_bytes
        self.max_total_bytes = max_total_bytes
        self.num_bytes = 0

    @property
    def is_too_much(self) -> bool:
        """Whether the streams together hold more than they may."""
        return self.num_bytes > self.max_total_bytes


class Outbox:
    """Messages in order, encoded: that is what their memory can be counted by.

    A message counts until the next one is taken, since it is then that it has been written. Once
    the end is decided nothing is added any more.
    """

    def __init__(self, unread: Unread) -> None:
        self._unread = unread
        self._messages: deque[bytes] = deque()
        self._num_taken_bytes = 0
        self._num_fresh_bytes = 0
        self.has_ended = False
        self._error: DomainError | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.num_bytes = 0

    def put(self, message: Message) -> None:
        """Queues a message."""
        if self.has_ended:
            return
        data = message.SerializeToString()
        self._messages.append(data)
        self._num_fresh_bytes += len(data) + _ENTRY_BYTES
        self._count(len(data) + _ENTRY_BYTES)
        self._changed.set()

    def is_unread(self) -> bool:
        """Whether too much waited already before what was put since this was asked last.

        So whoever reads may get a message of any size, in its own time.
        """
        num_old_bytes = self.num_bytes - self._num_taken_bytes - self._num_fresh_bytes
        self._num_fresh_bytes = 0
        return num_old_bytes > self._unread.max_stream_bytes

    def end(self, error: DomainError | None = None) -> None:
        """Ends the stream, with `error` if given, after what is queued."""
        if not self.has_ended:
            self.has_ended = True
            self._error = error
            self._changed.set()

    def close(self, error: DomainError | None = None) -> None:
        """Ends the stream, with `error` if given, and drops what is queued.

        A message that is being written is the transport's by now.
        """
        self._messages.clear()
        self.has_ended, self._error = True, error
        self._num_taken_bytes = self._num_fresh_bytes = 0
        self._count(-self.num_bytes)
        self._changed.set()

    async def wait_for_room(self) -> None:
        """Returns when it is at most half full."""
        await self._has_room.wait()

    async def get(self) -> bytes | None:
        """The next message, None at the end. Raises the error that ended the stream."""
        self._take(0)
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        data = self._messages.popleft()
        self._take(len(data) + _ENTRY_BYTES)
        return data

    def _take(self, num_bytes: int) -> None:
        """What was taken before has been written."""
        self._count(-self._num_taken_bytes)
        self._num_taken_bytes = num_bytes

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._unread.num_bytes += num_bytes
        if self.num_bytes > self._unread.max_stream_bytes // 2:
            self._has_room.clear()
        else:
            self._has_room.set()
