"""One scheduler: what it serves, and the session that carries all requests to it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from splitserve_client import (
    AsyncClient,
    ChatTemplateFailed,
    ClientConfig,
    DeadlineExceeded,
    Finish,
    InvalidRequest,
    Model,
    ModelChanged,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    ServerUnreachable,
    Session,
    SessionRequest,
    SplitserveError,
    Tokenizer,
    TokenizerUnavailable,
    Tokens,
    UnreadBudget,
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

    def __init__(
        self,
        address: str,
        config: ClientConfig | None,
        unread: UnreadBudget,
        find_other: Callable[[Upstream, str], Upstream | None],
    ) -> None:
        self.address = address
        self.served: Served | None = None
        self._find_other = find_other
        self._digest = ""
        self._requests: set[SessionRequest] = set()
        self._client = AsyncClient(address, config)
        self._session: Session = self._client.session(unread)
        self._is_doubtful = asyncio.Event()
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

    @property
    def num_open(self) -> int:
        """Requests whose tokens are being read."""
        return len(self._requests)

    @property
    def is_connected(self) -> bool:
        """Whether it can be reached, as far as is known."""
        return self._client.is_connected

    @property
    def num_session_requests(self) -> int:
        """Requests that the scheduler may still have."""
        return self._session.num_open

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        resume_token_ids: ResumeTokenIds = (),
        scheduling: SchedulingParams | None = None,
        timeout_s: float | None = None,
        model_digest: str = "",
    ) -> AsyncGenerator[Tokens | Finish, bool | None]:
        """Streams a request's tokens; see `AsyncClient.generate`. Closing it aborts the request.

        Sending True does, too, and what follows ends with the Finish, which has the usage.
        `model_digest`: of the model that the prompt was encoded for. Raises ModelChanged if another
        is served by now, also where the request would have to go on. A request whose scheduler is
        lost goes on at another that serves this model, if there is one.
        """
        params = params or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        upstream: Upstream | None = self
        outputs = _outputs_of(resume_token_ids)
        end_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while upstream is not None:
            request = upstream._submit(
                prompt_token_ids,
                params,
                request_id=request_id,
                resume_token_ids=outputs,
                scheduling=scheduling,
                model_digest=model_digest,
            )
            try:
                async with aclosing(upstream._read(request, end_s)) as events:
                    async for event in events:
                        if isinstance(event, Tokens):
                            outputs.setdefault(event.index, []).extend(event.token_ids)
                        yield event
                return
            except ServerUnreachable:
                upstream = self._find_other(upstream, model_digest)
                if upstream is None:
                    raise

    def _submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **options: Any,  # noqa: ANN401
    ) -> SessionRequest:
        try:
            return self._session.submit(prompt_token_ids, params, **options)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(str(error), "SAMPLING_PARAMS_INVALID") from error

    async def _read(
        self, request: SessionRequest, end_s: float | None
    ) -> AsyncGenerator[Tokens | Finish, None]:
        timer = None
        if end_s is not None:
            late = DeadlineExceeded("the request took longer than it may")
            timer = asyncio.get_running_loop().call_at(end_s, request.close, late)
        self._requests.add(request)
        try:
            async for event in request:
                if (yield event):
                    request.abort()
        except ModelChanged:
            self._is_doubtful.set()
            raise
        finally:
            self._requests.discard(request)
            if timer is not None:
                timer.cancel()
            request.close()

    def _lose(self, error: SplitserveError) -> None:
        if self.served is not None:
            _log.warning("upstream_lost address=%s error=%s", self.address, error)
            self._digest, self.served = self.served.model.digest, None
        # Asked again and again: the other may come later than this one went.
        if isinstance(error, ServerUnreachable) and self._find_other(self, self._digest):
            for request in list(self._requests):
                request.close(error)

    async def _watch(self) -> None:
        """Keeps `served` true: a scheduler that comes back may serve another model."""
        while True:
            self._is_doubtful.clear()
            try:
                self._note(await self._look())
            except SplitserveError as error:
                self._lose(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._is_doubtful.wait()

    async def _look(self) -> Served:
        model = await self._client.get_model()
        if self.served is not None and self.served.model.digest == model.digest:
            return Served(model, self.served.tokenizer)
        return Served(model, await self._read_tokenizer())

    async def _read_tokenizer(self) -> Tokenizer | None:
        try:
            files = await self._client.get_tokenizer_files()
            return await asyncio.to_thread(Tokenizer.from_files, files)
        except (TokenizerUnavailable, ChatTemplateFailed) as error:
            _log.warning("tokenizer_unavailable address=%s error=%s", self.address, error)
            return None

    def _note(self, served: Served) -> None:
        if self.served is None:
            _log.info("upstream_ready address=%s model=%s", self.address, served.model.name)
        self.served = served


def _outputs_of(token_ids: ResumeTokenIds) -> dict[int, list[int]]:
    if isinstance(token_ids, Mapping):
        return {index: list(tokens) for index, tokens in token_ids.items()}
    return {0: list(token_ids)} if token_ids else {}
