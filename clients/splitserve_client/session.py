"""Session: many requests over one stream, which is reopened when it breaks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.channels import is_cancelled
from splitserve_client.client_config import Backoff, RetryPolicy, Timing
from splitserve_client.codec import decode_error
from splitserve_client.errors import ServerUnreachable
from splitserve_client.resumable_request import ResumableRequest, Submission
from splitserve_client.session_request import (
    OpenRequest,
    OpenRequests,
    SessionRequest,
    UnreadBudget,
    UnsentHandles,
    Wakeups,
)
from splitserve_text import (
    NO_TRACE,
    InvalidRequest,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
    TraceContext,
)

# Size that every server accepts.
_SMALL_MESSAGE_BYTES = 256 * 1024
# Tag and length of a submission in a message.
_FIELD_BYTES = 8


class SessionMessages:
    """Encodes the messages of a session."""

    def __init__(
        self,
        requests: OpenRequests,
        max_message_bytes: Callable[[], Awaitable[float]],
        fail: Callable[[int, SplitserveError], None],
    ) -> None:
        """Prepares the encoder.

        `fail`: ends the request with this handle, which the server would refuse.
        """
        self._open = requests
        self._max_message_bytes = max_message_bytes
        self._fail = fail

    async def over(self, outgoing: UnsentHandles) -> AsyncIterator[api.SessionRequest]:
        """Yields the messages to send.

        Skips requests that would make the server end the session.
        """
        while await outgoing.wait():
            if outgoing.to_abort:
                handle, _ = outgoing.to_abort.popitem()
                yield api.SessionRequest(abort=api.SessionAbort(handle=handle))
                continue
            handle = next(iter(outgoing.to_submit))
            submit = self._submission(handle)
            if submit is None or not await self._is_small_enough(handle, submit):
                continue
            if handle in outgoing.to_submit:
                self._sent(handle, outgoing)
                message = api.SessionRequest(submit=submit)
                if outgoing.takes_submissions:
                    self._add_submissions(message, outgoing)
                yield message

    def _add_submissions(self, message: api.SessionRequest, outgoing: UnsentHandles) -> None:
        """Adds further waiting submissions to `message` while it stays small."""
        num_bytes = message.ByteSize()
        for handle in list(outgoing.to_submit):
            submit = self._submission(handle)
            if submit is None:
                continue
            num_bytes += submit.ByteSize() + _FIELD_BYTES
            if num_bytes > _SMALL_MESSAGE_BYTES:
                return
            self._sent(handle, outgoing)
            message.submissions.append(submit)

    def _sent(self, handle: int, outgoing: UnsentHandles) -> None:
        del outgoing.to_submit[handle]
        self._open.wanted[handle].sent_over = outgoing

    def _submission(self, handle: int) -> api.SessionSubmit | None:
        """Encodes a request; ends the request and returns None if it cannot be encoded."""
        opened = self._open.wanted[handle]
        try:
            return api.SessionSubmit(
                handle=handle, request=opened.request.message(), credential=opened.credential
            )
        except (TypeError, ValueError, OverflowError) as error:
            self._fail(handle, InvalidRequest(f"the request cannot be encoded: {error}"))
            return None

    async def _is_small_enough(self, handle: int, submit: api.SessionSubmit) -> bool:
        """Returns whether the server accepts a request of this size; ends the request if not."""
        num_bytes = submit.ByteSize() + _FIELD_BYTES
        if num_bytes <= _SMALL_MESSAGE_BYTES or num_bytes <= await self._max_message_bytes():
            return True
        refusal = f"the request has {num_bytes} bytes, which exceeds the server's limit"
        if handle in self._open.wanted:
            self._fail(handle, InvalidRequest(refusal, "MESSAGE_TOO_LARGE"))
        return False


_log = logging.getLogger(__name__)

Connect = Callable[[AsyncIterator[api.SessionRequest]], AsyncGenerator[api.SessionResponse, None]]


class Session:
    """Submits requests at any time; leaving `async with` aborts unfinished requests.

    When the stream breaks, the session reopens it and resumes every unfinished request that was not
    aborted. A request fails if its resumption takes longer than the retry policy allows; the
    session stays usable. The same policy applies to a server that is not reachable yet.
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
        """Prepares the session.

        `goes_elsewhere`: whether a refusal leads new streams to another server.

        Requests that the refusing stream already has continue there.
        """
        self._goes_elsewhere = goes_elsewhere
        self._connect = connect
        self._policy = policy
        self._timing = timing
        self._unread = unread
        self._handles = itertools.count(1)
        self._open = OpenRequests()
        self._messages = SessionMessages(self._open, max_message_bytes, self._fail)
        self._outgoing: UnsentHandles | None = None
        # Earlier streams over which requests still run.
        self._left: dict[UnsentHandles, asyncio.Task[SplitserveError]] = {}
        # Whether a response has arrived since the last stream broke.
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
        tasks = {self._runner, *self._left.values()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for handle in list(self._open.all):
            self._end_aborted(handle)

    @property
    def num_open(self) -> int:
        """Number of unfinished requests."""
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
        encoder_features: bytes = b"",
        model_digest: str = "",
        credential: str = "",
        trace_context: TraceContext = NO_TRACE,
    ) -> SessionRequest:
        """Starts a request; see `AsyncClient.generate`. Its iterator raises the request's errors.

        `model_digest`: raise ModelChanged if another model is served at the start or when the
        request is resumed. `credential`: of the request's caller, if not the client's own; for
        gateways. `trace_context`: as in `AsyncClient.generate`.
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
            trace_context,
            encoder_features,
        )
        request = ResumableRequest(submission, self._timing.clock)
        events = SessionRequest(request.request_id, self._unread, lambda: self._abort(handle))
        backoff = Backoff(self._policy, self._timing)
        self._open.add(handle, OpenRequest(request, events, backoff, credential))
        self._send_submit(handle)
        self._has_work.set()
        return events

    # -- streams -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff(self._policy, self._timing)
        while True:
            await self._has_work.wait()
            lost = await self._serve(backoff)
            if lost is None:
                continue
            delay_s = backoff.next_delay_s(lost)
            for handle, opened in self._without_stream():
                if self._is_restored:
                    opened.backoff.reset()
                self._lose(handle, opened, lost, delay_s)
            self._is_restored = False
            if self._without_stream():
                await self._timing.sleep(delay_s)
            if not self._without_stream():
                self._has_work.clear()
                backoff.reset()

    def _without_stream(self) -> list[tuple[int, OpenRequest]]:
        """Returns the requests that no earlier stream has; the next stream is to carry them."""
        return [each for each in self._open.all.items() if each[1].sent_over not in self._left]

    def _lose(
        self, handle: int, opened: OpenRequest, lost: SplitserveError, delay_s: float
    ) -> None:
        """Ends a request that cannot continue after another `delay_s`.

        Each request has its own backoff.
        """
        opened.cancel_resubmission()
        opened.sent_over = None
        if handle not in self._open.wanted:
            self._end_aborted(handle)
        elif not (opened.request.can_resume(lost) and opened.backoff.lasts(delay_s)):
            self._fail(handle, lost)

    async def _serve(self, backoff: Backoff) -> SplitserveError | None:
        """Serves over one stream until it breaks and returns the reason.

        None if requests now go to another stream.
        """
        self._outgoing = outgoing = UnsentHandles()
        for handle, opened in self._open.wanted.items():
            if opened.sent_over is None and opened.resubmission is None:
                outgoing.submit(handle)
        serving = asyncio.create_task(self._serve_stream(outgoing, backoff))
        leaving = asyncio.create_task(outgoing.left.wait())
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return serving.result()
            self._left[outgoing] = serving
            serving.add_done_callback(lambda ended: self._lose_left(outgoing, ended))
            self._end_if_unused(outgoing)
            return None
        finally:
            self._outgoing = None
            leaving.cancel()
            if outgoing not in self._left:
                serving.cancel()
                await asyncio.wait({serving})

    async def _serve_stream(self, outgoing: UnsentHandles, backoff: Backoff) -> SplitserveError:
        """Serves over a stream until it breaks; returns the reason."""
        try:
            async with aclosing(self._connect(self._messages.over(outgoing))) as responses:
                async for response in responses:
                    if outgoing is self._outgoing:
                        self._is_restored = True
                        backoff.reset()
                    self._receive(response, outgoing)
        except SplitserveError as error:
            return error
        except (Exception, asyncio.CancelledError):
            # gRPC also cancels a call whose request messages fail.
            if is_cancelled():
                raise
            _log.exception("session_broken")
            return SplitserveError("the session failed in the client; the client's log has details")
        finally:
            outgoing.end()
        return ServerUnreachable("the session's stream ended")

    def _lose_left(self, outgoing: UnsentHandles, ended: asyncio.Task[SplitserveError]) -> None:
        """Resumes the requests of an earlier stream that has ended over the current stream."""
        del self._left[outgoing]
        if ended.cancelled():
            return
        for handle, opened in list(self._open.all.items()):
            if opened.sent_over is outgoing:
                self._lose(handle, opened, ended.result(), 0.0)
                self._send_submit(handle)
                self._has_work.set()

    def _end_if_unused(self, outgoing: UnsentHandles) -> None:
        if all(opened.sent_over is not outgoing for opened in self._open.all.values()):
            outgoing.end()

    def _send_submit(self, handle: int) -> None:
        if self._outgoing is not None and handle in self._open.wanted:
            self._outgoing.submit(handle)

    def _abort(self, handle: int) -> None:
        opened = self._open.abort(handle)
        if opened is None:
            return
        stream = opened.sent_over
        if stream is not None and (stream is self._outgoing or stream in self._left):
            stream.abort(handle)
        else:
            self._end_aborted(handle)

    # -- responses ---------------------------------------------------------------------------------

    def _receive(self, response: api.SessionResponse, stream: UnsentHandles) -> None:
        """Processes a response.

        Raises ServerUnreachable for a malformed one: the stream is reopened.
        """
        self._num_responses += 1
        stream.takes_submissions |= response.takes_submissions
        handles, token_ids = response.handles, response.token_ids
        if len(handles) != len(token_ids):
            raise ServerUnreachable(
                f"a response has {len(handles)} handles, but {len(token_ids)} tokens"
            )
        requests = self._open.all
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
            assert isinstance(part, api.SessionEvent), "a session receives only these"
            opened.events.put(part, self._num_responses)
        self._wakeups.add(opened.events)
        if event.HasField("finish"):
            self._remove(handle)

    def _receive_refusal(self, handle: int, opened: OpenRequest, refusal: SplitserveError) -> None:
        stream, opened.sent_over = opened.sent_over, None
        is_left = stream is not None and stream.left.is_set()
        if is_left or self._goes_elsewhere(refusal):
            refusal = ServerUnreachable(refusal.message, refusal.reason)
            if stream is not None:
                stream.leave()
        if handle not in self._open.wanted:
            self._end_aborted(handle)
        elif opened.request.can_resume(refusal):
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

    # -- end of a request --------------------------------------------------------------------------

    def _end_aborted(self, handle: int) -> None:
        """Ends an aborted request that no server has."""
        opened = self._remove(handle)
        finish = opened.request.aborted()
        opened.events.put(api.SessionEvent(finish=finish), self._num_responses)
        opened.events.wake()

    def _fail(self, handle: int, error: SplitserveError) -> None:
        self._remove(handle).events.fail(error)

    def _remove(self, handle: int) -> OpenRequest:
        if self._outgoing is not None:
            self._outgoing.to_submit.pop(handle, None)
        opened = self._open.remove(handle)
        if opened.sent_over in self._left:
            self._end_if_unused(opened.sent_over)
        return opened
