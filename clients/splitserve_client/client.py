"""Asynchronous client of a splitserve scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

from splitserve.scheduler.v1.live_pb2 import WatchSchedulerResponse
from splitserve_client.client_config import DEFAULT_ADDRESS, Backoff, ClientConfig
from splitserve_client.codec import decode_adapter, decode_executors, decode_identity, decode_model
from splitserve_client.connection import Connection
from splitserve_client.generation import (
    Generation,
    Pooled,
    RequestOptions,
    TextGeneration,
    collect_generation,
    collect_text,
    collect_vector,
)
from splitserve_client.resumable_request import ResumableRequest, Submission, stream_resumed
from splitserve_client.scheduler_info import (
    Adapter,
    DrainedExecutor,
    ExecutorList,
    Explanation,
    Identity,
    Model,
    QueueExplanation,
    decode_explanation,
    decode_queue,
)
from splitserve_client.session import Session
from splitserve_client.session_request import UnreadBudget
from splitserve_client.text_calls import (
    ChatOptions,
    ModelTokenizer,
    TextCalls,
    TextOptions,
    chat_prompt,
)
from splitserve_client.text_map import MapConfig, MapResult, map_prompts
from splitserve_client.text_vectors import (
    Input,
    VectorOptions,
    encode_pairs,
    encode_texts,
    only_score,
    pool_all,
)
from splitserve_text import (
    NO_TRACE,
    AnyPrompt,
    End,
    Finish,
    Message,
    Piece,
    PoolingParams,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    Tokenizer,
    Tokens,
    TraceContext,
    as_prompt,
)


class AsyncClient:
    """Talks to a scheduler; streams survive its death if it returns at the same address.

    `address`: `host:port`, several separated by commas, `dns:host:port` for all addresses of a
    name, or `file:path` with one address per line. With several addresses the client uses a
    scheduler that serves, and streams continue at another scheduler when that one is lost.

    Use it as `async with AsyncClient(address) as client`. Every method raises SplitserveError.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, config: ClientConfig | None = None) -> None:
        """Prepares the connection.

        Raises CredentialsUnusable, and ServerUnreachable for malformed addresses.
        """
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
        """Closes the connection and aborts running requests."""
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
        encoder_features: bytes = b"",
        timeout_s: float | None = None,
        model_digest: str = "",
        trace_context: TraceContext = NO_TRACE,
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """Streams the tokens of one or several completions; the last event is a Finish.

        A broken stream is continued at the same token with the same randomness. With `best_of` or
        beam search no token arrives before the end, and the request starts over. Closing the
        iterator or cancelling the task aborts the request. `resume_token_ids`: output tokens of an
        earlier run, whose seed must be passed too. `model_digest`: raise ModelChanged if another
        model is served at the start or when the stream is continued. `encoder_features`: for models
        with `Encoder.audio`, float32 numbers as in GenerateRequest. `trace_context`: the parent
        span; default: the current OpenTelemetry span, if the program uses OpenTelemetry.
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
            encoder_features,
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
        """Returns the complete result of `generate`, with the same options."""
        num_completions = params.num_completions if params else 1
        async with aclosing(self.generate(prompt_token_ids, params, **options)) as events:
            return await collect_generation(events, num_completions)

    async def pool(
        self,
        prompt_token_ids: Sequence[int],
        pooling: PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Pooled:
        """Returns the vector of a text, from a model with `Model.pooling`; options of `generate`.

        `pooling`: None for the embedding, or the scores of a model without embeddings.
        """
        params = SamplingParams(pooling=pooling or PoolingParams())
        async with aclosing(self.generate(prompt_token_ids, params, **options)) as events:
            return await collect_vector(events)

    # -- texts -------------------------------------------------------------------------------------

    async def stream_text(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[TextOptions],
    ) -> AsyncGenerator[Piece | End, None]:
        """Streams the text of one or several completions; the last event is an End.

        `prompt`: a text to continue, the messages of a chat, or a Prompt. Options: those of the
        function `stream_text`. Closing the iterator or cancelling the task aborts the request. If
        the served model has changed, the prompt is encoded again; raises ModelChanged if output had
        already arrived or the prompt was given as token ids.
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
        """Returns the complete result of `stream_text`, with the same options."""
        async with aclosing(self.stream_text(prompt, params, **options)) as events:
            return await collect_text(events, params.num_completions if params else 1)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> TextGeneration:
        """Returns the answer to a chat. Options: those of `complete_text` and of `TemplateOptions`.

        To stream it: `stream_text(Prompt(messages=..., template={"tools": ...}))`. Raises
        ChatTemplateFailed.
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
        """Completes many prompts over one session; yields one result for each prompt.

        The result of a failed prompt holds its error; the other prompts continue. A full queue or a
        server that returns in time only causes a pause. Prompts are read on demand: at most
        `max_running` requests run, and at most four times as many results wait for their turn.
        `in_order`: False yields results as they complete. `show_progress`: a progress line on
        standard error; None: only if that is a terminal. `timeout_s`: for each prompt. Closing the
        iterator aborts running requests. Raises ValueError, and the errors of `get_tokenizer`.
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

    async def embed(
        self,
        texts: Sequence[str],
        pooling: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        **options: Unpack[VectorOptions],
    ) -> list[Pooled]:
        """Returns the vectors of texts, in order, over one session; see `pool` for `pooling`.

        `prompt_name`: prompt of the model that is put in front of each text; None: the model's
        default. Raises the first error of a text, InvalidRequest, and ValueError.
        """
        asked, most = pooling or PoolingParams(), options.get("max_tokens")
        num_chars = sum(map(len, texts))
        return await self._pool_all(
            lambda tokenizer: encode_texts(tokenizer, texts, asked, prompt_name, most),
            num_chars,
            options,
        )

    async def score(
        self, pairs: Sequence[tuple[str, str]], **options: Unpack[VectorOptions]
    ) -> list[float]:
        """Returns how well the texts of each pair match, in order, by a classifier with one label.

        Raises the errors of `embed`, and InvalidRequest for a model with several labels.
        """
        most = options.get("max_tokens")
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        found = await self._pool_all(
            lambda tokenizer: encode_pairs(tokenizer, pairs, most), num_chars, options
        )
        return list(map(only_score, found))

    async def _pool_all(
        self, encode: Callable[[Tokenizer], list[Input]], num_chars: int, options: VectorOptions
    ) -> list[Pooled]:
        async def work(known: ModelTokenizer) -> list[Pooled]:
            tokenizer = known.tokenizer
            assert tokenizer is not None, "read from the model"
            inputs = await tokenizer.in_thread(lambda: encode(tokenizer), num_chars)
            digest = known.model_digest
            return await pool_all(self.session(), inputs, digest, self._config, options)

        return await self._texts.with_tokenizer(work)

    # -- sessions, model, administration -----------------------------------------------------------

    def session(self, unread: UnreadBudget | None = None) -> Session:
        """Makes a session, which carries many requests over one stream.

        Use it as `async with client.session() as session`.

        `unread`: limit of unread events of the requests; sessions may share it.
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
        """True if the client's last known state is connected."""
        return self._connection.is_ready

    @property
    def credential(self) -> object:
        """Object that stands for the current credential; the same until the credential changes.

        The stream of a session keeps the credential that it was opened with.
        """
        return self._connection.credential

    async def abort(self, request_id: str) -> None:
        """Aborts an unfinished request of any caller. Raises RequestUnknown."""
        await self._connection.abort(request_id)

    async def get_model(self) -> Model:
        """Returns the served model. Raises ModelNotReady."""
        return decode_model(await self._connection.model())

    async def identify(self, credential: str | None = None) -> Identity:
        """Returns the owner of `credential`; for services that work for callers.

        `credential`: None for the client's own.

        Raises CallerUnknown.
        """
        return decode_identity(await self._connection.identify(credential))

    async def is_answering(self) -> bool:
        """Returns whether the scheduler answers at all, with any status. Raises nothing."""
        return await self._connection.is_answering()

    def reconnect(self) -> None:
        """Opens a new connection for later calls; running calls stay on the old connection."""
        self._connection.reconnect()

    async def is_serving(self) -> bool:
        """Returns whether an executor is connected and the scheduler is not shutting down."""
        return await self._connection.is_serving()

    async def get_tokenizer_files(self) -> dict[str, bytes]:
        """Fetches the tokenizer files by name. Raises ModelNotReady, TokenizerUnavailable."""
        return await self._connection.tokenizer_files()

    async def get_tokenizer(self) -> Tokenizer:
        """Fetches the model's tokenizer. Raises ModelNotReady, TokenizerUnavailable.

        Raises ChatTemplateFailed if the model's chat template is broken.
        """
        return await asyncio.to_thread(Tokenizer.from_files, await self.get_tokenizer_files())

    async def _read_model_tokenizer(self) -> ModelTokenizer:
        # Model before tokenizer: if the model changes in between, its requests are refused instead
        # of encoded with the wrong tokenizer.
        model = await self.get_model()
        return ModelTokenizer(await self.get_tokenizer(), model.digest, model.encoder)

    async def list_adapters(self, credential: str | None = None) -> tuple[Adapter, ...]:
        """Returns the registered adapters that the caller may use, in order of their names.

        `credential`: lists what its owner may use; None for the client's own.
        """
        listed = await self._connection.adapters(credential)
        return tuple(map(decode_adapter, listed.adapters))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> Adapter:
        """Registers the adapter at `path`, on the scheduler's machine; for operators.

        `replace`: whether `name` may have another folder until now. Raises AdapterExists, and
        InvalidRequest if `path` has no adapter, or one that executors cannot load.
        """
        loaded = await self._connection.load_adapter(name, path, replace=replace)
        return decode_adapter(loaded.adapter)

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter: later requests cannot name it; for operators. Raises AdapterUnknown.

        Accepted requests keep it.
        """
        await self._connection.unload_adapter(name)

    async def explain(self, request_id: str) -> Explanation:
        """Explains what happened to a request and what it waits for; for operators."""
        return decode_explanation(await self._connection.explain(request_id))

    async def explain_queue(self) -> QueueExplanation:
        """Explains why the first requests of the waiting queue wait; for operators."""
        return decode_queue(await self._connection.explain_queue())

    async def list_executors(self) -> ExecutorList:
        """Returns the executors that the scheduler knows."""
        return decode_executors(await self._connection.executors())

    def watch(self, frames_per_second: int = 2) -> AsyncGenerator[WatchSchedulerResponse, None]:
        """Streams the scheduler's activity; for operators. Closing the iterator ends the stream.

        `frames_per_second`: 1 to 10. A frame is a message of `live.proto`, which specifies its
        content; `splitserve_live.LiveState` combines the frames.
        """
        return self._connection.watch(frames_per_second)

    async def drain_executor(self, address: str, timeout_s: float | None = None) -> DrainedExecutor:
        """Drains an executor and returns when it is gone; streams only notice a pause.

        Running requests may end within `timeout_s` (None: the scheduler's configured time), then
        continue on other executors; waiting requests move immediately. Cancelling the call changes
        nothing.
        """
        drained = await self._connection.drain_executor(address, timeout_s)
        return DrainedExecutor(drained.num_moved_requests, drained.lost)

    async def undrain_executor(self, address: str) -> None:
        """Takes a drained executor back: it gets requests again, or may join again."""
        await self._connection.undrain_executor(address)
