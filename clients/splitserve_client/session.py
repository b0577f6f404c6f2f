"""Many requests over one stream, which is opened again when it breaks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.codec import decode_error
from splitserve_client.errors import InvalidRequest, ServerUnreachable, SplitserveError
from splitserve_client.resumable_request import ResumableRequest, Submission
from splitserve_client.resumption import Backoff, RetryPolicy, Timing
from splitserve_client.types import Finish, ResumeTokenIds, SamplingParams, SchedulingParams, Tokens

Connect = Callable[[AsyncIterator[api.SessionRequest]], AsyncGenerator[api.SessionResponse, None]]
# Every server takes a message of this size.
_SMALL_MESSAGE_BYTES = 256 * 1024


class SessionRequest:
    """One request of a session: an iterator over its events; the last is a Finish.

    Events are kept until they are read, so that whoever is slow to read this one keeps none of the
    others waiting: at most as many as the request was allowed tokens.
    """

    def __init__(self, request: ResumableRequest, abort: Callable[[], None]) -> None:
        self._request = request
        self._abort = abort
        self._events: asyncio.Queue[Tokens | Finish | SplitserveError] = asyncio.Queue()
        self._has_ended = False

    @property
    def request_id(self) -> str:
        """The id, for `AsyncClient.abort` and for the logs."""
        return self._request.request_id

    def abort(self) -> None:
        """Ends the request; a Finish still follows. Harmless once it has ended."""
        self._abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Finish:
        if self._has_ended:
            raise StopAsyncIteration
        event = await self._events.get()
        self._has_ended = not isinstance(event, Tokens)
        if isinstance(event, SplitserveError):
            raise event
        return event

    def put(self, event: Tokens | Finish | SplitserveError) -> None:
        """Hands over an event; for the session."""
        self._events.put_nowait(event)


class _Open:
    """An unfinished request as the session keeps it."""

    def __init__(self, request: ResumableRequest, events: SessionRequest, backoff: Backoff) -> None:
        self.request = request
        self.events = events
        self.backoff = backoff
        self.resubmission: asyncio.Task[None] | None = None

    def cancel_resubmission(self) -> None:
        if self.resubmission is not None:
            self.resubmission.cancel()
            self.resubmission = None


class Session:
    """Submits requests at any time; leaving `async with` aborts those that are unfinished.

    When the stream breaks it is opened again, and every unfinished request goes on where it was.
    Where that takes longer than the retry policy allows, the requests fail; the session itself
    stays usable. The same patience holds for a server that is not there yet.
    """

    def __init__(
        self,
        connect: Connect,
        max_message_bytes: Callable[[], Awaitable[float]],
        policy: RetryPolicy,
        timing: Timing,
    ) -> None:
        self._connect = connect
        self._max_message_bytes = max_message_bytes
        self._policy = policy
        self._timing = timing
        self._handles = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._outbox: asyncio.Queue[api.SessionRequest] | None = None
        self._has_work = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._runner = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._runner is not None, "entered"
        self._runner.cancel()
        with suppress(asyncio.CancelledError):
            await self._runner
        for handle in list(self._open):
            self._end(handle, self._open[handle].request.aborted())

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        resume_token_ids: ResumeTokenIds = (),
        scheduling: SchedulingParams | None = None,
        encoder_token_ids: Sequence[int] = (),
    ) -> SessionRequest:
        """Starts a request; see `AsyncClient.generate`. Its iterator raises what goes wrong."""
        handle = next(self._handles)
        submission = Submission(
            prompt_token_ids, params, request_id, resume_token_ids, scheduling, encoder_token_ids
        )
        request = ResumableRequest(submission, self._timing.clock)
        events = SessionRequest(request, lambda: self._abort(handle))
        self._open[handle] = _Open(request, events, Backoff(self._policy, self._timing))
        self._send_submit(handle)
        self._has_work.set()
        return events

    # -- the stream --------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff(self._policy, self._timing)
        while True:
            await self._has_work.wait()
            lost = await self._serve_stream(backoff)
            for handle, open_request in list(self._open.items()):
                open_request.cancel_resubmission()
                if not open_request.request.may_go_on(lost):
                    self._end(handle, lost)
            if self._open:
                await self._pause(backoff, lost)
            if not self._open:
                self._has_work.clear()
                backoff.reset()

    async def _pause(self, backoff: Backoff, lost: SplitserveError) -> None:
        try:
            await backoff.pause(lost)
        except SplitserveError as error:
            for handle in list(self._open):
                self._end(handle, error)

    async def _serve_stream(self, backoff: Backoff) -> SplitserveError:
        """Serves until the stream breaks; returns why it did."""
        outbox: asyncio.Queue[api.SessionRequest] = asyncio.Queue()
        self._outbox = outbox
        for handle in self._open:
            self._send_submit(handle)
        try:
            async with aclosing(self._connect(self._outgoing(outbox))) as responses:
                async for response in responses:
                    backoff.reset()
                    self._receive(response)
        except SplitserveError as error:
            return error
        finally:
            self._outbox = None
        return ServerUnreachable("the session's stream ended")

    def _send_submit(self, handle: int) -> None:
        if self._outbox is not None:
            message = self._open[handle].request.message()
            submit = api.SessionSubmit(handle=handle, request=message)
            self._outbox.put_nowait(api.SessionRequest(submit=submit))

    async def _outgoing(
        self, outbox: asyncio.Queue[api.SessionRequest]
    ) -> AsyncIterator[api.SessionRequest]:
        """What is in the outbox, but for what would end the session of all the others."""
        while True:
            message = await outbox.get()
            num_bytes = message.ByteSize()
            if num_bytes > _SMALL_MESSAGE_BYTES and num_bytes > await self._max_message_bytes():
                refusal = f"the request has {num_bytes} bytes, which is more than the server takes"
                if message.submit.handle in self._open:
                    self._end(message.submit.handle, InvalidRequest(refusal, "MESSAGE_TOO_LARGE"))
            else:
                yield message

    def _abort(self, handle: int) -> None:
        open_request = self._open.get(handle)
        if open_request is None:
            return
        if self._outbox is None or open_request.resubmission is not None:
            self._end(handle, open_request.request.aborted())
        else:
            abort = api.SessionAbort(handle=handle)
            self._outbox.put_nowait(api.SessionRequest(abort=abort))

    # -- what it brings ----------------------------------------------------------------------------

    def _receive(self, response: api.SessionResponse) -> None:
        for handle, token_id in zip(response.handles, response.token_ids, strict=True):
            open_request = self._open.get(handle)
            if open_request is not None:
                open_request.backoff.reset()
                open_request.events.put(open_request.request.receive_token(token_id))
        for event in response.events:
            if event.handle in self._open:
                self._receive_event(event)

    def _receive_event(self, event: api.SessionEvent) -> None:
        handle = event.handle
        open_request = self._open[handle]
        if event.HasField("rejected"):
            refusal = decode_error(event.rejected)
            if open_request.request.may_go_on(refusal):
                task = asyncio.create_task(self._resubmit(handle, open_request, refusal))
                open_request.resubmission = task
            else:
                self._end(handle, refusal)
            return
        open_request.backoff.reset()
        try:
            for part in open_request.request.receive(event):
                if isinstance(part, Finish):
                    self._end(handle, part)
                else:
                    open_request.events.put(part)
        except SplitserveError as error:
            self._end(handle, error)

    async def _resubmit(self, handle: int, open_request: _Open, error: SplitserveError) -> None:
        try:
            await open_request.backoff.pause(error)
        except SplitserveError as final:
            open_request.resubmission = None
            self._end(handle, final)
            return
        open_request.resubmission = None
        self._send_submit(handle)

    def _end(self, handle: int, event: Finish | SplitserveError) -> None:
        open_request = self._open.pop(handle)
        open_request.cancel_resubmission()
        open_request.events.put(event)
