"""One scheduler: what it serves, and the session that carries all requests to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from splitserve_client import (
    AsyncClient,
    ChatTemplateFailed,
    ClientConfig,
    DeadlineExceeded,
    Finish,
    Model,
    SamplingParams,
    SchedulingParams,
    Session,
    SplitserveError,
    Tokenizer,
    TokenizerUnavailable,
    Tokens,
)

_POLL_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What a scheduler serves. `tokenizer`: None where its executors have none."""

    model: Model
    tokenizer: Tokenizer | None


class Upstream:
    """Use it as `async with Upstream(address) as upstream`.

    `served`: None until it is known, and while the scheduler cannot be reached.
    """

    def __init__(self, address: str, config: ClientConfig | None = None) -> None:
        self.address = address
        self.served: Served | None = None
        self.num_open = 0
        self._client = AsyncClient(address, config)
        self._session: Session = self._client.session()
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Upstream:
        await self._session.__aenter__()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watcher is not None, "entered"
        self._watcher.cancel()
        with suppress(asyncio.CancelledError):
            await self._watcher
        await self._session.__aexit__(None, None, None)
        await self._client.close()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        scheduling: SchedulingParams | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """Streams a request's tokens; see `AsyncClient.generate`. Closing it aborts the request."""
        request = self._session.submit(
            prompt_token_ids, params, request_id=request_id, scheduling=scheduling
        )
        now = asyncio.get_running_loop().time()
        deadline = None if timeout_s is None else now + timeout_s
        self.num_open += 1
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    event = await anext(request)
                yield event
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise DeadlineExceeded("the request took longer than it may") from error
        finally:
            self.num_open -= 1
            request.abort()

    async def _watch(self) -> None:
        """Keeps `served` true: a scheduler that comes back may serve another model."""
        while True:
            try:
                self._note(await self._look())
            except SplitserveError as error:
                if self.served is not None:
                    _log.warning("upstream_lost address=%s error=%s", self.address, error)
                self.served = None
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> Served:
        model = await self._client.get_model()
        if self.served is not None and self.served.model.digest == model.digest:
            return Served(model, self.served.tokenizer)
        try:
            tokenizer = await self._client.get_tokenizer()
        except (TokenizerUnavailable, ChatTemplateFailed) as error:
            _log.warning("tokenizer_unavailable address=%s error=%s", self.address, error)
            return Served(model, None)
        return Served(model, tokenizer)

    def _note(self, served: Served) -> None:
        if self.served is None:
            _log.info("upstream_ready address=%s model=%s", self.address, served.model.name)
        self.served = served
