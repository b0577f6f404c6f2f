"""A scheduler that makes tokens up: what follows depends on prompt, seed and position alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.server import RunningServer, bind_server

SERVICE = "splitserve.scheduler.v1.SchedulerService"
VOCAB_SIZE = 1000


class Cut(Exception):
    """The connection is to break here."""


def token_at(prompt: Sequence[int], seed: int, position: int) -> int:
    return (sum(prompt) * 31 + seed * 17 + position * 7) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], seed: int, max_tokens: int) -> list[int]:
    return [token_at(prompt, seed, position) for position in range(max_tokens)]


@dataclass
class FakeScheduler(
    scheduler_pb2_grpc.SchedulerServiceServicer, admin_pb2_grpc.AdminServiceServicer
):
    """Serves; before the token with the number `n` of all it calls `before_token(n)`."""

    before_token: Callable[[int], None] = lambda number: None
    before_request: Callable[[scheduler_pb2.GenerateRequest], None] = lambda request: None
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    requests: list[scheduler_pb2.GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_tokens: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        try:
            async for chunk in self._tokens(request):
                yield scheduler_pb2.GenerateResponse(tokens=chunk)
            yield scheduler_pb2.GenerateResponse(finish=_finish(request))
        except Cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        finally:
            self.ended.set()

    async def Session(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        out: asyncio.Queue[scheduler_pb2.SessionResponse | Cut] = asyncio.Queue()
        running: dict[int, asyncio.Task[None]] = {}

        async def read() -> None:
            async for message in request_iterator:
                if message.HasField("submit"):
                    handle = message.submit.handle
                    work = self._run_in_session(message.submit, out)
                    running[handle] = asyncio.create_task(work)
                else:
                    handle = message.abort.handle
                    running[handle].cancel()
                    reason = scheduler_pb2.FINISH_REASON_ABORTED
                    event = scheduler_pb2.SessionEvent(
                        handle=handle, finish=scheduler_pb2.Finish(reason=reason)
                    )
                    out.put_nowait(scheduler_pb2.SessionResponse(events=[event]))

        reader = asyncio.create_task(read())
        try:
            while True:
                response = await out.get()
                if isinstance(response, Cut):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                yield response
        finally:
            for task in (reader, *running.values()):
                task.cancel()

    async def _run_in_session(
        self,
        submit: scheduler_pb2.SessionSubmit,
        out: asyncio.Queue[scheduler_pb2.SessionResponse | Cut],
    ) -> None:
        handle = submit.handle
        event = scheduler_pb2.SessionEvent(handle=handle)
        try:
            async for chunk in self._tokens(submit.request):
                if chunk.logprobs or chunk.prompt_logprobs:
                    event = scheduler_pb2.SessionEvent(handle=handle, tokens=chunk)
                    out.put_nowait(scheduler_pb2.SessionResponse(events=[event]))
                else:
                    out.put_nowait(
                        scheduler_pb2.SessionResponse(handles=[handle], token_ids=chunk.token_ids)
                    )
            event = scheduler_pb2.SessionEvent(handle=handle, finish=_finish(submit.request))
        except DomainError as error:
            rejected = scheduler_pb2.RequestError(reason=error.reason, message=error.message)
            event = scheduler_pb2.SessionEvent(handle=handle, rejected=rejected)
        except Cut as cut:
            out.put_nowait(cut)
            return
        out.put_nowait(scheduler_pb2.SessionResponse(events=[event]))

    async def _tokens(
        self, request: scheduler_pb2.GenerateRequest
    ) -> AsyncIterator[scheduler_pb2.TokenChunk]:
        self.requests.append(request)
        self.before_request(request)
        params = request.sampling_params
        if params.HasField("num_prompt_logprobs") and not request.resume_token_ids:
            for token_id in request.prompt_token_ids[1:]:
                yield scheduler_pb2.TokenChunk(prompt_logprobs=[_score(token_id)])
        for position in range(len(request.resume_token_ids), params.max_tokens):
            self.num_tokens += 1
            self.before_token(self.num_tokens - 1)
            if self.hold is not None:
                await self.hold.wait()
            token_id = token_at(request.prompt_token_ids, params.seed, position)
            logprobs = [_score(token_id)] if params.HasField("num_logprobs") else []
            yield scheduler_pb2.TokenChunk(token_ids=[token_id], logprobs=logprobs)

    async def Abort(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        if request.request_id == "unknown":
            raise DomainError("REQUEST_UNKNOWN", "no unfinished request has this id")
        self.aborted.append(request.request_id)
        return scheduler_pb2.AbortResponse()

    async def GetModel(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        return scheduler_pb2.GetModelResponse(
            name="fake",
            digest="00ff",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len_tokens=128,
            eos_token_ids=[1],
        )

    async def GetTokenizer(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        if not self.tokenizer_files:
            raise DomainError("TOKENIZER_UNAVAILABLE", "the executors offer no tokenizer")
        for name, data in self.tokenizer_files.items():
            for start in range(0, len(data), 1000):
                piece = data[start : start + 1000]
                yield scheduler_pb2.GetTokenizerResponse(file_name=name, data=piece)

    async def ListExecutors(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        info = executor_pb2.ExecutorInfo(
            address="127.0.0.1:9",
            executor_epoch=5,
            model=executor_pb2.ModelInfo(name="fake", dtype="float32"),
            block_size_tokens=16,
            num_device_blocks=64,
        )
        state = admin_pb2.ExecutorState(executor=info, connected=True, num_free_device_blocks=60)
        return admin_pb2.ListExecutorsResponse(executors=[state], num_unassigned_requests=2)


async def start(fake: FakeScheduler, address: str = "127.0.0.1:0") -> RunningServer:
    running = bind_server(address, [SERVICE])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, running.server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(fake, running.server)
    await running.server.start()
    return running


def _finish(request: scheduler_pb2.GenerateRequest) -> scheduler_pb2.Finish:
    usage = scheduler_pb2.Usage(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=request.sampling_params.max_tokens,
    )
    return scheduler_pb2.Finish(reason=scheduler_pb2.FINISH_REASON_LENGTH, usage=usage)


def _score(token_id: int) -> scheduler_pb2.TokenLogprob:
    top = [scheduler_pb2.TopLogprob(token_id=token_id, logprob=-0.5)]
    return scheduler_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=top)
