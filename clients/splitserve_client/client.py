"""A client of a splitserve scheduler, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

from splitserve.scheduler.v1.live_pb2 import WatchSchedulerResponse
from splitserve_client.chat_template import Message
from splitserve_client.client_config import DEFAULT_ADDRESS, ClientConfig
from splitserve_client.codec import decode_executors, decode_identity, decode_model
from splitserve_client.connection import Connection
from splitserve_client.explanations import (
    Explanation,
    QueueExplanation,
    decode_explanation,
    decode_queue,
)
from splitserve_client.generation import Generation, RequestOptions, collect_generation
from splitserve_client.prompt import AnyPrompt, as_prompt
from splitserve_client.resumable_request import ResumableRequest, Submission
from splitserve_client.resumed_stream import stream_resumed
from splitserve_client.resumption import Backoff
from splitserve_client.session import Session
from splitserve_client.text_calls import (
    ChatOptions,
    ModelTokenizer,
    TextCalls,
    TextOptions,
    chat_prompt,
)
from splitserve_client.text_generation import TextGeneration, collect_text
from splitserve_client.text_map import MapConfig, MapResult, map_prompts
from splitserve_client.text_stream import End, Piece
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import (
    NO_TRACE,
    DrainedExecutor,
    ExecutorList,
    Finish,
    Identity,
    Model,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    Tokens,
    TraceContext,
)
from splitserve_client.unread import UnreadBudget


class AsyncClient:
    """Talks to a scheduler. Streams survive its death if it comes back at the same address.

    `address`: `host:port`, or several with commas between, or `dns:host:port` for all addresses of
    a name, or `file:path` with one address a line. Of several it has one that serves, and streams
    go on at another when that is lost.

    Use it as `async with AsyncClient(address) as client`. Every method raises SplitserveError.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, config: ClientConfig | None = None) -> None:
        """Raises CredentialsUnusable, and ServerUnreachable for addresses that make no sense."""
        self.address = address
        self._config = config or ClientConfig()
        self._connection = Connection(address, self._config)
        self._texts = TextCalls(self._read_model_tokenizer, self._config.timing.clock)

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
        await self._connection.close()

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
        model_digest: str = "",
        trace_context: TraceContext = NO_TRACE,
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """Streams the tokens of one completion, or several; the last event is a Finish.

        A stream that breaks is continued where it broke, with the same randomness; with `best_of`
        or beam search nothing comes before the end, and it starts over. Closing the iterator, or
        cancelling the task, aborts the request. `resume_token_ids`: output tokens the caller has
        from an earlier run; pass the seed of that run. `model_digest`: raise ModelChanged if
        another model is served, now or when it goes on. `trace_context`: the span it belongs to;
        if none is given, the current one of OpenTelemetry, where that is used.
        """
        submission = Submission(
            prompt_token_ids,
            params,
            request_id,
            resume_token_ids,
            scheduling,
            encoder_token_ids,
            model_digest,
            trace_context,
        )
        request = ResumableRequest(submission, self._config.timing.clock)
        timing = self._config.timing
        deadline = None if timeout_s is None else timing.clock() + timeout_s
        backoff = Backoff(self._config.retry, timing, deadline)
        async with aclosing(stream_resumed(self._connection, request, backoff)) as events:
            async for event in events:
                yield event

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
        Where another model is served by now the prompt is encoded anew; ModelChanged if anything
        had come by then, or token ids were given.
        """
        prompt, params = as_prompt(prompt), params or SamplingParams()
        events = self._texts.stream(self, prompt, params, **options)
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
        await self._texts.tokenizer()
        timing, retry = self._config.timing, self._config.retry
        config = MapConfig(max_running, in_order, show_progress, retry, timing)
        results = map_prompts(
            self.session(), self._texts, prompts, params or SamplingParams(), config, **options
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
            self._connection.session,
            self._connection.max_message_bytes,
            self._config.retry,
            self._config.timing,
            unread or UnreadBudget(),
            self._connection.goes_on_elsewhere,
        )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection.is_ready

    @property
    def credential(self) -> object:
        """Stands for what calls bring along now: the same object until that changes.

        A session's stream keeps what it was opened with.
        """
        return self._connection.credential

    async def abort(self, request_id: str) -> None:
        """Ends an unfinished request, whoever sent it. Raises RequestUnknown."""
        await self._connection.abort(request_id)

    async def get_model(self) -> Model:
        """The model that is served. Raises ModelNotReady."""
        return decode_model(await self._connection.model())

    async def identify(self, credential: str | None = None) -> Identity:
        """Whose `credential` is, for who does other work for its owner; None: our own.

        Raises CallerUnknown.
        """
        return decode_identity(await self._connection.identify(credential))

    async def is_answering(self) -> bool:
        """Whether the scheduler answers at all, whatever it says. Raises nothing."""
        return await self._connection.is_answering()

    def reconnect(self) -> None:
        """Has calls that begin from now on go over a new connection; what runs goes on."""
        self._connection.reconnect()

    async def is_serving(self) -> bool:
        """Whether an executor is connected, and the scheduler is not shutting down."""
        return await self._connection.is_serving()

    async def get_tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer files by name. Raises ModelNotReady, TokenizerUnavailable."""
        return await self._connection.tokenizer_files()

    async def get_tokenizer(self) -> Tokenizer:
        """Fetches the model's tokenizer. Raises ModelNotReady, TokenizerUnavailable.

        Raises ChatTemplateFailed if the model's chat template is broken.
        """
        return await asyncio.to_thread(Tokenizer.from_files, await self.get_tokenizer_files())

    async def _read_model_tokenizer(self) -> ModelTokenizer:
        # In this order: if the model changes in between, its requests are refused, not misread.
        model = await self.get_model()
        return ModelTokenizer(await self.get_tokenizer(), model.digest)

    async def explain(self, request_id: str) -> Explanation:
        """What happened to a request, and what it waits for; for operators."""
        return decode_explanation(await self._connection.explain(request_id))

    async def explain_queue(self) -> QueueExplanation:
        """Why those wait that are first in the queue; for operators."""
        return decode_queue(await self._connection.explain_queue())

    async def list_executors(self) -> ExecutorList:
        """The executors the scheduler knows."""
        return decode_executors(await self._connection.executors())

    def watch(self, frames_per_second: int = 2) -> AsyncGenerator[WatchSchedulerResponse, None]:
        """What the scheduler does, as it does it; for operators. Closing the iterator ends it.

        `frames_per_second`: 1 to 10. A frame is a message of `live.proto`, which says what is in
        it; `splitserve_live.LiveState` puts them together.
        """
        return self._connection.watch(frames_per_second)

    async def drain_executor(self, address: str, timeout_s: float | None = None) -> DrainedExecutor:
        """Sends an executor away, and returns when it is gone; no stream notices but by a pause.

        What runs there may end within `timeout_s` (None: as the scheduler is told at its start),
        then it goes on elsewhere; what waits does so at once. A cancelled call changes nothing.
        """
        drained = await self._connection.drain_executor(address, timeout_s)
        return DrainedExecutor(drained.num_moved_requests, drained.lost)

    async def undrain_executor(self, address: str) -> None:
        """Takes an executor back that was sent away: it gets requests again, or may join again."""
        await self._connection.undrain_executor(address)
