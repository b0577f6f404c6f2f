"""Request that is resumed after its stream broke, and its Generate calls."""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client.client_config import Backoff
from splitserve_client.codec import (
    decode_event,
    encode_sampling_params,
    encode_scheduling_params,
)
from splitserve_client.connection import Connection
from splitserve_client.errors import (
    Draining,
    ModelNotReady,
    QueueFull,
    QuotaExceeded,
    RequestIdInUse,
    ServerUnreachable,
    StreamNotRead,
)
from splitserve_text import (
    NO_TRACE,
    Finish,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
    Tokens,
    TraceContext,
)


def current_trace() -> TraceContext:
    """Returns the span of the current task.

    NO_TRACE without OpenTelemetry, which is never imported here.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return NO_TRACE
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return NO_TRACE
    traceparent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return TraceContext(traceparent, span.trace_state.to_header())


Message = api.GenerateResponse | api.SessionEvent

# Errors that end the stream but not the request.
_BROKEN = (ServerUnreachable, StreamNotRead)
# Errors that a server reports while it, or its successor, starts.
_PASSING = (*_BROKEN, Draining, ModelNotReady, QueueFull, QuotaExceeded, RequestIdInUse)
# Remaining deadline of a request whose deadline has passed; servers only accept values above 0.
_LEAST_DEADLINE_S = 0.001


@dataclass(frozen=True, slots=True)
class Submission:
    """Arguments of a request; see `AsyncClient.generate`."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams | None = None
    request_id: str = ""
    resume_token_ids: ResumeTokenIds = ()
    scheduling: SchedulingParams | None = None
    encoder_token_ids: Sequence[int] = ()
    model_digest: str = ""
    trace_context: TraceContext = NO_TRACE
    encoder_features: bytes = b""


