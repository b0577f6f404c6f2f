"""Completion of many prompts over one session, with a result or an error for each prompt."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence, Sized
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO, Unpack

from splitserve_client.client_config import Backoff, RetryPolicy, Timing
from splitserve_client.errors import (
    DeadlineExceeded,
    Draining,
    ModelNotReady,
    QueueFull,
    QuotaExceeded,
)
from splitserve_client.generation import TextGeneration, collect_text
from splitserve_client.session import Session
from splitserve_client.text_calls import TextCalls, TextOptions
from splitserve_text import (
    AnyPrompt,
    Finish,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
    Tokens,
    as_prompt,
)

_WIDTH = 24
_EVERY_S = 0.1


class ProgressLine:
    """Rewrites one line of a terminal; use it as `with ProgressLine(total)`.

    `total`: number of items, None if unknown. `show`: None shows the line only on a terminal.
    """

    def __init__(
        self,
        total: int | None,
        *,
        show: bool | None,
        clock: Callable[[], float],
        file: TextIO | None = None,
    ) -> None:
        self._total = total
        self._file = file or sys.stderr
        self._is_shown = self._file.isatty() if show is None else show
        self._clock = clock
        self._start_s = self._written_s = clock()
        self._num_items = 0
        self._num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_shown:
            self._write("\n")

    def add(self, num_tokens: int) -> None:
        """Counts one more finished item with `num_tokens` output tokens."""
        self._num_items += 1
        self._num_tokens += num_tokens
        if self._is_shown and self._clock() - self._written_s >= _EVERY_S:
            self._written_s = self._clock()
            self._write("")

    def say(self, text: str) -> None:
        """Writes `text` on a line of its own, even if the progress line is not shown."""
        self._file.write(f"\r\x1b[K{text}\n" if self._is_shown else f"{text}\n")
        self._file.flush()

    def _write(self, end: str) -> None:
        count, bar = str(self._num_items), ""
        if self._total:
            num_full = _WIDTH * self._num_items // self._total
            bar = f"[{'#' * num_full}{'.' * (_WIDTH - num_full)}] "
            count = f"{count}/{self._total}"
        seconds = max(self._clock() - self._start_s, 1e-9)
        pace = f"{self._num_items / seconds:.1f}/s, {self._num_tokens / seconds:.0f} tokens/s"
        self._file.write(f"\r\x1b[K{bar}{count} ({pace}){end}")
        self._file.flush()


# Temporary refusals of a server: the prompt waits instead of failing.
PASSING = (QueueFull, QuotaExceeded, ModelNotReady, Draining)
# With ordered results, this many per running request may wait for a slow earlier one.
_NUM_WAITING_EACH = 4


@dataclass(frozen=True, slots=True)
class MapResult:
    """Result of the prompt number `index`: its generation, or the error of this prompt alone."""

    index: int
    generation: TextGeneration | None = None
    error: SplitserveError | None = None

    @property
    def text(self) -> str:
        """Text of the first completion. Raises the prompt's error."""
        if self.error is not None:
            raise self.error
        assert self.generation is not None, "a result has a generation or an error"
        return self.generation.text


@dataclass(frozen=True, slots=True)
class MapConfig:
    """Options of `map_prompts`.

    `max_running`: limit of running requests. `in_order`: yield results in the order of prompts,
    otherwise as they complete.
    """

    max_running: int
    in_order: bool
    show_progress: bool | None
    retry: RetryPolicy
    timing: Timing


async def map_prompts(
    session: Session,
    texts: TextCalls,
    prompts: Iterable[AnyPrompt],
    params: SamplingParams,
    config: MapConfig,
    **options: Unpack[TextOptions],
) -> AsyncGenerator[MapResult, None]:
    """Completes `prompts`; see `AsyncClient.map`. Enters `session`, and leaves it at the end."""
    if "request_id" in options:
        raise ValueError("request_id is given; allowed: none, as each prompt gets an id of its own")
    if config.max_running < 1:
        raise ValueError(f"max_running is {config.max_running}; allowed: at least 1")
    total = len(prompts) if isinstance(prompts, Sized) else None
    async with session:
        timeout_s = options.pop("timeout_s", None)
        call = _SessionCall(session)
        work = _Mapping(call, texts, params, config, options, timeout_s, enumerate(prompts))
        with ProgressLine(total, show=config.show_progress, clock=config.timing.clock) as line:
            try:
                async with aclosing(work.results(line)) as results:
                    async for result in results:
                        yield result
            finally:
                await work.cancel()


@dataclass(frozen=True, slots=True)
class _SessionCall:
    """Makes requests over a session."""

    session: Session

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        scheduling: SchedulingParams | None = None,
        encoder_token_ids: Sequence[int] = (),
        model_digest: str = "",
        **_: object,
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """Makes a request like `AsyncClient.generate`; ignores request ids and timeouts."""
        request = self.session.submit(
            prompt_token_ids,
            params,
            scheduling=scheduling,
            encoder_token_ids=encoder_token_ids,
            model_digest=model_digest,
        )
        try:
            async for event in request:
                yield event
        finally:
            request.close()


@dataclass(slots=True)
class _Mapping:
    call: _SessionCall
    texts: TextCalls
    params: SamplingParams
    config: MapConfig
    options: TextOptions
    timeout_s: float | None
    numbered: Iterator[tuple[int, AnyPrompt]]
    running: set[asyncio.Task[MapResult]] = field(default_factory=set)
    waiting: dict[int, MapResult] = field(default_factory=dict)

    async def results(self, line: ProgressLine) -> AsyncGenerator[MapResult, None]:
        """Yields each result once, in order or as they complete."""
        num_yielded = 0
        while self._start_some() or self.running:
            done, self.running = await asyncio.wait(
                self.running, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                result = task.result()
                line.add(result.generation.usage.num_output_tokens if result.generation else 0)
                self.waiting[result.index] = result
            ready = list(self.waiting)
            if self.config.in_order:
                ready = []
                while num_yielded + len(ready) in self.waiting:
                    ready.append(num_yielded + len(ready))
            for index in ready:
                num_yielded += 1
                yield self.waiting.pop(index)

    async def cancel(self) -> None:
        """Cancels running requests."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def _start_some(self) -> bool:
        """Starts requests up to the limits; returns whether any was started."""
        most = self.config.max_running
        has_started = False
        while len(self.running) < most and len(self.waiting) < most * _NUM_WAITING_EACH:
            numbered = next(self.numbered, None)
            if numbered is None:
                break
            self.running.add(asyncio.create_task(self._run(*numbered)))
            has_started = True
        return has_started

    async def _run(self, index: int, prompt: AnyPrompt) -> MapResult:
        backoff = Backoff(self.config.retry, self.config.timing)
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    try:
                        return MapResult(index, await self._generate(prompt))
                    except PASSING as error:
                        await backoff.pause(error)
        except TimeoutError:
            return MapResult(index, error=DeadlineExceeded("the deadline of the item has passed"))
        except SplitserveError as error:
            return MapResult(index, error=error)

    async def _generate(self, prompt: AnyPrompt) -> TextGeneration:
        events = self.texts.stream(self.call, as_prompt(prompt), self.params, **self.options)
        async with aclosing(events):
            return await collect_text(events, self.params.num_completions)
