"""Requests of a session: their unread events, the limits of these, and the wake-ups of readers."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.client_config import Backoff
from splitserve_client.codec import decode_event
from splitserve_client.errors import StreamNotRead
from splitserve_client.resumable_request import ResumableRequest
from splitserve_text import Finish, SplitserveError, Tokens

DEFAULT_UNREAD_BYTES = 16 * 2**20
# Total limit, as a multiple of the limit of one reader.
_NUM_UNREAD = 16


class UnreadReader(Protocol):
    """Reader with unread bytes."""

    @property
    def num_unread_bytes(self) -> int:
        """Number of unread bytes."""
        ...

    def drop_unread(self) -> None:
        """Ends the stream with StreamNotRead and releases its unread bytes."""
        ...


class UnreadBudget:
    """Limits the unread bytes of each holder, and of all holders together."""

    def __init__(self, max_bytes: int = DEFAULT_UNREAD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_total_bytes = _NUM_UNREAD * max_bytes
        self.num_bytes = 0
        self._holders: set[UnreadReader] = set()

    def count(self, holder: UnreadReader, num_bytes: int) -> None:
        """Adds `num_bytes` of `holder`; negative for bytes that were read or dropped."""
        self.num_bytes += num_bytes
        if not holder.num_unread_bytes:
            self._holders.discard(holder)
        elif num_bytes > 0:
            self._holders.add(holder)

    def enforce(self) -> None:
        """Drops the holders with the most unread bytes until the total is within its limit."""
        while self.num_bytes > self.max_total_bytes:
            max(self._holders, key=lambda holder: holder.num_unread_bytes).drop_unread()


# Delay that no reader notices.
_SHORT_ROUND_S = 0.01
_MAX_PAUSE_S = 0.1


class Reader(Protocol):
    """Reader that may wait for events."""

    def wake(self) -> None:
        """Wakes the waiting reader, if any."""
        ...


class Wakeups:
    """Wakes readers, once each for all events that have arrived.

    After a slow round of readers, the next round is delayed by about as long: more events have then
    arrived for each reader, and handling them together costs little more than one token.
    """

    def __init__(self) -> None:
        self._readers: dict[Reader, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._round_s = 0.0

    def add(self, reader: Reader) -> None:
        """Notes that `reader` has new events."""
        self._readers[reader] = None

    def flush(self) -> None:
        """Wakes all noted readers, now or after a pause."""
        if not self._readers or self._timer is not None:
            return
        if self._round_s <= _SHORT_ROUND_S:
            self._wake()
        else:
            pause_s = min(self._round_s, _MAX_PAUSE_S)
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        readers, self._readers = self._readers, {}
        for reader in readers:
            reader.wake()
        # Runs after the readers have run.
        loop.call_soon(self._end_round, start_s)

    def _end_round(self, start_s: float) -> None:
        self._round_s = asyncio.get_running_loop().time() - start_s


# Most tokens in one event; detokenizing so many takes less than a millisecond.
_MAX_TOKENS = 256
_TOKEN_BYTES = 4
# Overhead of a stored message, in addition to its bytes.
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
        assert self._reader is None, "one reader at a time"
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
        self.close(StreamNotRead("the stream has too much unread output", "STREAM_NOT_READ"))

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


class UnsentHandles:
    """Handles that one stream has still to send, each once: aborting an unsent request removes it.

    `left`: set once no more requests are submitted over the stream; its requests continue there.
    `takes_submissions`: the server accepts several submissions in one message.
    """

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.takes_submissions = False
        self.to_submit: dict[int, None] = {}
        self.to_abort: dict[int, None] = {}
        self._is_changed = asyncio.Event()
        self._is_over = False

    def submit(self, handle: int) -> None:
        """Queues the submission of a request."""
        self.to_submit[handle] = None
        self._is_changed.set()

    def abort(self, handle: int) -> None:
        """Queues the abort of a request."""
        self.to_abort[handle] = None
        self._is_changed.set()

    def leave(self) -> None:
        """Stops submissions over this stream."""
        self.to_submit.clear()
        self.left.set()

    def end(self) -> None:
        """Marks the stream as ended; drops all unsent messages."""
        self.to_submit.clear()
        self.to_abort.clear()
        self._is_over = True
        self._is_changed.set()

    async def wait(self) -> bool:
        """Waits until a message can be sent; returns False if the stream has ended."""
        while not (self.to_submit or self.to_abort or self._is_over):
            self._is_changed.clear()
            await self._is_changed.wait()
        return not self._is_over


@dataclass(slots=True)
class OpenRequest:
    """Unfinished request. `credential`: of its caller. `sent_over`: stream whose server has it."""

    request: ResumableRequest
    events: SessionRequest
    backoff: Backoff
    credential: str = field(default="", repr=False)
    sent_over: UnsentHandles | None = None
    resubmission: asyncio.Task[None] | None = None

    def cancel_resubmission(self) -> None:
        """Cancels the scheduled resubmission, if any."""
        if self.resubmission is not None:
            self.resubmission.cancel()
            self.resubmission = None


class OpenRequests:
    """Unfinished requests by handle. Only `wanted` requests can be submitted.

    An aborted request is no longer wanted: its last events arrive over the stream that has it, or
    not at all.
    """

    def __init__(self) -> None:
        self.all: dict[int, OpenRequest] = {}
        self.wanted: dict[int, OpenRequest] = {}

    def add(self, handle: int, opened: OpenRequest) -> None:
        """Adds a wanted request."""
        self.all[handle] = self.wanted[handle] = opened

    def abort(self, handle: int) -> OpenRequest | None:
        """Cancels an open request and returns it; None for a closed or cancelled handle."""
        opened = self.wanted.pop(handle, None)
        if opened is not None:
            opened.cancel_resubmission()
        return opened

    def remove(self, handle: int) -> OpenRequest:
        """Removes an ended request and returns it."""
        self.wanted.pop(handle, None)
        opened = self.all.pop(handle)
        opened.cancel_resubmission()
        return opened
