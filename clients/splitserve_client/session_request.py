"""Request of a session: its unread events in compact form."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from typing import Self

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.codec import decode_event
from splitserve_client.errors import SplitserveError, StreamNotRead
from splitserve_client.types import Finish, Tokens
from splitserve_client.unread import UnreadBudget

# Most tokens in one event; detokenizing so many takes less than a millisecond.
_MAX_TOKENS = 256
_TOKEN_BYTES = 4
# Overhead of a stored message beside its bytes.
_ENTRY_BYTES = 64


class SessionRequest:
    """Request of a session: an iterator over its events; the last is a Finish.

    Unread events are stored, so that a slow reader of this request does not delay other requests:
    plain tokens as integers, of which many are read as one Tokens, all other events encoded. Beyond
    the limit of `unread` the request ends with StreamNotRead.
    """

    def __init__(self, request_id: str, unread: UnreadBudget, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self.num_unread_bytes = 0
        self._unread = unread
        self._abort = abort
        self._entries: deque[array[int] | bytes] = deque()
        self._error: SplitserveError | None = None
        # `_is_complete`: no more events arrive. `_has_ended`: no more events to read.
        self._is_complete = False
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None
        self._last_response = 0

    def abort(self) -> None:
        """Aborts the request; a Finish still follows. No effect after the end."""
        self._abort()

    def close(self, error: SplitserveError | None = None) -> None:
        """Ends the request immediately and drops unread events. No effect after the end.

        A waiting reader gets `error`, or the end of the iteration.
        """
        self._is_complete = True
        self._entries.clear()
        self._count(-self.num_unread_bytes)
        self._error = error
        self._has_ended = error is None
        self.wake()
        self._abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Finish:
        if self._entries:
            # A reader with a backlog lets other readers run first.
            await asyncio.sleep(0)
        while not self._entries:
            if self._has_ended:
                raise StopAsyncIteration
            if self._error is not None:
                self._has_ended = True
                raise self._error
            await self._wait()
        entry = self._entries[0]
        return self._read_tokens(entry) if isinstance(entry, array) else self._read_event(entry)

    async def _wait(self) -> None:
        assert self._reader is None, "one reads at a time"
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _read_tokens(self, entry: array[int]) -> Tokens:
        if len(entry) <= _MAX_TOKENS:
            self._entries.popleft()
            token_ids = tuple(entry)
        else:
            token_ids = tuple(entry[:_MAX_TOKENS])
            del entry[:_MAX_TOKENS]
        self._count(-_TOKEN_BYTES * len(token_ids))
        return Tokens(token_ids)

    def _read_event(self, entry: bytes) -> Tokens | Finish:
        self._entries.popleft()
        self._count(-len(entry) - _ENTRY_BYTES)
        event = api.SessionEvent.FromString(entry)
        self._has_ended = event.HasField("finish")
        return decode_event(event)

    # -- calls of the session ----------------------------------------------------------------------

    def put_token(self, token_id: int, response: int) -> None:
        """Adds a plain token; the caller then calls `wake`.

        `response`: number of the response message.
        """
        if not self._takes(response):
            return
        if self._entries and isinstance(tokens := self._entries[-1], array):
            tokens.append(token_id)
        else:
            self._entries.append(array("i", (token_id,)))
        self._count(_TOKEN_BYTES)

    def put(self, event: api.SessionEvent, response: int) -> None:
        """Adds any other event, in order; a Finish is the last. The caller then calls `wake`."""
        if not self._takes(response):
            return
        data = event.SerializeToString()
        self._entries.append(data)
        self._count(len(data) + _ENTRY_BYTES)
        self._is_complete = event.HasField("finish")

    def fail(self, error: SplitserveError) -> None:
        """Ends the request with `error`, after its unread events."""
        if not self._is_complete:
            self._is_complete = True
            self._error = error
            self.wake()

    def drop_unread(self) -> None:
        """Ends the request with StreamNotRead; called by UnreadBudget."""
        self.close(StreamNotRead("too much of the stream was not read", "STREAM_NOT_READ"))

    def _takes(self, response: int) -> bool:
        """Returns whether an event may be added: the limit was not exceeded before this message.

        A reader that keeps up can so receive a message of any size.
        """
        if response != self._last_response:
            self._last_response = response
            if self.num_unread_bytes > self._unread.max_bytes:
                self.drop_unread()
        return not self._is_complete

    def _count(self, num_bytes: int) -> None:
        self.num_unread_bytes += num_bytes
        self._unread.count(self, num_bytes)

    def wake(self) -> None:
        """Wakes the waiting reader, if any."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
