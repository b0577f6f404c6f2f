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
from splitserve_client.open_requests import OpenRequest, OpenRequests, Outgoing
from splitserve_client.resumable_request import ResumableRequest, Submission
from splitserve_client.resumption import Backoff, RetryPolicy, Timing
from splitserve_client.session_request import SessionRequest
from splitserve_client.types import ResumeTokenIds, SamplingParams, SchedulingParams
from splitserve_client.unread import UnreadBudget
from splitserve_client.wakeups import Wakeups

Connect = Callable[[AsyncIterator[api.SessionRequest]], AsyncGenerator[api.SessionResponse, None]]
# Every server takes a message of this size.
_SMALL_MESSAGE_BYTES = 256 * 1024


class Session:
    """Submits requests at any time; leaving `async with` aborts those that are unfinished.

    When the stream breaks it is opened again, and every unfinished request goes on where it was,
    unless it was aborted. A request for which that takes longer than the retry policy allows fails;
    the session itself stays usable. The same patience holds for a server that is not there yet.
    """

    def __init__(
        self,
        connect: Connect,
        max_message_bytes: Callable[[], Awaitable[float]],
        policy: RetryPolicy,
        timing: Timing,
        unread: UnreadBudget,
        goes_elsewhere: Callable[[SplitserveError], bool] = lambda _error: False,
    ) -> None:
        """`goes_elsewhere`: whether a refusal says where to go on, once this stream has ended."""
        self._goes_elsewhere = goes_elsewhere
        self._connect = connect
        self._max_message_bytes = max_message_bytes
        self._policy = policy
        self._timing = timing
        self._unread = unread
        self._handles = itertools.count(1)
        self._open = OpenRequests()
        self._outgoing: Outgoing | None = None
        # Whether anything has come since the last stream broke.
        self._is_restored = False
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
        for handle in list(self._open.all):
            self._end_aborted(handle)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open.all)

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
        credential: str = "",
    ) -> SessionRequest:
        """Starts a request; see `AsyncClient.generate`. Its iterator raises what goes wrong.

        `model_digest`: raise ModelChanged if another model is served, now or when it goes on.
        `credential`: of whom the request is, if not of us; for gateways.
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
        backoff = Backoff(self._policy, self._timing)
        self._open.add(handle, OpenRequest(request, events, backoff, credential))
        self._send_submit(handle)
        self._has_work.set()
        return events

    # -- the stream --------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff(self._policy, self._timing)
        while True:
            await self._has_work.wait()
            lost = await self._serve_stream(backoff)
            delay_s = backoff.next_delay_s(lost)
            self._lose(lost, delay_s)
            if self._open.wanted:
                await self._timing.sleep(delay_s)
            if not self._open.wanted:
                self._has_work.clear()
                backoff.reset()

    def _lose(self, lost: SplitserveError, delay_s: float) -> None:
        """Ends what does not go on after another `delay_s`. Each request has its own patience."""
        for handle, opened in list(self._open.all.items()):
            opened.cancel_resubmission()
            if self._is_restored:
                opened.backoff.reset()
            if handle not in self._open.wanted:
                self._end_aborted(handle)
            elif not (opened.request.may_go_on(lost) and opened.backoff.lasts(delay_s)):
                self._fail(handle, lost)
        self._is_restored = False

    async def _serve_stream(self, backoff: Backoff) -> SplitserveError:
        """Serves until the stream breaks; returns why it did."""
        self._outgoing = outgoing = Outgoing()
        for handle in self._open.wanted:
            outgoing.submit(handle)
        try:
            async with aclosing(self._connect(self._messages(outgoing))) as responses:
                async for response in responses:
                    self._is_restored = True
                    backoff.reset()
                    self._receive(response)
        except SplitserveError as error:
            return error
        finally:
            outgoing.end()
            self._outgoing = None
        return ServerUnreachable("the session's stream ended")

    def _send_submit(self, handle: int) -> None:
        if self._outgoing is not None and handle in self._open.wanted:
            self._outgoing.submit(handle)

    async def _messages(self, outgoing: Outgoing) -> AsyncIterator[api.SessionRequest]:
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
                self._open.wanted[handle].sent_over = outgoing
                yield message

    def _submission(self, handle: int) -> api.SessionRequest:
        opened = self._open.wanted[handle]
        submit = api.SessionSubmit(
            handle=handle, request=opened.request.message(), credential=opened.credential
        )
        return api.SessionRequest(submit=submit)

    async def _is_small_enough(self, handle: int, message: api.SessionRequest) -> bool:
        """Ends the request if not."""
        num_bytes = message.ByteSize()
        if num_bytes <= _SMALL_MESSAGE_BYTES or num_bytes <= await self._max_message_bytes():
            return True
        refusal = f"the request has {num_bytes} bytes, which is more than the server takes"
        if handle in self._open.wanted:
            self._fail(handle, InvalidRequest(refusal, "MESSAGE_TOO_LARGE"))
        return False

    def _abort(self, handle: int) -> None:
        opened = self._open.abort(handle)
        if opened is None:
            return
        if self._outgoing is not None and opened.sent_over is self._outgoing:
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
        requests, stream = self._open.all, self._outgoing
        for handle, token_id in zip(handles, token_ids, strict=True):
            opened = requests.get(handle)
            if opened is not None and opened.sent_over is stream:
                opened.backoff.reset()
                opened.request.note_token(token_id)
                opened.events.put_token(token_id, self._num_responses)
                self._wakeups.add(opened.events)
        for event in response.events:
            opened = requests.get(event.handle)
            if opened is not None and opened.sent_over is stream:
                self._receive_event(event, opened)
        self._unread.enforce()
        self._wakeups.flush()

    def _receive_event(self, event: api.SessionEvent, opened: OpenRequest) -> None:
        handle = event.handle
        if event.HasField("rejected"):
            self._receive_refusal(handle, opened, decode_error(event.rejected))
            return
        opened.backoff.reset()
        for part in opened.request.note(event):
            assert isinstance(part, api.SessionEvent), "all that came in this session is"
            opened.events.put(part, self._num_responses)
        self._wakeups.add(opened.events)
        if event.HasField("finish"):
            self._remove(handle)

    def _receive_refusal(self, handle: int, opened: OpenRequest, refusal: SplitserveError) -> None:
        opened.sent_over = None
        if self._goes_elsewhere(refusal):
            refusal = ServerUnreachable(refusal.message, refusal.reason)
        if handle not in self._open.wanted:
            self._end_aborted(handle)
        elif opened.request.may_go_on(refusal):
            opened.resubmission = asyncio.create_task(self._resubmit(handle, opened, refusal))
        else:
            self._fail(handle, refusal)

    async def _resubmit(self, handle: int, opened: OpenRequest, error: SplitserveError) -> None:
        try:
            await opened.backoff.pause(error)
        except SplitserveError as final:
            opened.resubmission = None
            self._fail(handle, final)
            return
        opened.resubmission = None
        self._send_submit(handle)

    # -- ends --------------------------------------------------------------------------------------

    def _end_aborted(self, handle: int) -> None:
        """Ends a request that no server has."""
        opened = self._remove(handle)
        finish = opened.request.aborted()
        opened.events.put(api.SessionEvent(finish=finish), self._num_responses)
        opened.events.wake()

    def _fail(self, handle: int, error: SplitserveError) -> None:
        self._remove(handle).events.fail(error)

    def _remove(self, handle: int) -> OpenRequest:
        if self._outgoing is not None:
            self._outgoing.to_submit.pop(handle, None)
        return self._open.remove(handle)
