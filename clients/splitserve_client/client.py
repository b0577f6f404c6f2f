"""A client of a splitserve scheduler, for asyncio."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from splitserve.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from splitserve_client.chat_template import Message
from splitserve_client.codec import decode_executors, decode_model
from splitserve_client.connection import (
    DEFAULT_ADDRESS,
    ClientConfig,
    open_channel,
    wait_for_connection,
)
from splitserve_client.errors import (
    RequestIdInUse,
    ServerUnreachable,
    SplitserveError,
    error_of_failure,
)
from splitserve_client.generation import Generation, RequestOptions, collect_generation
from splitserve_client.resumable_request import ResumableRequest, Submission
from splitserve_client.resumption import Backoff
from splitserve_client.session import Session
from splitserve_client.text_generation import (
    ChatOptions,
    TextGeneration,
    TextOptions,
    chat_prompt,
    collect_text,
)
from splitserve_client.text_map import MapConfig, MapResult, map_prompts
from splitserve_client.text_stream import AnyPrompt, End, Piece, as_prompt, stream_text
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import (
    ExecutorList,
    Finish,
    Model,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    Tokens,
)
from splitserve_client.unread import UnreadBudget
from splitserve_rpc.errors import failure_of

_TOKENIZER_TIMEOUT_S = 60.0


class AsyncClient:
    """Talks to one scheduler. Streams survive its death if it comes back at the same address.

    Use it as `async with AsyncClient(address) as client`. Every method raises SplitserveError.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, config: ClientConfig | None = None) -> None:
        self.address = address
        self._config = config or ClientConfig()
        self._channel = open_channel(address, self._config)
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._has_connected = False
        self._tokenizer: Tokenizer | None = None
        self._fetching_tokenizer = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection; what still runs on it is aborted."""
        await self._channel.close()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        resume_token_ids: ResumeTokenIds = (),
        scheduling: SchedulingParams | None = None,
        encoder_token_ids: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """Streams the tokens of one completion, or several; the last event is a Finish.

        A stream that breaks is continued where it broke, with the same randomness; with `best_of`
        or beam search nothing comes before the end, and it starts over. Closing the iterator, or
        cancelling the task, aborts the request. `resume_token_ids`: output tokens the caller has
        from an earlier run; pass the seed of that run.
        """
        backoff = self._backoff(timeout_s)
        submission = Submission(
            prompt_token_ids, params, request_id, resume_token_ids, scheduling, encoder_token_ids
        )
        request = ResumableRequest(submission, self._config.timing.clock)
        await self._connect()
        while True:
            try:
                async with aclosing(self._attempt(request, backoff.remaining_s())) as events:
                    async for event in events:
                        backoff.reset()
                        yield event
                        if isinstance(event, Finish):
                            return
                lost: SplitserveError = ServerUnreachable("the stream ended without a finish")
            except SplitserveError as error:
                lost = error
            if not request.may_go_on(lost):
                raise lost
            await self._abort_stale(request.request_id, lost)
            await backoff.pause(lost)

    async def complete(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """The whole of what `generate` streams, with the same options."""
        num_completions = params.num_completions if params else 1
        async with aclosing(self.generate(prompt_token_ids, params, **options)) as events:
            return await collect_generation(events, num_completions)

    async def _attempt(
        self, request: ResumableRequest, timeout_s: float | None
    ) -> AsyncGenerator[Tokens | Finish, None]:
        call = self._scheduler.Generate(request.message(), timeout=timeout_s)
        try:
            async for response in call:
                for event in request.receive(response):
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_of_failure(failure_of(error)) from error
        finally:
            call.cancel()

    def _backoff(self, timeout_s: float | None) -> Backoff:
        timing = self._config.timing
        deadline = None if timeout_s is None else timing.clock() + timeout_s
        return Backoff(self._config.retry, timing, deadline)

    async def _abort_stale(self, request_id: str, lost: SplitserveError) -> None:
        """Makes room for a resumption where the server has not noticed yet that a stream broke."""
        if isinstance(lost, RequestIdInUse):
            with suppress(SplitserveError):
                await self.abort(request_id)

    # -- texts -------------------------------------------------------------------------------------

    async def stream_text(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[TextOptions],
    ) -> AsyncGenerator[Piece | End, None]:
        """Streams the text of one completion, or several; the last event is an End.

        `prompt`: a text that is continued, the messages of a chat, or a Prompt. Options: as of the
        function `stream_text`. Closing the iterator, or cancelling the task, aborts the request.
        """
        tokenizer, params = await self._own_tokenizer(), params or SamplingParams()
        events = stream_text(self, tokenizer, as_prompt(prompt), params, **options)
        async with aclosing(events):
            async for event in events:
                yield event

    async def complete_text(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[TextOptions],
    ) -> TextGeneration:
        """The whole of what `stream_text` streams, with the same options."""
        async with aclosing(self.stream_text(prompt, params, **options)) as events:
            return await collect_text(events, params.num_completions if params else 1)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> TextGeneration:
        """The answer to a chat. Options: as of `complete_text`, and those of `TemplateOptions`.

        Its pieces as they come: `stream_text(Prompt(messages=..., template={"tools": ...}))`.
        Raises ChatTemplateFailed.
        """
        prompt, text_options = chat_prompt(messages, options)
        return await self.complete_text(prompt, params, **text_options)

    async def map(
        self,
        prompts: Iterable[AnyPrompt],
        params: SamplingParams | None = None,
        *,
        max_running: int = 64,
        in_order: bool = True,
        show_progress: bool | None = None,
        **options: Unpack[TextOptions],
    ) -> AsyncGenerator[MapResult, None]:
        """Completes many prompts over one session; yields a result for each of them.

        An item that fails has its error in its result, and the others go on. A full queue, or a
        server that comes back in time, costs a pause. Prompts are read as they are needed: at most
        `max_running` requests run, and of results that wait for their turn there are at most four
        times as many. `in_order`: False for results as they come. `show_progress`: a line on
        standard error; None for only if that is a terminal. `timeout_s`: of each item. Closing the
        iterator aborts what runs. Raises ValueError, and what `get_tokenizer` raises.
        """
        tokenizer = await self._own_tokenizer()
        timing, retry = self._config.timing, self._config.retry
        config = MapConfig(max_running, in_order, show_progress, retry, timing)
        results = map_prompts(
            self.session(), tokenizer, prompts, params or SamplingParams(), config, **options
        )
        async with aclosing(results):
            async for result in results:
                yield result

    # -- everything else ---------------------------------------------------------------------------

    def session(self, unread: UnreadBudget | None = None) -> Session:
        """Many requests over one stream; use it as `async with client.session() as session`.

        `unread`: what the requests may hold that is not read; sessions may share it.
        """
        return Session(
            self._open_session,
            self._max_message_bytes,
            self._config.retry,
            self._config.timing,
            unread or UnreadBudget(),
        )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def _max_message_bytes(self) -> float:
        """What the server takes; if it does not say, it is for the server to refuse."""
        try:
            request = scheduler_pb2.GetModelRequest()
            model = await self._call(self._scheduler.GetModel, request)
        except SplitserveError:
            return math.inf
        return model.max_message_bytes or math.inf

    async def _open_session(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> AsyncGenerator[scheduler_pb2.SessionResponse, None]:
        await self._connect()
        call = self._scheduler.Session(requests)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise error_of_failure(failure_of(error)) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> None:
        """Ends an unfinished request, whoever sent it. Raises RequestUnknown."""
        await self._call(self._scheduler.Abort, scheduler_pb2.AbortRequest(request_id=request_id))

    async def get_model(self) -> Model:
        """The model that is served. Raises ModelNotReady."""
        return decode_model(
            await self._call(self._scheduler.GetModel, scheduler_pb2.GetModelRequest())
        )

    async def get_tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer files by name. Raises ModelNotReady, TokenizerUnavailable."""
        await self._connect()
        files: dict[str, bytearray] = {}
        call = self._scheduler.GetTokenizer(
            scheduler_pb2.GetTokenizerRequest(), timeout=_TOKENIZER_TIMEOUT_S
        )
        try:
            async for piece in call:
                files.setdefault(piece.file_name, bytearray()).extend(piece.data)
        except grpc.aio.AioRpcError as error:
            raise error_of_failure(failure_of(error)) from error
        finally:
            call.cancel()
        return {name: bytes(data) for name, data in files.items()}

    async def get_tokenizer(self) -> Tokenizer:
        """Fetches the model's tokenizer. Raises ModelNotReady, TokenizerUnavailable.

        Raises ChatTemplateFailed if the model's chat template is broken.
        """
        return await asyncio.to_thread(Tokenizer.from_files, await self.get_tokenizer_files())

    async def _own_tokenizer(self) -> Tokenizer:
        """The one of texts, fetched when it is first needed."""
        async with self._fetching_tokenizer:
            if self._tokenizer is None:
                self._tokenizer = await self.get_tokenizer()
        return self._tokenizer

    async def list_executors(self) -> ExecutorList:
        """The executors the scheduler knows."""
        return decode_executors(
            await self._call(self._admin.ListExecutors, admin_pb2.ListExecutorsRequest())
        )

    async def _call(self, method: Callable[..., Any], request: object) -> Any:  # noqa: ANN401
        await self._connect()
        try:
            return await method(request, timeout=self._config.connect_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_failure(failure_of(error)) from error

    async def _connect(self) -> None:
        """Waits for the first connection. Raises ServerUnreachable as soon as it is refused."""
        if not self._has_connected:
            await wait_for_connection(self._channel, self.address, self._config.connect_timeout_s)
            self._has_connected = True
