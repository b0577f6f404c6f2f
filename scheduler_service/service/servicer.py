"""SchedulerService: the API for clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio

from scheduler_service.audit import Audit
from scheduler_service.callers import Admission, AllowAllCallers, Caller, Callers, Scope
from scheduler_service.driver import Driver
from scheduler_service.scheduler import FAULT_MESSAGE, FAULT_REASON
from scheduler_service.service.caller_checks import CallerChecks, CallerNames
from scheduler_service.service.intake import AcceptedRequest, Intake
from scheduler_service.service.open_calls import OpenCalls
from scheduler_service.service.readiness import Readiness
from scheduler_service.service.refusals import RefusalPause, RefusalPauses, RequestLog, Sleep
from scheduler_service.streams import (
    MAX_KEPT_S,
    GenerateStream,
    RequestSink,
    SessionStream,
    client_key,
    encode_adapter,
    encode_default_sampling,
    encode_rejection,
)
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_common import LogContext, log_context
from splitserve_contract import DomainError
from splitserve_rpc import duration_from_s

if TYPE_CHECKING:
    from scheduler_service.watching.request_traces import RequestTraces

# Bytes of a chunk of a tokenizer file, which a call holds while its caller does not read.
_CHUNK_BYTES = 64 * 1024
# The message has no fields, but a call keeps it, with unknown fields, as long as it is open.
_MAX_TOKENIZER_REQUEST_BYTES = 1024
# Requests of one message that are submitted before the event loop runs other work.
_SUBMITTED_AT_ONCE = 8
# Submits of a Session that wait for files of adapters at a time.
_MAX_SLOW_SUBMITS = 256
# A caller with one of these scopes submits for many tenants, which must not slow each other down.
_FOR_OTHERS = frozenset({Scope.GATEWAY, Scope.TENANTS})

_NO_TOKENIZER = (
    "the executors offer no tokenizer: their checkpoint has no readable tokenizer.json,"
    " tokenizer.model, vocab.json with merges.txt, or tekken.json"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opener:
    """Opener of a Session: its credential, its gRPC peer, and its backoff after refusals."""

    credential: str
    peer: str
    pause: RefusalPause


class SlowSubmits:
    """Submits of one Session that wait for the files of an adapter, while others go on, by handle.

    A context manager, which waits for all of them at the end. Raises what they raise. `outcomes`:
    of submits since the last pause, why each was refused; None for an accepted one.
    """

    def __init__(self) -> None:
        self.outcomes: list[str | None] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:  # noqa: ANN401
        try:
            await self._group.__aexit__(*error)
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    def __contains__(self, handle: int) -> bool:
        return handle in self._tasks

    async def begin(self, handle: int, submit: Coroutine[Any, Any, None]) -> None:
        """Starts `submit`; waits first while _MAX_SLOW_SUBMITS others are unfinished."""
        if len(self._tasks) >= _MAX_SLOW_SUBMITS:
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        task = self._tasks[handle] = self._group.create_task(submit)
        task.add_done_callback(lambda _task: self._tasks.pop(handle))

    def then(self, handle: int, action: Callable[[], None]) -> None:
        """Calls `action` after the submit of `handle`; at once if none is unfinished."""
        task = self._tasks.get(handle)
        if task is None:
            action()
        else:
            task.add_done_callback(lambda _task: action())


def _audio_of(encoder: executor.EncoderInfo) -> api.AudioInfo | None:
    if not encoder.HasField("audio"):
        return None
    audio = encoder.audio
    return api.AudioInfo(
        num_mel_bins=audio.num_mel_bins,
        num_frames=audio.num_frames,
        num_positions=audio.num_positions,
        sampling_rate=audio.sampling_rate,
        hop_length=audio.hop_length,
        fft_length=audio.fft_length,
    )


def _handle_in_use(handle: int) -> DomainError:
    return DomainError("SESSION_PROTOCOL", f"handle {handle} is in use in this session")


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Implements Generate, Session, Abort, GetModel, Identify, GetTokenizer and ListAdapters.

    `splitserve_rpc.access` checks the scopes that a method needs. The servicer checks which request
    belongs to which caller.
    """

    def __init__(
        self,
        cluster: Driver,
        callers: Callers | None = None,
        audit: Audit | None = None,
        sleep: Sleep = asyncio.sleep,
        readiness: Callable[[], Readiness] = lambda: Readiness.READY,
        traces: RequestTraces | None = None,
    ) -> None:
        """Builds the intake and the limits on open calls.

        `callers` None: callers need no credential. `audit` None: no audit log. `traces` None: no
        traces. `readiness` returns the readiness that GetModel reports.
        """
        callers = callers or AllowAllCallers()
        self._cluster = cluster
        self._checks = CallerChecks(callers)
        self._names = CallerNames(callers)
        self._intake = Intake(cluster, callers)
        self._request_log = RequestLog(cluster, audit, tells_tenants_apart=callers.knows_callers)
        self._open_calls = OpenCalls()
        self._pauses = RefusalPauses(sleep)
        self._readiness = readiness
        self._traces = traces

    async def Generate(
        self, request: api.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        """Streams one completion; the request ends with the call, for whatever reason that ends."""
        caller = self._checks.of_call(context)
        with self._request_log.refusals(request, caller):
            self._cluster.check_accepting()
        stream = GenerateStream(self._cluster.delivery.new_outbox())
        tenant = self._checks.known_tenant(caller)
        with self._open_calls.stream(tenant), self._cluster.client_stream(stream):
            if request.adapter:
                async with self._intake.looking_at_adapter(request):
                    self._generate(request, caller, stream, context)
            else:
                self._generate(request, caller, stream, context)
            while (response := await stream.outbox.get()) is not None:
                yield response

    def _generate(
        self,
        request: api.GenerateRequest,
        caller: Caller,
        stream: GenerateStream,
        context: grpc.aio.ServicerContext,
    ) -> None:
        with self._request_log.refusals(request, caller):
            accepted = self._intake.accept(request, caller)
            accepted.request.client_key = client_key(stream.number, 0)
            stream.request_id = accepted.admission.name.own_id
            with self._traced(accepted, request, context) as admission:
                sink = RequestSink(stream, 0)
                self._cluster.submit(accepted.request, sink, admission, accepted.keeping)

    async def Session(
        self,
        request_iterator: AsyncIterator[api.SessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[bytes, None]:
        """Multiplexes requests until the client has half-closed and all requests have ended."""
        stream = SessionStream(self._cluster.delivery.new_outbox())
        caller = self._checks.of_call(context)
        tenant = self._checks.known_tenant(caller)
        with self._open_calls.stream(tenant), self._cluster.client_stream(stream):
            pause = self._pauses.of(None if caller.scopes & _FOR_OTHERS else tenant)
            opener = Opener(self._checks.credential_of(context), context.peer(), pause)
            reader = asyncio.create_task(self._read_session(request_iterator, stream, opener))
            reader.add_done_callback(partial(self._reading_ended, stream))
            try:
                while (response := await stream.outbox.get()) is not None:
                    yield response
            finally:
                reader.cancel()
                await asyncio.wait({reader})

    def _reading_ended(self, stream: SessionStream, reader: asyncio.Task[None]) -> None:
        if reader.cancelled():
            return
        error = reader.exception()
        if error is None:
            stream.half_close()
            return
        if not isinstance(error, DomainError):
            _log.error("session_failed", exc_info=error)
            error = DomainError(FAULT_REASON, FAULT_MESSAGE)
        self._cluster.fail_stream(stream, error)

    async def _read_session(
        self,
        request_iterator: AsyncIterator[api.SessionRequest],
        stream: SessionStream,
        opener: Opener,
    ) -> None:
        async with SlowSubmits() as slow:
            async for message in request_iterator:
                if stream.outbox.has_ended:
                    return
                match message.WhichOneof("action"):
                    case "submit":
                        await self._submit_in_turn([message.submit], stream, opener, slow)
                    case "abort":
                        handle = message.abort.handle
                        slow.then(handle, partial(self._abort, stream, handle))
                    case _ if not message.submissions:
                        raise DomainError("SESSION_PROTOCOL", "a message has no action")
                await self._submit_in_turn(message.submissions, stream, opener, slow)

    def _abort(self, stream: SessionStream, handle: int) -> None:
        name = stream.names.get(handle)
        if name is not None:
            self._cluster.abort(name)

    async def _submit_in_turn(
        self,
        submissions: Sequence[api.SessionSubmit],
        stream: SessionStream,
        opener: Opener,
        slow: SlowSubmits,
    ) -> None:
        for number, submit in enumerate(submissions, 1):
            if stream.outbox.has_ended:
                return
            if submit.handle in slow:
                raise _handle_in_use(submit.handle)
            if submit.request.adapter:
                looking = self._look_and_submit(submit, stream, opener, slow)
                await slow.begin(submit.handle, looking)
            else:
                slow.outcomes.append(self._submit(submit, stream, opener))
            while slow.outcomes:
                await opener.pause.after(slow.outcomes.pop(0))
            # A client that does not read its refusals gets no more of them: its submits wait.
            await stream.outbox.wait_for_room()
            if number % _SUBMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # lets steps run between the requests of a long message

    async def _look_and_submit(
        self,
        submit: api.SessionSubmit,
        stream: SessionStream,
        opener: Opener,
        slow: SlowSubmits,
    ) -> None:
        async with self._intake.looking_at_adapter(submit.request):
            if not stream.outbox.has_ended:
                slow.outcomes.append(self._submit(submit, stream, opener))

    def _submit(
        self, submit: api.SessionSubmit, stream: SessionStream, opener: Opener
    ) -> str | None:
        """Submits a request of a Session; returns the reason if it was refused, else None.

        Raises DomainError(SESSION_PROTOCOL) if the handle is in use.
        """
        handle = submit.handle
        if handle in stream.names:
            raise _handle_in_use(handle)
        try:
            name = partial(self._names.of_submit, opener.credential, submit.credential)
            with self._request_log.unknown_callers(opener.peer, name):
                caller = self._checks.of_submit(opener.credential, submit.credential)
            with self._request_log.refusals(submit.request, caller):
                self._cluster.check_accepting()
                accepted = self._intake.accept(submit.request, caller)
                accepted.request.client_key = client_key(stream.number, handle)
                stream.begin(handle, accepted.admission.name)
                sink = RequestSink(stream, handle)
                is_of_gateway = self._checks.is_of_gateway(submit.credential)
                traced = self._traced(accepted, submit.request, is_of_gateway=is_of_gateway)
                with traced as admission:
                    self._cluster.submit(accepted.request, sink, admission, accepted.keeping)
        except DomainError as error:
            stream.names.pop(handle, None)
            stream.reject(handle, encode_rejection(error))
            self._cluster.delivery.flush([stream])
            return error.reason
        return None

    @contextmanager
    def _traced(
        self,
        accepted: AcceptedRequest,
        message: api.GenerateRequest,
        context: grpc.aio.ServicerContext | None = None,
        *,
        is_of_gateway: bool = False,
    ) -> Iterator[Admission]:
        """Traces the submission of a request in the block; yields its admission with the trace id.

        A DomainError raised in the block ends the trace. `context`: context of a call that serves
        this request alone, None in a Session.
        """
        own_id = accepted.admission.name.own_id
        admission, trace_id = accepted.admission, ""
        if self._traces is not None:
            trace_id = self._traces.begin(
                accepted.request, own_id, message, context, is_of_gateway=is_of_gateway
            )
            admission = replace(admission, trace_id=trace_id)
        try:
            yield admission
        except DomainError as error:
            if self._traces is not None:
                self._traces.refused(accepted.request, error.reason)
            raise
        if context is not None:
            # Not before the submission: steps that it starts must not log this request's ids.
            log_context.set(LogContext(own_id, trace_id))

    async def Abort(
        self, request: api.AbortRequest, context: grpc.aio.ServicerContext
    ) -> api.AbortResponse:
        """Aborts a request; the Finish goes to the request's own stream."""
        caller = self._checks.of_call(context)
        self._cluster.abort(self._intake.name(caller, request.request_id))
        return api.AbortResponse()

    async def GetModel(
        self, request: api.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> api.GetModelResponse:
        """Returns the model of the executors, with its limits and the readiness."""
        model = self._model_for(context)
        return api.GetModelResponse(
            name=model.name,
            digest=model.digest,
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            max_model_len_tokens=self._cluster.served.max_model_len,
            eos_token_ids=model.eos_token_ids,
            default_sampling_params=encode_default_sampling(model.default_sampling_params),
            max_message_bytes=self._cluster.served.max_message_bytes,
            readiness=f"READINESS_{self._readiness().value}",
            max_num_sequences=self._cluster.served.max_num_sequences,
            quantization=model.quantization,
            encoder=self._encoder_of(model),
            pooling=_pooling_of(model),
            max_kept_duration=duration_from_s(MAX_KEPT_S),
        )

    def _encoder_of(self, model: executor.ModelInfo) -> api.EncoderInfo | None:
        if not model.HasField("encoder"):
            return None
        return api.EncoderInfo(
            max_tokens=self._cluster.served.max_encoder_tokens,
            decoder_token_ids=model.encoder.decoder_token_ids,
            audio=_audio_of(model.encoder),
        )

    def _model_for(self, context: grpc.aio.ServicerContext) -> executor.ModelInfo:
        """Returns the model if the caller may use it. Raises DomainError."""
        caller = self._checks.of_call(context)
        model = self._cluster.served.model
        if model is None:
            raise DomainError("MODEL_NOT_READY", "no executor has registered yet")
        self._checks.check_model(caller, model.name)
        return model

    async def ListAdapters(
        self, request: api.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> api.ListAdaptersResponse:
        """Returns the registered adapters that the caller's tenant may use."""
        caller = self._checks.of_call(context)
        registered = await self._cluster.adapters.listed()
        allowed = self._checks.allowed_adapters(caller, registered)
        return api.ListAdaptersResponse(adapters=map(encode_adapter, allowed))

    async def Identify(
        self, request: api.IdentifyRequest, context: grpc.aio.ServicerContext
    ) -> api.IdentifyResponse:
        """Returns the caller, tenant and scopes of a credential."""
        return self._checks.identify(request.credential, self._cluster.served.model)

    async def GetTokenizer(
        self, request: api.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[api.GetTokenizerResponse]:
        """Streams the tokenizer files in chunks of at most 64 KiB."""
        if (num_bytes := request.ByteSize()) > _MAX_TOKENIZER_REQUEST_BYTES:
            message = f"the request has {num_bytes} bytes; allowed: {_MAX_TOKENIZER_REQUEST_BYTES}"
            raise DomainError("MESSAGE_TOO_LARGE", message)
        self._model_for(context)
        if not self._cluster.served.tokenizer_files:
            raise DomainError("TOKENIZER_UNAVAILABLE", _NO_TOKENIZER)
        async with self._open_calls.tokenizer(self._checks.owner_of(context)):
            for name, data in self._cluster.served.tokenizer_files.items():
                for start in range(0, max(len(data), 1), _CHUNK_BYTES):
                    end = start + _CHUNK_BYTES
                    yield api.GetTokenizerResponse(file_name=name, data=data[start:end])


def _pooling_of(model: executor.ModelInfo) -> api.PoolingInfo | None:
    if not model.HasField("pooling"):
        return None
    pooling = model.pooling
    return api.PoolingInfo(embedding_size=pooling.embedding_size, labels=pooling.labels)
