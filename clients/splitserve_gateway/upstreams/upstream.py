"""One scheduler: what it serves, and the session that carries all requests to it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from splitserve_client import (
    AsyncClient,
    CallerNotAllowed,
    CallerUnknown,
    ChatTemplateFailed,
    ClientConfig,
    Draining,
    Finish,
    Identity,
    InvalidRequest,
    Model,
    ModelNotReady,
    Readiness,
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
from splitserve_gateway.http.errors import UPSTREAM_REFUSED
from splitserve_gateway.upstreams.upstream_request import UpstreamRequest
from splitserve_rpc.peer_watch import SILENT_AFTER_S, PeerState, PeerWatch

_POLL_S = 1.0
# Nothing of a request has come for so long, from a scheduler that does not serve.
_STALLED_S = 5.0
# Of a gateway whose own key is not, or no longer, valid there.
_REFUSALS = (CallerUnknown, CallerNotAllowed)
_GATEWAY = "gateway"
# Of a scheduler that was reached.
_KNOWN = (ModelNotReady, *_REFUSALS)
_UNREACHABLE = "UNREACHABLE"
# Of one that may have executors soon; health is asked after this, and may be late.
_BEGINNING = (Readiness.NO_EXECUTOR.value, Readiness.READY.value)
_MAX_SAID = 8
_LOSSES = (ServerUnreachable, ModelNotReady, *_REFUSALS)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What a scheduler serves.

    `tokenizer`: None where its executors have none that can be read; `tokenizer_lack` says why.
    """

    model: Model
    tokenizer: Tokenizer | None
    tokenizer_lack: str = ""


class Others(Protocol):
    """All schedulers of the gateway, as one of them needs them."""

    def find_other(self, lost: Upstream, digest: str) -> Upstream | None:
        """Another that takes requests for the model with this digest."""

    async def wait_other(
        self, stopping: Upstream, digest: str, patience_s: float | None
    ) -> Upstream | None:
        """The same, or `stopping` when it has begun anew; None: none can be expected."""

    def tell_lost(self, served: Served) -> None:
        """One that served this is gone."""

    def tell_news(self) -> None:
        """Something is known anew of one of them."""


class _Place:
    """Counts one request at the scheduler that was chosen for it, until its tokens are read."""

    def __init__(self, places: set[_Place]) -> None:
        self._places = places
        places.add(self)

    def free(self, _: object = None) -> None:
        """Stops counting the request here. May be called again."""
        self._places.discard(self)


# Place of the request that the current task prepares.
_place: ContextVar[_Place | None] = ContextVar("place", default=None)


