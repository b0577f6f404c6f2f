"""A scheduler without executors: tokens are functions of prompt, seed and position."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc.aio

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError
from splitserve_rpc import OPEN, RunningServer, ServerSecurity, bind_server, duration_from_s

VOCAB_SIZE = 1000


def token_at(prompt: Sequence[int], seed: int, position: int) -> int:
    return (sum(prompt) * 31 + seed * 17 + position * 7) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], seed: int, max_tokens: int, index: int = 0) -> list[int]:
    """Tokens of sequence `index` of a request with `seed`."""
    seed = sequence_seed(seed, index)
    return [token_at(prompt, seed, position) for position in range(max_tokens)]


def sequence_seed(seed: int, index: int) -> int:
    word = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return word - 2**64 if word >= 2**63 else word


def logprob_of(token_id: int) -> float:
    return -(token_id % 8 + 1) / 8


def score_of(token_id: int) -> api.TokenLogprob:
    top = [api.TopLogprob(token_id=token_id, logprob=-0.5)]
    return api.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=top)


class FakeSequence:
    """Sequence that ends with a stop token or at its maximum length."""

    def __init__(
        self,
        request: api.GenerateRequest,
        index: int,
        resume_token_ids: Sequence[int],
        output: Sequence[int] = (),
    ) -> None:
        self._output = output
        self._request = request
        self._seed = sequence_seed(request.sampling_params.seed, index)
        self.index = index
        self.token_ids = list(resume_token_ids)

    @property
    def reason(self) -> api.FinishReason | None:
        params = self._request.sampling_params
        is_said = self._output and len(self.token_ids) == len(self._output)
        if is_said or (self.token_ids and self.token_ids[-1] in params.stop_token_ids):
            return api.FINISH_REASON_STOP
        return api.FINISH_REASON_LENGTH if len(self.token_ids) >= params.max_tokens else None

    @property
    def cumulative_logprob(self) -> float:
        return sum(map(logprob_of, self.token_ids))

    @property
    def score(self) -> float:
        beams = self._request.sampling_params.beam_search
        penalty = beams.length_penalty if beams.HasField("length_penalty") else 1.0
        return float(self.cumulative_logprob / len(self.token_ids) ** penalty)

    def step(self) -> api.TokenChunk:
        prompt = self._request.prompt_token_ids
        position = len(self.token_ids)
        computed = token_at(prompt, self._seed, position)
        self.token_ids.append(self._output[position] if self._output else computed)
        return self.chunk(self.token_ids[-1:])

    def chunk(self, token_ids: Sequence[int]) -> api.TokenChunk:
        wants_logprobs = self._request.sampling_params.HasField("num_logprobs")
        logprobs = list(map(score_of, token_ids)) if wants_logprobs else []
        return api.TokenChunk(token_ids=token_ids, logprobs=logprobs, index=self.index)

    def finish(self) -> api.SequenceFinish:
        finish = api.SequenceFinish(
            index=self.index, reason=self.reason, num_output_tokens=len(self.token_ids)
        )
        if self.reason == api.FINISH_REASON_STOP:
            finish.stop_token_id = self.token_ids[-1]
        params = self._request.sampling_params
        if not is_streamed(params):
            finish.cumulative_logprob = self.cumulative_logprob
        if params.HasField("beam_search"):
            finish.score = self.score
        return finish


def make_sequences(request: api.GenerateRequest, output: Sequence[int] = ()) -> list[FakeSequence]:
    """The sequences of `request`. Raises DomainError where it is resumed as it may not be."""
    params = request.sampling_params
    num_sequences = max(params.n or 1, params.best_of, params.beam_search.width)
    resumed = {entry.index: entry.token_ids for entry in request.resume_sequences}
    if (resumed and request.resume_token_ids) or (resumed and not is_streamed(params)):
        raise DomainError("SAMPLING_PARAMS_INVALID", "resume_sequences is not allowed here")
    if request.resume_token_ids:
        if has_several_sequences(params):
            raise DomainError("SAMPLING_PARAMS_INVALID", "resume_token_ids is not allowed here")
        resumed = {0: request.resume_token_ids}
    indices = range(num_sequences)
    return [FakeSequence(request, i, resumed.get(i, ()), output) for i in indices]


def choose_best(
    sequences: Sequence[FakeSequence], params: api.SamplingParams
) -> list[FakeSequence]:
    """The n best, renumbered."""
    best = sorted(sequences, key=lambda sequence: -sequence.score)[: params.n or 1]
    for index, sequence in enumerate(best):
        sequence.index = index
    return best


def has_several_sequences(params: api.SamplingParams) -> bool:
    return max(params.n, params.best_of) > 1 or params.HasField("beam_search")


def is_streamed(params: api.SamplingParams) -> bool:
    return params.best_of <= (params.n or 1) and not params.HasField("beam_search")


def make_finish(request: api.GenerateRequest, sequences: Sequence[FakeSequence]) -> api.Finish:
    usage = api.Usage(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=sum(len(sequence.token_ids) for sequence in sequences),
    )
    return api.Finish(reason=sequences[0].reason, usage=usage)


def vector_of(
    token_ids: Sequence[int], pooling: api.PoolingParams, info: api.PoolingInfo
) -> list[float]:
    """Vector of a prompt: a function of its tokens, their order, and what is asked for."""
    is_embedding = pooling.task == api.POOLING_TASK_EMBEDDING or (
        not pooling.task and info.embedding_size > 0
    )
    size = info.embedding_size if is_embedding else len(info.labels)
    size = pooling.num_dimensions or size
    mixed = 1 + sum(place * token_id for place, token_id in enumerate(token_ids, 1))
    mixed += 31 * pooling.second_text_start
    numbers = [math.sin(mixed * (place + 1)) for place in range(size)]
    if pooling.raw:
        return numbers
    if is_embedding:
        length = math.hypot(*numbers)
        return [number / length for number in numbers]
    return [1 / (1 + math.exp(-number)) for number in numbers]


def make_vector(request: api.GenerateRequest, info: api.PoolingInfo | None) -> api.Finish:
    """The end of a request for a vector. Raises DomainError where it is not as it should be."""
    params = request.sampling_params
    if info is None:
        raise DomainError("FEATURE_UNSUPPORTED", "the model returns no vectors")
    if [field.name for field, _ in params.ListFields()] != ["pooling"]:
        raise DomainError("SAMPLING_PARAMS_INVALID", "a parameter beside pooling is set")
    vector = vector_of(request.prompt_token_ids, params.pooling, info)
    usage = api.Usage(num_prompt_tokens=len(request.prompt_token_ids))
    column = struct.pack(f"<{len(vector)}f", *vector)
    return api.Finish(reason=api.FINISH_REASON_STOP, usage=usage, vector=column)


SERVICE = "splitserve.scheduler.v1.SchedulerService"
# Of a model by its authors: all that clients may take from a recommendation.
RECOMMENDED: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
}


class Cut(Exception):
    """Breaks the connection, or ends the stream with the DomainError in it."""

    async def end(self, context: grpc.aio.ServicerContext) -> NoReturn:
        for error in self.args:
            raise error
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        raise AssertionError("abort raises")


class Failed(Exception):
    """Ends the request with an error of this reason."""


@dataclass
class FakeScheduler(
    scheduler_pb2_grpc.SchedulerServiceServicer, admin_pb2_grpc.AdminServiceServicer
):
    """Serves; before the token with the number `n` of all it calls `before_token(n)`.

    Where the best sequences are chosen at the end, the chunk of each of them counts as one more.
    """

    before_token: Callable[[int], None] = lambda number: None
    before_request: Callable[[scheduler_pb2.GenerateRequest], None] = lambda request: None
    before_abort: Callable[[], None] = lambda: None
    before_model: Callable[[], None] = lambda: None
    # Outputs of the next requests, instead of computed ones; each ends as by a stop token.
    outputs: list[Sequence[int]] = field(default_factory=list)
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    max_model_len: int = 128
    name: str = "fake"
    model_digest: str = "00ff"
    default_sampling_params: scheduler_pb2.SamplingParams | None = None
    slow_compute_reason: str = ""
    quantization: str = ""
    # Vectors that the model returns instead of tokens.
    pooling: scheduler_pb2.PoolingInfo | None = None
    # Paths of the listed adapters by name. `adapter_refusal`: reason of refusing any other; empty:
    # others are served, too.
    adapters: dict[str, str] = field(default_factory=dict)
    adapter_refusal: str = ""
    num_lists: int = 0
    hold: asyncio.Event | None = None
    requests: list[scheduler_pb2.GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_tokens: int = 0
    max_message_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    takes_submissions: bool = False
    session_messages: list[scheduler_pb2.SessionRequest] = field(default_factory=list)

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        try:
            async for response in self._events(request):
                yield response
        except Cut as cut:
            await cut.end(context)
        finally:
            self.ended.set()

    async def Session(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        out: asyncio.Queue[scheduler_pb2.SessionResponse | Cut] = asyncio.Queue()
        running: dict[int, asyncio.Task[None]] = {}

        async def read() -> None:
            async for message in request_iterator:
                self.session_messages.append(message)
                submissions = [message.submit] if message.HasField("submit") else []
                for submit in (*submissions, *message.submissions):
                    work = self._run_in_session(submit, out)
                    running[submit.handle] = asyncio.create_task(work)
                if message.HasField("abort"):
                    handle = message.abort.handle
                    running[handle].cancel()
                    try:
                        self.before_abort()
                    except Cut as cut:
                        out.put_nowait(cut)
                        return
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
                    await response.end(context)
                response.takes_submissions = self.takes_submissions
                yield response
        finally:
            for task in (reader, *running.values()):
                task.cancel()

    def before_submit(self, submit: scheduler_pb2.SessionSubmit) -> None:
        """May refuse it."""

    async def _run_in_session(
        self,
        submit: scheduler_pb2.SessionSubmit,
        out: asyncio.Queue[scheduler_pb2.SessionResponse | Cut],
    ) -> None:
        handle = submit.handle
        is_plain = not has_several_sequences(submit.request.sampling_params)
        try:
            self.before_submit(submit)
            async for part in self._events(submit.request):
                tokens = part.tokens
                if is_plain and tokens.token_ids and not tokens.logprobs:
                    response = scheduler_pb2.SessionResponse(
                        handles=[handle], token_ids=tokens.token_ids
                    )
                else:
                    event = _session_event(handle, part)
                    response = scheduler_pb2.SessionResponse(events=[event])
                out.put_nowait(response)
        except DomainError as error:
            rejected = scheduler_pb2.RequestError(reason=error.reason, message=error.message)
            if error.retry_delay_s is not None:
                rejected.retry_delay.CopyFrom(duration_from_s(error.retry_delay_s))
            event = scheduler_pb2.SessionEvent(handle=handle, rejected=rejected)
            out.put_nowait(scheduler_pb2.SessionResponse(events=[event]))
        except Cut as cut:
            out.put_nowait(cut)

    async def _events(
        self, request: scheduler_pb2.GenerateRequest
    ) -> AsyncIterator[scheduler_pb2.GenerateResponse]:
        self.requests.append(request)
        self.before_request(request)
        if request.model_digest not in ("", self.model_digest):
            raise DomainError("MODEL_CHANGED", f"served is {self.model_digest}")
        if self.adapter_refusal and request.adapter not in ("", *self.adapters):
            raise DomainError(self.adapter_refusal, f"adapter is {request.adapter!r}")
        if request.sampling_params.HasField("pooling"):
            finish = make_vector(request, self.pooling)
            await self._next_token()
            yield scheduler_pb2.GenerateResponse(finish=finish)
            return
        sequences = make_sequences(request, self.outputs.pop(0) if self.outputs else ())
        if request.sampling_params.HasField("num_prompt_logprobs"):
            is_resumed = any(sequence.token_ids for sequence in sequences)
            for token_id in [] if is_resumed else request.prompt_token_ids[1:]:
                chunk = scheduler_pb2.TokenChunk(prompt_logprobs=[score_of(token_id)])
                yield scheduler_pb2.GenerateResponse(tokens=chunk)
        try:
            if is_streamed(request.sampling_params):
                async for response in self._all(request, sequences):
                    yield response
            else:
                async for response in self._best(request, sequences):
                    yield response
        except Failed as failure:
            error = scheduler_pb2.RequestError(reason=str(failure), message="it failed")
            reason = scheduler_pb2.FINISH_REASON_ERROR
            finish = scheduler_pb2.Finish(reason=reason, error=error)
            yield scheduler_pb2.GenerateResponse(finish=finish)

    async def _all(
        self, request: scheduler_pb2.GenerateRequest, sequences: list[FakeSequence]
    ) -> AsyncIterator[scheduler_pb2.GenerateResponse]:
        unfinished = list(sequences)
        while unfinished:
            for sequence in list(unfinished):
                if sequence.reason is None:
                    await self._next_token()
                    yield scheduler_pb2.GenerateResponse(tokens=sequence.step())
                if sequence.reason is not None:
                    unfinished.remove(sequence)
                    if has_several_sequences(request.sampling_params):
                        finish = sequence.finish()
                        yield scheduler_pb2.GenerateResponse(sequence_finish=finish)
        yield scheduler_pb2.GenerateResponse(finish=make_finish(request, sequences))

    async def _best(
        self, request: scheduler_pb2.GenerateRequest, sequences: list[FakeSequence]
    ) -> AsyncIterator[scheduler_pb2.GenerateResponse]:
        for sequence in sequences:
            while sequence.reason is None:
                await self._next_token()
                sequence.step()
        best = choose_best(sequences, request.sampling_params)
        for sequence in best:
            await self._next_token()
            chunk = sequence.chunk(sequence.token_ids)
            yield scheduler_pb2.GenerateResponse(tokens=chunk)
            yield scheduler_pb2.GenerateResponse(sequence_finish=sequence.finish())
        yield scheduler_pb2.GenerateResponse(finish=make_finish(request, best))

    async def _next_token(self) -> None:
        self.num_tokens += 1
        self.before_token(self.num_tokens - 1)
        if self.hold is not None:
            await self.hold.wait()

    async def Abort(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        if request.request_id == "unknown":
            raise DomainError("REQUEST_UNKNOWN", "no unfinished request has this id")
        self.aborted.append(request.request_id)
        return scheduler_pb2.AbortResponse()

    async def GetModel(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        self.before_model()
        return scheduler_pb2.GetModelResponse(
            name=self.name,
            digest=self.model_digest,
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len_tokens=self.max_model_len,
            eos_token_ids=[1],
            default_sampling_params=self.default_sampling_params,
            max_message_bytes=self.max_message_bytes,
            quantization=self.quantization,
            pooling=self.pooling,
        )

    async def ListAdapters(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        self.num_lists += 1
        names = sorted(self.adapters)
        return scheduler_pb2.ListAdaptersResponse(adapters=map(self._adapter, names))

    def _adapter(self, name: str) -> scheduler_pb2.AdapterInfo:
        path = self.adapters[name]
        digest = name.encode().hex()
        return scheduler_pb2.AdapterInfo(name=name, path=path, digest=digest, base_model="base")

    async def LoadAdapter(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        if not request.path.startswith("/"):
            raise DomainError("ADAPTER_INVALID", f"{request.path} is no folder")
        if self.adapters.get(request.name, request.path) != request.path and not request.replace:
            raise DomainError("ADAPTER_EXISTS", f"{request.name!r} has another folder")
        self.adapters[request.name] = request.path
        return admin_pb2.LoadAdapterResponse(adapter=self._adapter(request.name))

    async def UnloadAdapter(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        if request.name not in self.adapters:
            raise DomainError("ADAPTER_UNKNOWN", f"no adapter is called {request.name!r}")
        del self.adapters[request.name]
        return admin_pb2.UnloadAdapterResponse()

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
            num_host_blocks=32,
            compute="fake code",
            slow_compute_reason=self.slow_compute_reason,
        )
        state = admin_pb2.ExecutorState(
            executor=info,
            connected=True,
            num_free_device_blocks=60,
            num_swapped_requests=3,
            num_free_host_blocks=30,
            num_cached_device_blocks=17,
        )
        return admin_pb2.ListExecutorsResponse(
            executors=[state], num_unassigned_requests=2, num_unfitting_requests=1
        )


async def start(
    fake: FakeScheduler, address: str = "127.0.0.1:0", security: ServerSecurity = OPEN
) -> RunningServer:
    running = bind_server(address, [SERVICE], security=security)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, running.server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(fake, running.server)
    await running.server.start()
    return running


def _session_event(
    handle: int, response: scheduler_pb2.GenerateResponse
) -> scheduler_pb2.SessionEvent:
    match response.WhichOneof("event"):
        case "tokens":
            return scheduler_pb2.SessionEvent(handle=handle, tokens=response.tokens)
        case "sequence_finish":
            finish = response.sequence_finish
            return scheduler_pb2.SessionEvent(handle=handle, sequence_finish=finish)
        case _:
            return scheduler_pb2.SessionEvent(handle=handle, finish=response.finish)
