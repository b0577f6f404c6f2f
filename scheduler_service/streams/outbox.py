"""What a client's stream has still to send, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque

from google.protobuf.message import Message

from splitserve_rpc.domain_error import DomainError

# What a queued message takes beside its bytes.
_ENTRY_BYTES = 64
# Messages that are joined are not more than this, but for the last of them.
_MAX_JOINED_BYTES = 64 * 1024


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
        # Each, and whether what follows may be joined to it.
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._num_taken_bytes = 0
        self._num_fresh_bytes = 0
        self.has_ended = False
        self._error: DomainError | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.num_bytes = 0

    def put(self, message: Message, *, joins_next: bool = False) -> None:
        """Queues a message.

        `joins_next`: that it and the next one, merged as protobuf does, say the same as both. It is
        sent so where several wait: a stream that is slower than steps gets fewer, larger messages.
        """
        if self.has_ended:
            return
        data = message.SerializeToString()
        self._messages.append((data, joins_next))
        self._num_fresh_bytes += len(data) + _ENTRY_BYTES
        self._count(len(data) + _ENTRY_BYTES)
        self._changed.set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued but what was taken."""
        return not self._messages

    def seal(self) -> None:
        """Lets nothing that is put from now on be joined to what is queued."""
        if self._messages:
            data, _ = self._messages.pop()
            self._messages.append((data, False))

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
        """The next messages as one, None at the end. Raises the error that ended the stream."""
        self._take(0)
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        data, joins_next = self._messages.popleft()
        parts, num_bytes = [data], len(data) + _ENTRY_BYTES
        while joins_next and self._messages and num_bytes < _MAX_JOINED_BYTES:
            data, joins_next = self._messages.popleft()
            parts.append(data)
            num_bytes += len(data) + _ENTRY_BYTES
        self._take(num_bytes)
        # Encoded messages that follow each other are their merger.
        return b"".join(parts)

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
