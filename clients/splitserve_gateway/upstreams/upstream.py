"""Upstream scheduler: watches the model it serves, and holds the session that carries requests."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from splitserve_client import (
    Adapter,
    AsyncClient,
    CallerNotAllowed,
    CallerUnknown,
    ChatTemplateFailed,
    ClientConfig,
    Draining,
    Identity,
    InvalidRequest,
    Model,
    ModelNotReady,
    Readiness,
    ServerUnreachable,
    Session,
    SessionRequest,
    SplitserveError,
    TokenizerUnavailable,
    UnreadBudget,
)
from splitserve_gateway.http import UPSTREAM_REFUSED
from splitserve_gateway.upstreams.adapter_lists import AdapterLists
from splitserve_rpc import SILENT_AFTER_S, PeerState, PeerWatch
from splitserve_text import (
    Finish,
    SamplingParams,
    SpeechTokens,
    Tokenizer,
    Tokens,
    unread_calls,
)

_POLL_S = 1.0
# A request stalls if nothing came for this long from a scheduler that does not serve.
_STALLED_S = 5.0
# Errors of a scheduler that rejects the gateway's own key.
_REFUSALS = (CallerUnknown, CallerNotAllowed)
_GATEWAY = "gateway"
# Errors that show that the scheduler was reached.
_KNOWN = (ModelNotReady, *_REFUSALS)
_UNREACHABLE = "UNREACHABLE"
# Readiness of a scheduler that may soon have executors; its health is asked later and may lag.
_BEGINNING = (Readiness.NO_EXECUTOR.value, Readiness.READY.value)
_MAX_LOGGED = 8
_LOSSES = (ServerUnreachable, ModelNotReady, *_REFUSALS)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedByScheduler:
    """Model that a scheduler serves, and its tokenizer.

    `tokenizer`: None if the executors offer no readable one; `tokenizer_problem` gives the reason.
    `speech`: of a model that takes audio and has a tokenizer; None for others.
    """

    model: Model
    tokenizer: Tokenizer | None
    tokenizer_problem: str = ""
    speech: SpeechTokens | None = None


@dataclass(frozen=True, slots=True)
class ChatRules:
    """Settings of the gateway for chats.

    `template`: source of a chat template in place of the models' own; None to use theirs.
    `detects_calls`: the notation of tool calls is detected by the template.
    """

    template: str | None = None
    detects_calls: bool = True


class FleetOperations(Protocol):
    """Operations of the fleet that one scheduler needs."""

    def find_other(self, without: Collection[Upstream], digest: str) -> Upstream | None:
        """Returns a scheduler that takes requests for the model with this digest, but `without`."""

    async def wait_other(
        self, stopping: Upstream, digest: str, patience_s: float | None
    ) -> Upstream | None:
        """Waits for another scheduler, or until `stopping` starts anew.

        Returns None if neither is expected.
        """

    def tell_lost(self, served: ServedByScheduler) -> None:
        """Notes that a scheduler that served `served` is lost."""

    def tell_news(self) -> None:
        """Notes that the state of a scheduler has changed."""


class _Place:
    """Count of one request at its chosen scheduler, until the request's tokens are read."""

    def __init__(self, places: set[_Place]) -> None:
        self._places = places
        places.add(self)

    def free(self, _: object = None) -> None:
        """Stops counting the request here. Idempotent."""
        self._places.discard(self)


# Place of the request that the current task prepares.
_place: ContextVar[_Place | None] = ContextVar("place", default=None)


