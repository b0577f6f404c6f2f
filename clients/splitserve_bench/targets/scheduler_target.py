"""One of our schedulers, over one gRPC session, by token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import lru_cache
from types import TracebackType
from typing import Self

from splitserve_bench.targets.options import AskOptions
from splitserve_bench.targets.target import Answered, AskFailed, Part, Tokens
from splitserve_bench.workloads.conversation import Turn
from splitserve_bench.workloads.prompt_tokens import PromptTokens
from splitserve_client import (
    AsyncClient,
    ClientConfig,
    Finish,
    SamplingParams,
    Session,
    SplitserveError,
)


class SchedulerTarget:
    """Asks a scheduler. `config` should not try again: what was refused is to be counted."""

    def __init__(self, address: str, config: ClientConfig, options: AskOptions) -> None:
        self._client = AsyncClient(address, config)
        self._session: Session = self._client.session()
        self._options = options
        # Conversations of a round share what pieces they have.
        self._tokens_of = lru_cache(maxsize=2)(
            lambda salt: PromptTokens(salt, *options.token_range)
        )

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.__aexit__(kind, error, traceback)
        await self._client.close()

    async def get_ready(self) -> str:
        try:
            model = await self._client.get_model()
        except SplitserveError as error:
            raise _failed(error) from error
        if model.vocab_size < self._options.token_range[1]:
            low, high = self._options.token_range
            raise AskFailed(
                "token_range",
                f"--token-range is {low}:{high}, and {model.name} has {model.vocab_size} tokens;"
                f" allowed: up to {model.vocab_size}",
            )
        return model.name

    def begin(self, salt: int) -> _Dialog:
        return _Dialog(self._session, self._options, self._tokens_of(salt))


class _Dialog:
    """The prompt so far, with the answers that really came."""

    def __init__(self, session: Session, options: AskOptions, tokens: PromptTokens) -> None:
        self._session = session
        self._options = options
        self._tokens = tokens
        self._token_ids: list[int] = []

    def prepare(self, turn: Turn) -> _Exchange:
        self._token_ids += self._tokens.of(turn.pieces)
        params = SamplingParams(
            temperature=self._options.temperature,
            max_tokens=turn.num_output_tokens,
            ignore_eos=self._options.ignores_eos,
        )
        return _Exchange(self._session, tuple(self._token_ids), params, self._token_ids)


class _Exchange:
    def __init__(
        self,
        session: Session,
        prompt: tuple[int, ...],
        params: SamplingParams,
        history: list[int],
    ) -> None:
        self._session = session
        self._prompt = prompt
        self._params = params
        self._history = history

    async def send(self) -> AsyncGenerator[Part, None]:
        request = self._session.submit(self._prompt, self._params)
        try:
            async for event in request:
                if isinstance(event, Finish):
                    usage = event.usage
                    yield Answered(
                        usage.num_prompt_tokens,
                        usage.num_output_tokens,
                        usage.num_cached_tokens,
                        usage.num_preemptions,
                    )
                elif event.token_ids:
                    self._history += event.token_ids
                    yield Tokens(len(event.token_ids))
        except SplitserveError as error:
            raise _failed(error) from error
        finally:
            request.close()


def _failed(error: SplitserveError) -> AskFailed:
    return AskFailed(error.reason or type(error).__name__, error.message)