class Upstream:
    """Use it as `async with Upstream(address) as upstream`.

    `served`: None until it is known, and while the scheduler cannot be reached or another model of
    it is read.
    """

    def __init__(
        self,
        address: str,
        config: ClientConfig | None,
        unread: UnreadBudget,
        others: Others,
    ) -> None:
        self.address = address
        self.served: Served | None = None
        # Whether it is one of those that the gateway was told of, still.
        self.is_named = True
        self._others = others
        self._is_serving = False
        self._readiness = _UNREACHABLE
        self._digest = ""
        self._refusal = ""
        self._tokenizer_lack = ""
        # Problems that are in the log, since it was ready the last time.
        self._said: set[str] = set()
        # Whoever has a key expects that everybody needs one.
        self._is_for_callers = config is not None and config.has_api_key
        # Those that are read, and when something of them came last.
        self._requests: dict[SessionRequest, float] = {}
        # Those that are being prepared: templates, tokens, grammars.
        self._places: set[_Place] = set()
        # What has come from the scheduler: answers, and parts of streams.
        self._num_heard = 0
        self._client = AsyncClient(address, config)
        self._unread = unread
        self._credential = self._client.credential
        self._session: Session = self._client.session(unread)
        # Of a key that the gateway had before: what they have begun goes on.
        self._retired: list[Session] = []
        self._is_doubtful = asyncio.Event()
        # Not set while it is read what the scheduler serves, nor before it was asked at first.
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
        self._is_read.set()
        for session in (*self._retired, self._session):
            await session.__aexit__(None, None, None)
        await self._client.close()

    @property
    def num_open(self) -> int:
        """Requests that this scheduler was chosen for and whose last token is still to come."""
        return len(self._requests) + len(self._places)

    def reserve(self) -> None:
        """Counts the request of the current task until its tokens are read or the task ends."""
        if (earlier := _place.get()) is not None:
            earlier.free()
        place = _Place(self._places)
        _place.set(place)
        task = asyncio.current_task()
        assert task is not None, "called in a coroutine"
        task.add_done_callback(place.free)

    @property
    def takes_requests(self) -> bool:
        """Whether it can be reached, has an executor and is not being stopped, as far as known."""
        return self._client.is_connected and self._is_serving

    @property
    def readiness(self) -> str:
        """What the scheduler says of itself, as far as known; UNREACHABLE and REFUSED are ours."""
        return self._readiness

    @property
    def will_serve(self) -> bool:
        """Whether it takes no requests yet: it has no executor, or that it has one is news."""
        return self.is_reading or (not self._is_serving and self._readiness in _BEGINNING)

    @property
    def is_reading(self) -> bool:
        """Whether it will soon be known what it serves."""
        return not self._is_read.is_set()

    async def wait_read(self) -> None:
        """Waits until it is known what it serves, or that it does not."""
        await self._is_read.wait()

    def doubt(self, model_digest: str) -> None:
        """It says that it does not serve the model with this digest any more."""
        if self.served is not None and self.served.model.digest == model_digest:
            self._begin_reading()
            self._is_doubtful.set()

    def _begin_reading(self) -> None:
        """Nobody is to be given what it served until now."""
        if self.served is not None:
            self._digest, self.served = self.served.model.digest, None
        self._is_read.clear()

    @property
    def num_session_requests(self) -> int:
        """Requests that the scheduler may still have."""
        return sum(session.num_open for session in (*self._retired, self._session))

    def request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        scheduling: SchedulingParams,
        model_digest: str,
        credential: str = "",
        request_id: str = "",
    ) -> UpstreamRequest:
        """A request to this scheduler, which goes on at another if this one is lost.

        `credential`: of whom it is; empty: nobody is asked who they are. `request_id`: see
        `UpstreamRequest`.
        """
        return UpstreamRequest(
            self, prompt_token_ids, params, scheduling, model_digest, credential, request_id
        )

    async def identify(self, credential: str) -> Identity:
        """Whose `credential` is, by this scheduler. Raises SplitserveError."""
        own = self._client.credential
        try:
            return await self._client.identify(credential)
        except _REFUSALS:
            await self._check_own_key(own)
            raise

    def find_other(self, model_digest: str) -> Upstream | None:
        """Another that takes requests for this model."""
        return self._others.find_other(self, model_digest)

    async def wait_other(self, model_digest: str, patience_s: float | None) -> Upstream | None:
        """As `Fleet.wait_other`, when this one is being stopped."""
        return await self._others.wait_other(self, model_digest, patience_s)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **options: Any,  # noqa: ANN401
    ) -> SessionRequest:
        """As `Session.submit`. Raises InvalidRequest."""
        try:
            return self._session.submit(prompt_token_ids, params, **options)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(str(error), "SAMPLING_PARAMS_INVALID") from error

    async def read(self, request: SessionRequest) -> AsyncGenerator[Tokens | Finish, None]:
        """The events of `request`, which is over when this is closed."""
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
        """Raises ServerUnreachable if a refusal was for us, who had `shown` a key.

        Schedulers say that a caller is unknown by the same reason.
        """
        if not self._is_for_callers:
            return
        try:
            await self._check_callers()
        except _REFUSALS as error:
            self._lose(error)
        except SplitserveError:
            return  # nobody knows; what the scheduler said holds
        else:
            if self._client.credential is shown:
                return
        raise ServerUnreachable("the scheduler refuses the gateway's own key", UPSTREAM_REFUSED)

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
            self._said.add(str(error))
        # Asked again and again: the other may come later than this one went.
        if isinstance(error, ServerUnreachable) and self.find_other(self._digest):
            for request in list(self._requests):
                request.close(error)

    def _move_stalled(self) -> None:
        """Has what waits here go on elsewhere while there is nobody to compute it.

        A scheduler that is being stopped does not serve either, and still brings tokens.
        """
        if self._is_serving or self.served is None or not self.find_other(self.served.model.digest):
            return
        since_s = asyncio.get_running_loop().time() - _STALLED_S
        stalled = [request for request, came_s in self._requests.items() if came_s < since_s]
        for request in stalled:
            request.close(ServerUnreachable("the scheduler has no executor"))

    async def _watch(self) -> None:
        """Keeps `served` true: a scheduler that comes back may serve another model."""
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
                # A single answer that does not come, or makes no sense, is no loss.
                if num_failures > 1 or isinstance(error, _LOSSES):
                    self._lose(error)
                # A scheduler that starts with us is not there for a moment.
                if num_failures > 1 and not isinstance(error, _KNOWN):
                    self._say_unreachable(str(error))
            self._others.tell_news()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._is_doubtful.wait()

    async def _watch_silence(self) -> None:
        """Finds out, sooner than by a look that fails, that the scheduler answers nothing.

        It hangs, or nothing that is said gets there any more. What it has goes on elsewhere as soon
        as there is another; without one it stays, and goes on if the scheduler only paused.
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
                    # Perhaps it is only this connection.
                    self._client.reconnect()
                    reconnected_s = clock()
                self._lose(silent)
                self._others.tell_news()
        finally:
            await watch.close()

    def _say_unreachable(self, problem: str) -> None:
        """Once each: what a transport says may change from try to try, and back."""
        if problem in self._said or len(self._said) >= _MAX_SAID:
            return
        self._said.add(problem)
        _log.warning("upstream_unreachable address=%s error=%r", self.address, problem)

    async def _renew_session(self) -> None:
        """Opens another session if the gateway has another key: an old one may be revoked."""
        if self._client.credential is not self._credential:
            self._credential = self._client.credential
            self._retired.append(self._session)
            self._session = self._client.session(self._unread)
            await self._session.__aenter__()
        for session in [session for session in self._retired if not session.num_open]:
            self._retired.remove(session)
            await session.__aexit__(None, None, None)

    async def _look(self) -> Served:
        model = await self._client.get_model()
        if self._is_for_callers:
            await self._check_callers()
        self._is_serving = await self._client.is_serving()
        self._readiness = model.readiness.value
        if self.served is not None and self.served.model.digest == model.digest:
            return replace(self.served, model=model)
        self._begin_reading()
        tokenizer = await self._read_tokenizer()
        return Served(model, tokenizer, self._tokenizer_lack)

    async def _check_callers(self) -> None:
        """Raises CallerUnknown or CallerNotAllowed if the scheduler takes no requests of others.

        From us it does if it knows callers, and our own key is that of a gateway.
        """
        own = await self._client.identify()
        if not own.knows_callers:
            raise CallerNotAllowed("the scheduler asks nobody for a key, and the gateway has one")
        if _GATEWAY not in own.scopes:
            raise CallerNotAllowed(f"the gateway's key is not of the scope {_GATEWAY}")

    async def _read_tokenizer(self) -> Tokenizer | None:
        self._tokenizer_lack = ""
        try:
            files = await self._client.get_tokenizer_files()
            return await asyncio.to_thread(Tokenizer.from_files, files)
        except (TokenizerUnavailable, ChatTemplateFailed) as error:
            _log.warning("tokenizer_unavailable address=%s error=%r", self.address, str(error))
            self._tokenizer_lack = error.message
            return None

    def _note(self, served: Served) -> None:
        if self.served is None:
            _log.info("upstream_ready address=%s model=%r", self.address, served.model.name)
        self.served = served
        self._is_read.set()
        self._refusal = ""
        self._said.clear()


def _readiness_by(error: SplitserveError) -> str:
    """Of a scheduler that did not say which model it serves."""
    if isinstance(error, _REFUSALS):
        return "REFUSED"
    return Readiness.NO_EXECUTOR.value if isinstance(error, ModelNotReady) else _UNREACHABLE