class Upstream:
    """Connection to one scheduler. Use as `async with Upstream(...) as upstream`.

    `served`: None until known, while the scheduler is unreachable, or while a new model is read.
    `adapters`: those that it has registered.
    """

    def __init__(
        self,
        address: str,
        config: ClientConfig | None,
        unread: UnreadBudget,
        others: FleetOperations,
        chats: ChatRules | None = None,
    ) -> None:
        self.address = address
        self._chats = chats or ChatRules()
        # Digests of models whose tool calls are known to be unknown.
        self._warned: set[str] = set()
        self.served: ServedByScheduler | None = None
        # Whether discovery still names this scheduler.
        self.is_named = True
        self._others = others
        self._is_serving = False
        self._readiness = _UNREACHABLE
        self._digest = ""
        self._refusal = ""
        self._tokenizer_problem = ""
        # Problems logged since the scheduler was last ready.
        self._logged: set[str] = set()
        # A gateway with a key requires that schedulers ask callers for keys.
        self._is_for_callers = config is not None and config.has_api_key
        # Requests being read, with the time of their last event.
        self._requests: dict[SessionRequest, float] = {}
        # Requests being prepared: templates, tokens, grammars.
        self._places: set[_Place] = set()
        # Number of messages from the scheduler: answers, and events of streams.
        self._num_heard = 0
        self._client = AsyncClient(address, config)
        self.adapters = AdapterLists(self._list_adapters)
        self._unread = unread
        self._credential = self._client.credential
        self._session: Session = self._client.session(unread)
        # Sessions with an earlier key of the gateway; their requests go on.
        self._retired: list[Session] = []
        self._is_doubtful = asyncio.Event()
        # Cleared before the first answer of the scheduler, and while its model is read.
        self._is_read = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Upstream:
        await self._session.__aenter__()
        works = (self._watch(), self._watch_silence())
        self._watchers = [asyncio.create_task(work) for work in works]
        return self

    async def __aexit__(self, *_: object) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self.adapters.close()
        self._is_read.set()
        for session in (*self._retired, self._session):
            await session.__aexit__(None, None, None)
        await self._client.close()

    @property
    def num_open(self) -> int:
        """Number of requests that chose this scheduler and still wait for their last token."""
        return len(self._requests) + len(self._places)

    def reserve(self) -> None:
        """Counts the current task's request until its tokens are read or the task ends."""
        if (earlier := _place.get()) is not None:
            earlier.free()
        place = _Place(self._places)
        _place.set(place)
        task = asyncio.current_task()
        assert task is not None, "called in a task"
        task.add_done_callback(place.free)

    @property
    def takes_requests(self) -> bool:
        """Whether the scheduler was last reachable, with an executor and not stopping."""
        return self._client.is_connected and self._is_serving

    @property
    def readiness(self) -> str:
        """Readiness that the scheduler last reported.

        The gateway itself adds UNREACHABLE and REFUSED.
        """
        return self._readiness

    @property
    def will_serve(self) -> bool:
        """True if the scheduler is starting: refusing requests now, likely serving soon.

        True while its model is read, while it has no executor, or while it reports READY but its
        health check lags behind.
        """
        return self.is_reading or (not self._is_serving and self._readiness in _BEGINNING)

    @property
    def is_reading(self) -> bool:
        """Whether the scheduler's model is being read."""
        return not self._is_read.is_set()

    async def wait_read(self) -> None:
        """Waits until the scheduler's model is known, or known to be unavailable."""
        await self._is_read.wait()

    def doubt(self, model_digest: str) -> None:
        """Notes that the scheduler reports a model change; reads the model again at once.

        Ignored if `model_digest` is not the model known here.
        """
        if self.served is not None and self.served.model.digest == model_digest:
            self._begin_reading()
            self._is_doubtful.set()

    def _begin_reading(self) -> None:
        """Withdraws the model served until now from new requests, until the model is read again."""
        if self.served is not None:
            self._digest, self.served = self.served.model.digest, None
        self._is_read.clear()

    @property
    def num_session_requests(self) -> int:
        """Number of requests that the scheduler may still have."""
        return sum(session.num_open for session in (*self._retired, self._session))

    async def identify(self, credential: str) -> Identity:
        """Returns the caller with `credential` as this scheduler knows it.

        Raises SplitserveError.
        """
        own = self._client.credential
        try:
            return await self._client.identify(credential)
        except _REFUSALS:
            await self._check_own_key(own)
            raise

    async def _list_adapters(self, credential: str) -> Sequence[Adapter]:
        return await self._client.list_adapters(credential or None)

    def find_other(self, model_digest: str, without: Collection[Upstream] = ()) -> Upstream | None:
        """Returns another scheduler that takes requests for this model, none of `without`."""
        return self._others.find_other({self, *without}, model_digest)

    async def wait_other(self, model_digest: str, patience_s: float | None) -> Upstream | None:
        """Waits as `Fleet.wait_other` does, while this scheduler is being stopped."""
        return await self._others.wait_other(self, model_digest, patience_s)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **options: Any,  # noqa: ANN401
    ) -> SessionRequest:
        """Submits a request as `Session.submit` does.

        Raises InvalidRequest for unusable parameters.
        """
        try:
            return self._session.submit(prompt_token_ids, params, **options)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(str(error), "SAMPLING_PARAMS_INVALID") from error

    async def read(self, request: SessionRequest) -> AsyncGenerator[Tokens | Finish, None]:
        """Yields the events of `request`. Closing the generator ends the request."""
        clock = asyncio.get_running_loop().time
        self._requests[request] = clock()
        if (place := _place.get()) is not None:
            place.free()
        own = self._credential
        try:
            async for event in request:
                self._requests[request] = clock()
                self._num_heard += 1
                yield event
        except _REFUSALS:
            await self._check_own_key(own)
            raise
        except (Draining, ModelNotReady) as error:
            self._is_serving = False
            if isinstance(error, Draining):
                self._readiness = Readiness.DRAINING.value
            raise
        finally:
            del self._requests[request]
            request.close()

    async def _check_own_key(self, shown: object) -> None:
        """Raises ServerUnreachable if the scheduler refused the gateway's own key, not a caller's.

        `shown`: the gateway's key at the time. Schedulers give the same reason for both refusals.
        """
        if not self._is_for_callers:
            return
        try:
            await self._check_callers()
        except _REFUSALS as error:
            self._lose(error)
        except SplitserveError:
            return  # undecided: the scheduler's own error holds
        else:
            if self._client.credential is shown:
                return
        raise ServerUnreachable("the scheduler rejects the gateway's own key", UPSTREAM_REFUSED)

    def _lose(self, error: SplitserveError) -> None:
        self._is_serving = False
        self._is_read.set()
        self._readiness = _readiness_by(error)
        if isinstance(error, _REFUSALS) and str(error) != self._refusal:
            self._refusal = str(error)
            _log.error("upstream_refused address=%s error=%r", self.address, str(error))
        if self.served is not None:
            _log.warning("upstream_lost address=%s error=%r", self.address, str(error))
            self._others.tell_lost(self.served)
            self._digest, self.served = self.served.model.digest, None
            self._logged.add(str(error))
        # Checked after each failed look: another scheduler may come later than this one was lost.
        if isinstance(error, ServerUnreachable) and self.find_other(self._digest):
            for request in list(self._requests):
                request.close(error)

    def _move_stalled(self) -> None:
        """Moves stalled requests to another scheduler while this one has no executor.

        A scheduler that is being stopped does not serve either, but still brings tokens.
        """
        if self._is_serving or self.served is None or not self.find_other(self.served.model.digest):
            return
        since_s = asyncio.get_running_loop().time() - _STALLED_S
        stalled = [request for request, came_s in self._requests.items() if came_s < since_s]
        for request in stalled:
            request.close(ServerUnreachable("the scheduler has no executor"))

    async def _watch(self) -> None:
        """Polls the scheduler and updates `served`.

        A restarted scheduler may serve another model.
        """
        num_failures = 0
        while True:
            self._is_doubtful.clear()
            await self._renew_session()
            try:
                self._note(await self._look())
                self._num_heard += 1
                self._move_stalled()
                num_failures = 0
            except SplitserveError as error:
                num_failures += 1
                # A single missing or invalid answer is not a loss.
                if num_failures > 1 or isinstance(error, _LOSSES):
                    self._lose(error)
                # Not logged at the first failure: a scheduler may start together with the gateway.
                if num_failures > 1 and not isinstance(error, _KNOWN):
                    self._log_unreachable(str(error))
            self._others.tell_news()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._is_doubtful.wait()

    async def _watch_silence(self) -> None:
        """Detects a silent scheduler sooner than a failing poll does.

        The scheduler hangs, or messages do not reach it. Its requests move to another scheduler as
        soon as one exists; without one they stay, and go on if the scheduler only paused.
        """
        clock = asyncio.get_running_loop().time
        watch = PeerWatch(self._client.is_answering, num_heard=lambda: self._num_heard)
        silent = ServerUnreachable(f"the scheduler has not answered for {SILENT_AFTER_S:g} s")
        reconnected_s = -math.inf
        try:
            while True:
                if await watch.tick() is not PeerState.SILENT:
                    continue
                if clock() >= reconnected_s + SILENT_AFTER_S:
                    # Only this connection may be broken.
                    self._client.reconnect()
                    reconnected_s = clock()
                self._lose(silent)
                self._others.tell_news()
        finally:
            await watch.close()

    def _log_unreachable(self, problem: str) -> None:
        """Logs `problem` once, up to a bounded number of problems.

        Error texts of a transport may alternate from try to try.
        """
        if problem in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add(problem)
        _log.warning("upstream_unreachable address=%s error=%r", self.address, problem)

    async def _renew_session(self) -> None:
        """Opens a new session if the gateway's key has changed: the old key may be revoked."""
        if self._client.credential is not self._credential:
            self._credential = self._client.credential
            self._retired.append(self._session)
            self._session = self._client.session(self._unread)
            await self._session.__aenter__()
        for session in [session for session in self._retired if not session.num_open]:
            self._retired.remove(session)
            await session.__aexit__(None, None, None)

    async def _look(self) -> ServedByScheduler:
        model = await self._client.get_model()
        if self._is_for_callers:
            await self._check_callers()
        self._is_serving = await self._client.is_serving()
        self._readiness = model.readiness.value
        if self.served is not None and self.served.model.digest == model.digest:
            return replace(self.served, model=model)
        self._begin_reading()
        takes_audio = model.encoder is not None and model.encoder.audio is not None
        tokenizer, speech = await self._read_tokenizer(takes_audio=takes_audio)
        if tokenizer is not None and self._chats.detects_calls:
            await self._check_calls(model, tokenizer)
        return ServedByScheduler(model, tokenizer, self._tokenizer_problem, speech)

    async def _check_callers(self) -> None:
        """Raises CallerUnknown or CallerNotAllowed if the scheduler refuses requests of callers.

        The scheduler must identify callers, and the gateway's key must have the scope `gateway`.
        """
        own = await self._client.identify()
        if not own.knows_callers:
            raise CallerNotAllowed("the scheduler requires no key, but the gateway has one")
        if _GATEWAY not in own.scopes:
            raise CallerNotAllowed(f"the gateway's key lacks the scope {_GATEWAY}")

    async def _read_tokenizer(
        self, *, takes_audio: bool
    ) -> tuple[Tokenizer | None, SpeechTokens | None]:
        self._tokenizer_problem = ""
        try:
            files = await self._client.get_tokenizer_files()
            template = self._chats.template
            tokenizer = await asyncio.to_thread(Tokenizer.from_files, files, template)
            return tokenizer, SpeechTokens.from_files(files, tokenizer) if takes_audio else None
        except (TokenizerUnavailable, ChatTemplateFailed) as error:
            _log.warning("tokenizer_unavailable address=%s error=%r", self.address, str(error))
            self._tokenizer_problem = error.message
            return None, None

    async def _check_calls(self, model: Model, tokenizer: Tokenizer) -> None:
        """Logs once per model that its chat template writes tool calls in an unknown notation."""
        if model.digest in self._warned:
            return
        assumed = await asyncio.to_thread(unread_calls, tokenizer)
        if assumed is None:
            return
        self._warned.add(model.digest)
        _log.warning(
            "tool_calls_unknown address=%s model=%r reason=%r",
            self.address,
            model.name,
            f"the chat template writes calls in no notation that is known; assumed: {assumed}",
        )

    def _note(self, served: ServedByScheduler) -> None:
        if self.served is None:
            _log.info("upstream_ready address=%s model=%r", self.address, served.model.name)
        self.served = served
        self._is_read.set()
        self._refusal = ""
        self._logged.clear()


def _readiness_by(error: SplitserveError) -> str:
    """Returns the readiness of a scheduler that did not report its model."""
    if isinstance(error, _REFUSALS):
        return "REFUSED"
    return Readiness.NO_EXECUTOR.value if isinstance(error, ModelNotReady) else _UNREACHABLE
