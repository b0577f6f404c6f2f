"""Outbox of a client's stream: encoded messages that are still to be sent, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque

from google.protobuf.message import Message

from splitserve_contract import DomainError

# Memory of a queued message beside its bytes.
_ENTRY_BYTES = 64
# Size up to which messages are joined; the last one may exceed it.
_MAX_JOINED_BYTES = 64 * 1024


class UnreadLimits:
    """Limits on unread bytes of one stream and of all streams together, and the total now."""

    def __init__(self, max_stream_bytes: int, max_total_bytes: int) -> None:
        self.max_stream_bytes = max_stream_bytes
        self.max_total_bytes = max_total_bytes
        self.num_bytes = 0

    @property
    def is_too_much(self) -> bool:
        """Whether the unread bytes of all streams exceed `max_total_bytes`."""
        return self.num_bytes > self.max_total_bytes


class Outbox:
    """Encoded messages of one stream in order, counted by their memory.

    A message counts until the next one is taken, since only then it has been written. After the end
    is decided, no message is added.
    """

    def __init__(self, unread: UnreadLimits) -> None:
        self._unread = unread
        # Encoded messages, each with whether the next one may be joined to it.
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

        `joins_next`: whether this message and the next one, merged as protobuf does, mean the same
        as both. If several messages wait, such messages are sent as one: a stream that is slower
        than steps gets fewer, larger messages.
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
        """Whether the queue of messages is empty; messages already taken do not count."""
        return not self._messages

    def seal(self) -> None:
        """Prevents later messages from being joined to the queued ones."""
        if self._messages:
            data, _ = self._messages.pop()
            self._messages.append((data, False))

    def is_unread(self) -> bool:
        """Returns whether old unread messages exceed the limit of a stream.

        Messages put since the previous call do not count. So a client that reads may get a message
        of any size, in its own time.
        """
        num_old_bytes = self.num_bytes - self._num_taken_bytes - self._num_fresh_bytes
        self._num_fresh_bytes = 0
        return num_old_bytes > self._unread.max_stream_bytes

    def end(self, error: DomainError | None = None) -> None:
        """Ends the stream, with `error` if given, after the queued messages."""
        if not self.has_ended:
            self.has_ended = True
            self._error = error
            self._changed.set()

    def close(self, error: DomainError | None = None) -> None:
        """Ends the stream, with `error` if given, and drops the queued messages.

        A message that is being written belongs to the transport already.
        """
        self._messages.clear()
        self.has_ended, self._error = True, error
        self._num_taken_bytes = self._num_fresh_bytes = 0
        self._count(-self.num_bytes)
        self._changed.set()

    async def wait_for_room(self) -> None:
        """Waits until the outbox is at most half full."""
        await self._has_room.wait()

    async def get(self) -> bytes | None:
        """Returns queued messages merged into one; None at the end.

        Raises the error that ended the stream.
        """
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
        # Concatenated encoded messages decode as their merger.
        return b"".join(parts)

    def _take(self, num_bytes: int) -> None:
        """Uncounts the message taken before, now written; notes the size of the new one."""
        self._count(-self._num_taken_bytes)
        self._num_taken_bytes = num_bytes

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._unread.num_bytes += num_bytes
        if self.num_bytes > self._unread.max_stream_bytes // 2:
            self._has_room.clear()
        else:
            self._has_room.set()