class ResumableRequest:
    """A request and its output so far, by sequence.

    Draws the seed and the request id if they are not given: a resumption needs the same seed
    (except for vectors), and an abort needs the id. If the best sequences are chosen at the end,
    all output is held until it is complete: a stream that breaks meanwhile starts over, and no
    output is returned twice.
    """

    def __init__(self, submission: Submission, clock: Callable[[], float]) -> None:
        params = submission.params or SamplingParams()
        if params.seed is None and params.pooling is None:
            params = replace(params, seed=secrets.randbits(63))
        self.request_id = submission.request_id or secrets.token_hex(16)
        self._scheduling = submission.scheduling or SchedulingParams()
        self._is_streamed = params.is_streamed
        trace = submission.trace_context
        if trace is NO_TRACE:
            trace = current_trace()
        self._constants = api.GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=list(submission.prompt_token_ids),
            sampling_params=encode_sampling_params(params),
            encoder_token_ids=list(submission.encoder_token_ids),
            model_digest=submission.model_digest,
            traceparent=trace.traceparent,
            tracestate=trace.tracestate,
            encoder_features=submission.encoder_features,
        )
        self._outputs = _by_index(submission.resume_token_ids)
        self._is_plain = not params.has_several_sequences and self._outputs.keys() <= {0}
        self._outputs.setdefault(0, array("i"))
        self._finished: set[int] = set()
        self._held: list[Message] = []
        self._clock = clock
        self._submitted_at: float | None = None
        self._num_prompt_logprobs = 0
        self._num_repeated_prompt_logprobs = 0
        self._was_lost = False

    # -- submission --------------------------------------------------------------------------------

    def message(self) -> api.GenerateRequest:
        """Returns the request message that asks for the missing output."""
        message = encode_scheduling_params(self._scheduling, self._remaining_deadline_s())
        message.MergeFrom(self._constants)
        if self._has_tokens and message.HasField("kept_output"):
            # Output that was kept has been received.
            message.kept_output.ClearField("resumes")
        if self._is_plain:
            message.resume_token_ids.extend(self._outputs[0])
            return message
        # Finished sequences are included: with all their tokens they end immediately.
        for index, token_ids in sorted(self._outputs.items()):
            if token_ids:
                message.resume_sequences.add(index=index, token_ids=token_ids)
        return message

    def _remaining_deadline_s(self) -> float | None:
        """Returns the remaining seconds of the deadline, which counts from the first submission."""
        deadline_s = self._scheduling.deadline_s
        if deadline_s is None:
            return None
        if self._submitted_at is None:
            self._submitted_at = self._clock()
            return deadline_s
        return max(deadline_s - (self._clock() - self._submitted_at), _LEAST_DEADLINE_S)

    # -- output ------------------------------------------------------------------------------------

    def receive(self, message: Message) -> list[Tokens | Finish]:
        """Records the output in `message`; returns the events that are new and complete.

        Raises the error of a failed request.
        """
        return [decode_event(part) for part in self.note(message)]

    def note(self, message: Message) -> list[Message]:
        """Records the output in `message` like `receive`, but returns encoded events."""
        match message.WhichOneof("event"):
            case "tokens":
                index = message.tokens.index
            case "sequence_finish":
                index = message.sequence_finish.index
            case "finish":
                return [*self._held, message]
            case _:
                return []
        if not self._is_streamed:
            self._held.append(message)
            return []
        return self._note(index, message) if index not in self._finished else []

    def note_token(self, token_id: int) -> None:
        """Records one token of a request with one plain sequence."""
        self._outputs[0].append(token_id)

    def _note(self, index: int, message: Message) -> list[Message]:
        if message.HasField("sequence_finish"):
            self._finished.add(index)
            return [message]
        tokens = message.tokens
        # If the stream broke before the first token, the prompt's logprobs arrive again.
        num_known = min(self._num_repeated_prompt_logprobs, len(tokens.prompt_logprobs))
        self._num_repeated_prompt_logprobs -= num_known
        del tokens.prompt_logprobs[:num_known]
        self._num_prompt_logprobs += len(tokens.prompt_logprobs)
        self._outputs.setdefault(index, array("i")).extend(tokens.token_ids)
        return [message] if tokens.token_ids or tokens.prompt_logprobs else []

    # -- loss of the stream ------------------------------------------------------------------------

    def can_resume(self, error: SplitserveError) -> bool:
        """Returns whether the request can be resumed after `error`.

        Records the loss of the stream.
        """
        is_resumption = self._was_lost or self._has_tokens
        if not isinstance(error, _PASSING if is_resumption else _BROKEN):
            return False
        self._was_lost = True
        self._held.clear()
        if not self._has_tokens:
            self._num_repeated_prompt_logprobs = self._num_prompt_logprobs
        return True

    def aborted(self) -> api.Finish:
        """Returns the Finish of a request that was aborted while no server had it."""
        usage = api.Usage(
            num_prompt_tokens=len(self._constants.prompt_token_ids),
            num_output_tokens=sum(map(len, self._outputs.values())),
        )
        return api.Finish(reason=api.FINISH_REASON_ABORTED, usage=usage)

    @property
    def _has_tokens(self) -> bool:
        return any(self._outputs.values())


def _by_index(token_ids: ResumeTokenIds) -> dict[int, array[int]]:
    if isinstance(token_ids, Mapping):
        return {index: array("i", tokens) for index, tokens in token_ids.items()}
    return {0: array("i", token_ids)}


async def stream_resumed(
    connection: Connection, request: ResumableRequest, backoff: Backoff
) -> AsyncGenerator[Tokens | Finish, None]:
    """Streams the events of `request` up to its Finish.

    Closing the iterator aborts the request. Raises SplitserveError.
    """
    await connection.connect()
    while True:
        try:
            async with aclosing(_attempt(connection, request, backoff.remaining_s())) as events:
                async for event in events:
                    backoff.reset()
                    yield event
                    if isinstance(event, Finish):
                        return
            lost: SplitserveError = ServerUnreachable("the stream ended without a finish")
        except SplitserveError as error:
            lost = error
        if not request.can_resume(lost):
            raise lost
        if isinstance(lost, RequestIdInUse):
            # The server has not noticed yet that the stream broke.
            with suppress(SplitserveError):
                await connection.abort(request.request_id)
        await backoff.pause(lost)


async def _attempt(
    connection: Connection, request: ResumableRequest, timeout_s: float | None
) -> AsyncGenerator[Tokens | Finish, None]:
    responses = connection.stream(
        lambda stubs: stubs.scheduler.Generate, request.message(), timeout_s
    )
    async with aclosing(responses):
        async for response in responses:
            for event in request.receive(response):
                yield event
