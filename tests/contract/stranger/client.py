"""A client written from scheduler.proto alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from splitserve.scheduler.v1 import scheduler_pb2 as pb
from splitserve.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

# A machine with much other work takes its time.
TIMEOUT_S = 240.0
# grpc.aio has no types.
Call: TypeAlias = Any
# Whatever the field of SamplingParams takes.
Param: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What programs may decide by."""

    code: grpc.StatusCode
    reason: str
    domain: str
    message: str
    retry_delay_s: float | None


def read_error(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """Reads ErrorInfo and RetryInfo from the status details."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    retry_delay_s = None
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_delay_s = retry.retry_delay.ToTimedelta().total_seconds()
    return ErrorDetails(
        error.code(), info.reason, info.domain, error.details() or "", retry_delay_s
    )


@dataclass(slots=True)
class Completion:
    """Everything a stream brought so far."""

    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    finish: pb.Finish | None = None

    def add(self, response: pb.GenerateResponse) -> None:
        """Takes the next message."""
        assert self.finish is None, "a message after the finish"
        self.request_id = response.request_id
        kind = response.WhichOneof("event")
        assert kind is not None, "a message without an event"
        if kind == "finish":
            self.finish = response.finish
        else:
            self.add_chunk(response.tokens)

    def add_chunk(self, chunk: pb.TokenChunk) -> None:
        """Takes new tokens."""
        assert chunk.token_ids or chunk.prompt_logprobs, "an empty chunk"
        assert not chunk.logprobs or len(chunk.logprobs) == len(chunk.token_ids)
        assert not (self.tokens and chunk.prompt_logprobs), "prompt logprobs after a token"
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs

    @property
    def reason(self) -> str:
        """Name of the finish reason without its prefix."""
        assert self.finish is not None, "no finish"
        return pb.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_")


def request_of(
    prompt: Sequence[int],
    request_id: str = "",
    **params: Param,
) -> pb.GenerateRequest:
    """A GenerateRequest whose sampling params are `params`."""
    return pb.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=pb.SamplingParams(**params),
    )


class Generation:
    """A running Generate call."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.completion = Completion()

    async def read_until(self, num_tokens: int) -> Completion:
        """Reads until there are `num_tokens` tokens, or the end."""
        while len(self.completion.tokens) < num_tokens and self.completion.finish is None:
            response = await self.call.read()
            assert response is not grpc.aio.EOF, "the stream ended without a finish"
            self.completion.add(response)
        return self.completion

    async def finish(self) -> Completion:
        """Reads to the end of the stream. Raises AioRpcError."""
        while (response := await self.call.read()) is not grpc.aio.EOF:
            self.completion.add(response)
        assert self.completion.finish is not None, "the stream ended without a finish"
        return self.completion

    def cancel(self) -> None:
        """Cancels the call."""
        self.call.cancel()


class StrangerClient:
    """Generate, Session, Abort and resumption."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = pb_grpc.SchedulerServiceStub(channel)

    def start(self, request: pb.GenerateRequest, timeout_s: float = TIMEOUT_S) -> Generation:
        """Starts a Generate call."""
        return Generation(self.stub.Generate(request, timeout=timeout_s))

    async def generate(self, request: pb.GenerateRequest) -> Completion:
        """Reads a whole completion. Raises AioRpcError."""
        return await self.start(request).finish()

    async def generate_all(self, requests: Sequence[pb.GenerateRequest]) -> list[Completion]:
        """Reads several completions at once."""
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def refusal(self, request: pb.GenerateRequest) -> ErrorDetails | None:
        """How `request` is refused; None if it is not."""
        try:
            await self.generate(request)
        except grpc.aio.AioRpcError as error:
            return read_error(error)
        return None

    async def resume(self, request: pb.GenerateRequest, received: Sequence[int]) -> Completion:
        """Continues after a broken stream that brought `received`."""
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        again.request_id = ""
        again.resume_token_ids[:] = received
        return await self.generate(again)

    async def abort(self, request_id: str) -> None:
        """Aborts by id. Raises AioRpcError."""
        await self.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=TIMEOUT_S)

    def session(self, timeout_s: float = TIMEOUT_S) -> "Session":
        """Opens a Session."""
        return Session(self.stub.Session(timeout=timeout_s))

    async def get_model(self) -> pb.GetModelResponse:
        """Which model is served. Raises AioRpcError."""
        response = await self.stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT_S)
        assert isinstance(response, pb.GetModelResponse)
        return response

    async def get_tokenizer(self) -> dict[str, bytes]:
        """The tokenizer files. Raises AioRpcError."""
        files: dict[str, bytes] = {}
        last = ""
        async for part in self.stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=TIMEOUT_S):
            assert part.file_name == last or part.file_name not in files, "chunks are scattered"
            last = part.file_name
            files[last] = files.get(last, b"") + part.data
        return files


class Session:
    """A running Session call; keeps what every handle got."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.completions: dict[int, Completion] = {}
        self.rejected: dict[int, pb.RequestError] = {}
        self.messages: list[pb.SessionResponse] = []

    async def submit(self, handle: int, request: pb.GenerateRequest) -> None:
        """Submits a request."""
        submit = pb.SessionSubmit(handle=handle, request=request)
        self.completions[handle] = Completion()
        await self.send(pb.SessionRequest(submit=submit))

    async def abort(self, handle: int) -> None:
        """Aborts a request."""
        await self.send(pb.SessionRequest(abort=pb.SessionAbort(handle=handle)))

    async def send(self, request: pb.SessionRequest) -> None:
        """Sends any message."""
        await self._call.write(request)

    async def half_close(self) -> None:
        """Submits no more."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """Breaks the stream."""
        self._call.cancel()

    async def read_all(self) -> None:
        """Reads to the end of the stream. Raises AioRpcError."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self._add(message)

    async def read_until_ended(self, handle: int) -> None:
        """Reads until the request of `handle` has finished or was rejected."""
        while self.completions[handle].finish is None and handle not in self.rejected:
            message = await self._call.read()
            assert message is not grpc.aio.EOF, "the stream ended too early"
            self._add(message)

    async def read_until_token(self, handle: int) -> None:
        """Reads until the request of `handle` has a token."""
        while not self.completions[handle].tokens:
            message = await self._call.read()
            assert message is not grpc.aio.EOF, "the stream ended too early"
            self._add(message)

    def _add(self, message: pb.SessionResponse) -> None:
        self.messages.append(message)
        assert len(message.handles) == len(message.token_ids)
        for handle, token_id in zip(message.handles, message.token_ids, strict=True):
            assert self.completions[handle].finish is None, "a token after the finish"
            self.completions[handle].tokens.append(token_id)
        for event in message.events:
            self._add_event(event)

    def _add_event(self, event: pb.SessionEvent) -> None:
        completion = self.completions[event.handle]
        assert completion.finish is None, "an event after the finish"
        match event.WhichOneof("event"):
            case "tokens":
                completion.add_chunk(event.tokens)
            case "finish":
                completion.finish = event.finish
            case "rejected":
                self.rejected[event.handle] = event.rejected
            case None:
                raise AssertionError("an event without content")
