"""Many requests over one stream, which is opened again when it breaks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.codec import decode_error
from splitserve_client.errors import InvalidRequest, ServerUnreachable, SplitserveError
from splitserve_client.resumable_request import ResumableRequest, Submission
from splitserve_client.resumption import Backoff, RetryPolicy, Timing
from splitserve_client.session_request import SessionRequest
from splitserve_client.types import ResumeTokenIds, SamplingParams, SchedulingParams
from splitserve_client.unread import UnreadBudget
from splitserve_client.wakeups import Wakeups

Connect = Callable[[AsyncIterator[api.SessionRequest]], AsyncGenerator[api.SessionResponse, None]]
# Every server takes a message of this size.
_SMALL_MESSAGE_BYTES = 256 * 1024


@dataclass(slots=True)
class _Open:
    """An unfinished request as the session keeps it.

    `is_sent`: the stream that is open now has it. `is_aborted`: it is not to go on.
    """

    request: ResumableRequest
    events: SessionRequest
    backoff: Backoff
    is_sent: bool = False
    is_aborted: bool = False
    resubmission: asyncio.Task[None] | None = None

    def cancel_resubmission(self) -> None:
        if self.resubmission is not None:
            self.resubmission.cancel()
            self.resubmission = None


class _Outgoing:
    """What one stream has still to send; each handle once, so that aborting what waits frees it."""

    def __init__(self) -> None:
        self.to_submit: dict[int, None] = {}
        self.to_abort: dict[int, None] = {}
        self._is_changed = asyncio.Event()
        self._is_over = False

    def submit(self, handle: int) -> None:
        self.to_submit[handle] = None
        self._is_changed.set()

    def abort(self, handle: int) -> None:
        self.to_abort[handle] = None
        self._is_changed.set()

    def end(self) -> None:
        """The stream is no more."""
        self._is_over = True
        self._is_changed.set()

    async def wait(self) -> bool:
        """Waits until there is something; False: nothing more can be sent."""
        while not (self.to_submit or self.to_abort or self._is_over):
            self._is_changed.clear()
            await self._is_changed.wait()
        return not self._is_over


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
        unread: UnreadBudget,
    ) -> None:
        self._connect = connect
        self._max_message_bytes = max_message_bytes
        self._policy = policy
        self._timing = timing
        self._unread = unread
        self._handles = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._outgoing: _Outgoing | None = None
        self._num_responses = 0
        self._wakeups = Wakeups()
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
            self._end_aborted(handle)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        resume_token_ids: ResumeTokenIds = (),
        scheduling: SchedulingParams | None = None,
        encoder_token_ids: Sequence[int] = (),
        model_digest: str = "",
    ) -> SessionRequest:
        """Starts a request; see `AsyncClient.generate`. Its iterator raises what goes wrong.

        `model_digest`: raise ModelChanged if another model is served, now or when it goes on.
        """
        handle = next(self._handles)
        submission = Submission(
            prompt_token_ids,
            params,
            request_id,
            resume_token_ids,
            scheduling,
            encoder_token_ids,
            model_digest,
        )
        request = ResumableRequest(submission, self._timing.clock)
        events = SessionRequest(request.request_id, self._unread, lambda: self._abort(handle))
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
                if open_request.is_aborted:
                    self._end_aborted(handle)
                elif not open_request.request.may_go_on(lost):
                    self._fail(handle, lost)
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
                self._fail(handle, error)

    async def _serve_stream(self, backoff: Backoff) -> SplitserveError:
        """Serves until the stream breaks; returns why it did."""
        self._outgoing = outgoing = _Outgoing()
        for handle, open_request in self._open.items():
            open_request.is_sent = False
            outgoing.submit(handle)
        try:
            async with aclosing(self._connect(self._messages(outgoing))) as responses:
                async for response in responses:
                    backoff.reset()
                    self._receive(response)
        except SplitserveError as error:
            return error
        finally:
            outgoing.end()
            self._outgoing = None
        return ServerUnreachable("the session's stream ended")

    def _send_submit(self, handle: int) -> None:
        if self._outgoing is not None:
            self._outgoing.submit(handle)

    async def _messages(self, outgoing: _Outgoing) -> AsyncIterator[api.SessionRequest]:
        """What is to be sent, but for what would end the session of all the others."""
        while await outgoing.wait():
            if outgoing.to_abort:
                handle, _ = outgoing.to_abort.popitem()
                yield api.SessionRequest(abort=api.SessionAbort(handle=handle))
                continue
            handle = next(iter(outgoing.to_submit))
            message = self._submission(handle)
            if await self._is_small_enough(handle, message) and handle in outgoing.to_submit:
                del outgoing.to_submit[handle]
                self._open[handle].is_sent = True
                yield message

    def _submission(self, handle: int) -> api.SessionRequest:
        message = self._open[handle].request.message()
        return api.SessionRequest(submit=api.SessionSubmit(handle=handle, request=message))

    async def _is_small_enough(self, handle: int, message: api.SessionRequest) -> bool:
        """Ends the request if not."""
        num_bytes = message.ByteSize()
        if num_bytes <= _SMALL_MESSAGE_BYTES or num_bytes <= await self._max_message_bytes():
            return True
        refusal = f"the request has {num_bytes} bytes, which is more than the server takes"
        if handle in self._open:
            self._fail(handle, InvalidRequest(refusal, "MESSAGE_TOO_LARGE"))
        return False

    def _abort(self, handle: int) -> None:
        open_request = self._open.get(handle)
        if open_request is None or open_request.is_aborted:
            return
        if self._outgoing is not None and open_request.is_sent:
            open_request.is_aborted = True
            self._outgoing.abort(handle)
        else:
            self._end_aborted(handle)

    # -- what it brings ----------------------------------------------------------------------------

    def _receive(self, response: api.SessionResponse) -> None:
        """Raises ServerUnreachable if it cannot be understood: the stream is opened again."""
        self._num_responses += 1
        handles, token_ids = response.handles, response.token_ids
        if len(handles) != len(token_ids):
            raise ServerUnreachable("a response has not one token for each handle")
        for handle, token_id in zip(handles, token_ids, strict=True):
            open_request = self._open.get(handle)
            if open_request is not None:
                open_request.backoff.reset()
                open_request.request.note_token(token_id)
                open_request.events.put_token(token_id, self._num_responses)
                self._wakeups.add(open_request.events)
        for event in response.events:
            if event.handle in self._open:
                self._receive_event(event)
        self._unread.enforce()
        self._wakeups.flush()

    def _receive_event(self, event: api.SessionEvent) -> None:
        handle = event.handle
        open_request = self._open[handle]
        if event.HasField("rejected"):
            self._receive_refusal(handle, open_request, decode_error(event.rejected))
            return
        open_request.backoff.reset()
        for part in open_request.request.note(event):
            assert isinstance(part, api.SessionEvent), "all that came in this session is"
            open_request.events.put(part, self._num_responses)
        self._wakeups.add(open_request.events)
        if event.HasField("finish"):
            self._remove(handle)

    def _receive_refusal(self, handle: int, open_request: _Open, refusal: SplitserveError) -> None:
        open_request.is_sent = False
        if open_request.is_aborted:
            self._end_aborted(handle)
        elif open_request.request.may_go_on(refusal):
            task = asyncio.create_task(self._resubmit(handle, open_request, refusal))
            open_request.resubmission = task
        else:
            self._fail(handle, refusal)

    async def _resubmit(self, handle: int, open_request: _Open, error: SplitserveError) -> None:
        try:
            await open_request.backoff.pause(error)
        except SplitserveError as final:
            open_request.resubmission = None
            self._fail(handle, final)
            return
        open_request.resubmission = None
        self._send_submit(handle)

    # -- ends --------------------------------------------------------------------------------------

    def _end_aborted(self, handle: int) -> None:
        """Ends a request that no server has."""
        open_request = self._remove(handle)
        finish = open_request.request.aborted()
        open_request.events.put(api.SessionEvent(finish=finish), self._num_responses)
        open_request.events.wake()

    def _fail(self, handle: int, error: SplitserveError) -> None:
        self._remove(handle).events.fail(error)

    def _remove(self, handle: int) -> _Open:
        open_request = self._open.pop(handle)
        open_request.cancel_resubmission()
        if self._outgoing is not None:
            self._outgoing.to_submit.pop(handle, None)
        return open_request
