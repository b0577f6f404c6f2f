"""Client for programs without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from splitserve_client.client import AsyncClient
from splitserve_client.client_config import DEFAULT_ADDRESS, ClientConfig
from splitserve_client.generation import Generation, Pooled, RequestOptions, TextGeneration
from splitserve_client.scheduler_info import (
    Adapter,
    DrainedExecutor,
    ExecutorList,
    Explanation,
    Model,
    QueueExplanation,
)
from splitserve_client.text_calls import ChatOptions, TextOptions
from splitserve_client.text_map import MapResult
from splitserve_client.text_vectors import VectorOptions
from splitserve_text import (
    AnyPrompt,
    End,
    Finish,
    Message,
    Piece,
    PoolingParams,
    SamplingParams,
    Tokenizer,
    Tokens,
)

T = TypeVar("T")


class Client:
    """Synchronous `AsyncClient`: runs an event loop in a thread of its own.

    Use it as `with Client(address) as client`. Thread-safe. Errors: as for `AsyncClient`.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, config: ClientConfig | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._wait(_make_client(address, config))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and aborts running requests."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Tokens | Finish]:
        """Streams the tokens of one or several completions; see `AsyncClient.generate`.

        Closing the iterator aborts the request.
        """
        return self._iterate(self._client.generate(prompt_token_ids, params, **options))

    def complete(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Returns the complete result of `generate`, with the same options."""
        return self._wait(self._client.complete(prompt_token_ids, params, **options))

    def pool(
        self,
        prompt_token_ids: Sequence[int],
        pooling: PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Pooled:
        """Returns the vector of a text; see `AsyncClient.pool`."""
        return self._wait(self._client.pool(prompt_token_ids, pooling, **options))

    def stream_text(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Piece | End]:
        """Streams the text of one or several completions; see `AsyncClient.stream_text`.

        Closing the iterator aborts the request.
        """
        return self._iterate(self._client.stream_text(prompt, params, **options))

    def complete_text(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[TextOptions],
    ) -> TextGeneration:
        """Returns the complete result of `stream_text`, with the same options."""
        return self._wait(self._client.complete_text(prompt, params, **options))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> TextGeneration:
        """Returns the answer to a chat; see `AsyncClient.chat`."""
        return self._wait(self._client.chat(messages, params, **options))

    def map(
        self,
        prompts: Iterable[AnyPrompt],
        params: SamplingParams | None = None,
        *,
        max_running: int = 64,
        in_order: bool = True,
        show_progress: bool | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[MapResult]:
        """Completes many prompts over one session; see `AsyncClient.map`.

        Prompts are read in the client's thread. Closing the iterator aborts running requests.
        """
        return self._iterate(
            self._client.map(
                prompts,
                params,
                max_running=max_running,
                in_order=in_order,
                show_progress=show_progress,
                **options,
            )
        )

    def embed(
        self,
        texts: Sequence[str],
        pooling: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        **options: Unpack[VectorOptions],
    ) -> list[Pooled]:
        """Returns the vectors of texts, in order; see `AsyncClient.embed`."""
        return self._wait(self._client.embed(texts, pooling, prompt_name=prompt_name, **options))

    def score(
        self, pairs: Sequence[tuple[str, str]], **options: Unpack[VectorOptions]
    ) -> list[float]:
        """Returns how well the texts of each pair match, in order; see `AsyncClient.score`."""
        return self._wait(self._client.score(pairs, **options))

    def abort(self, request_id: str) -> None:
        """Aborts an unfinished request of any caller. Raises RequestUnknown."""
        self._wait(self._client.abort(request_id))

    def get_model(self) -> Model:
        """Returns the served model. Raises ModelNotReady."""
        return self._wait(self._client.get_model())

    def get_tokenizer(self) -> Tokenizer:
        """Fetches the model's tokenizer; errors: as for `AsyncClient.get_tokenizer`."""
        return self._wait(self._client.get_tokenizer())

    def list_adapters(self) -> tuple[Adapter, ...]:
        """Returns the registered adapters that the caller may use, in order of their names."""
        return self._wait(self._client.list_adapters())

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> Adapter:
        """Registers an adapter; for operators; see `AsyncClient.load_adapter`."""
        return self._wait(self._client.load_adapter(name, path, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter; for operators. Raises AdapterUnknown."""
        self._wait(self._client.unload_adapter(name))

    def explain(self, request_id: str) -> Explanation:
        """Explains what happened to a request and what it waits for; for operators."""
        return self._wait(self._client.explain(request_id))

    def explain_queue(self) -> QueueExplanation:
        """Explains why the first requests of the waiting queue wait; for operators."""
        return self._wait(self._client.explain_queue())

    def list_executors(self) -> ExecutorList:
        """Returns the executors that the scheduler knows."""
        return self._wait(self._client.list_executors())

    def drain_executor(self, address: str, timeout_s: float | None = None) -> DrainedExecutor:
        """Drains an executor and returns when it is gone; see `AsyncClient.drain_executor`."""
        return self._wait(self._client.drain_executor(address, timeout_s))

    def undrain_executor(self, address: str) -> None:
        """Takes a drained executor back."""
        self._wait(self._client.undrain_executor(address))

    def _iterate(self, events: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while True:
                try:
                    yield self._wait(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(events.aclose())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in this thread cancels the call in the event loop's thread
            raise


async def _make_client(address: str, config: ClientConfig | None) -> AsyncClient:
    return AsyncClient(address, config)  # inside the event loop's thread


async def _next(events: AsyncGenerator[T, None]) -> T:
    return await anext(events)
