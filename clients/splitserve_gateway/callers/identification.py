"""Identification of callers: schedulers map credentials to callers, and answers are cached.

Holds the ASGI middlewares that require a credential and share the gateway among tenants, too.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve_client import CallerUnknown, Identity, QuotaExceeded, SplitserveError
from splitserve_gateway.callers.caller import Caller, credential_of
from splitserve_gateway.http import (
    UPSTREAM_REFUSED,
    caller_not_allowed,
    caller_unknown,
    is_about_health,
    is_for_operators,
    no_scheduler,
    origin_of,
    too_many_lookups,
    too_many_requests,
    upstream_refused,
)
from splitserve_gateway.sharing import FairSemaphore, Shares, TooManyWait
from splitserve_gateway.upstreams import Fleet, Upstream

_GENERATE = "generate"
_TENANTS = "tenants"
_OPERATOR = "operator"
_RETRY_DELAY_S = 1.0


async def identify(fleet: Fleet, credential: str) -> Caller | None:
    """Returns the caller with `credential`; None if every scheduler rejects the credential.

    Ignores schedulers that know no callers, since the gateway is configured to have some. Raises
    ApiError if no scheduler can tell, and IdentificationThrottled if schedulers ask to retry later.
    """
    await fleet.wait_read(None)
    upstreams = fleet.reachable()
    answers = await asyncio.gather(*(_ask(upstream, credential) for upstream in upstreams))
    known = [
        (upstream, answer)
        for upstream, answer in zip(upstreams, answers, strict=True)
        if isinstance(answer, Identity)
    ]
    if known:
        return _caller(credential, known)
    if any(getattr(answer, "reason", "") == UPSTREAM_REFUSED for answer in answers):
        raise upstream_refused()
    for answer in answers:
        if isinstance(answer, QuotaExceeded):
            raise IdentificationThrottled(answer.retry_delay_s or _RETRY_DELAY_S)
    if not answers or any(not isinstance(answer, CallerUnknown) for answer in answers):
        raise no_scheduler()
    return None


async def _ask(upstream: Upstream, credential: str) -> Identity | SplitserveError | None:
    """Asks one scheduler.

    Returns an error instead of raising it; None if it identifies no callers.
    """
    try:
        identity = await upstream.identify(credential)
    except SplitserveError as error:
        return error
    return identity if identity.knows_callers else None


def _caller(credential: str, known: Sequence[tuple[Upstream, Identity]]) -> Caller:
    able = [(upstream, identity) for upstream, identity in known if _GENERATE in identity.scopes]
    _, first = (able or known)[0]
    return Caller(
        credential,
        # A credential that may name tenants belongs to no tenant itself.
        tenant=None if _TENANTS in first.scopes else first.tenant,
        upstreams=frozenset(upstream for upstream, identity in able if identity.may_use_model),
        may_generate=bool(able),
        may_operate=any(_OPERATOR in identity.scopes for _, identity in known),
    )


# -- Cache of identified callers -------------------------------------------------------------------

# Returns None if no scheduler knows the credential. Raises ApiError if none can be reached, and
# IdentificationThrottled.
Ask = Callable[[str], Awaitable[Caller | None]]


class IdentificationThrottled(Exception):
    """Refusal of schedulers that were shown too many unknown credentials; retry after `delay_s`."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"in {delay_s:g} s")
        self.delay_s = delay_s


@dataclass(frozen=True, slots=True)
class Memory:
    """Sizes and lifetimes of the caller cache.

    `known_s`, `unknown_s`: lifetime of an answer, in seconds. `max_known`, `max_unknown`: cached
    credentials of either kind. `max_lookups`: concurrent lookups of credentials not yet known.
    `max_waiting`: lookups waiting for such a place, each for at most `patience_s`. `most_asks`:
    attempts for one credential if schedulers answer IdentificationThrottled.
    """

    known_s: float = 5.0
    unknown_s: float = 1.0
    max_known: int = 8192
    max_unknown: int = 8192
    max_lookups: int = 32
    max_waiting: int = 256
    patience_s: float = 2.0
    most_asks: int = 3


class KnownCallers:
    """Identifies credentials: one lookup at a time per credential, with cached answers.

    Stores the SHA-256 of credentials, not the credentials. Lookups of unknown credentials have
    separate bounds, so guessing keys delays no known caller. They take turns by origin, so guessing
    keys delays lookups of other origins by one lookup at most. A throttled lookup keeps its place
    and retries: a flood is limited to the rate that schedulers accept, and turns, not chance,
    decide which lookup is answered.
    """

    def __init__(
        self,
        ask: Ask,
        clock: Callable[[], float],
        memory: Memory | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._sleep = sleep
        self._memory = memory or Memory()
        self._known: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Caller | None]] = {}
        self._lookups = FairSemaphore(self._memory.max_lookups, self._memory.max_waiting)

    async def identify(self, credential: str, origin: str = "") -> Caller:
        """Returns the caller with `credential`. `origin`: network origin of the request.

        Raises ApiError: 401 for an unknown credential, 503 if identification is impossible now.
        """
        digest = hashlib.sha256(credential.encode()).digest()
        caller = self._remembered(digest)
        if caller is None:
            # The first requester may be cancelled; the others still need the answer.
            caller = await asyncio.shield(self._asked(digest, credential, origin))
        if caller is None:
            raise caller_unknown("the credential is not valid")
        return caller

    def _remembered(self, digest: bytes) -> Caller | None:
        """Returns the cached caller; None if not cached. Raises ApiError if cached as unknown."""
        now_s = self._clock()
        if now_s < self._unknown.get(digest, now_s):
            raise caller_unknown("the credential is not valid")
        until_s, caller = self._known.get(digest, (now_s, None))
        if caller is None:
            return None
        self._known.move_to_end(digest)
        # Look up again if the schedulers that know the caller are gone: others may have come.
        return caller if now_s < until_s and caller.is_served else None

    def _asked(self, digest: bytes, credential: str, origin: str) -> asyncio.Task[Caller | None]:
        task = self._asking.get(digest)
        if task is not None:
            return task
        is_known = digest in self._known
        finding_out = (
            self._find_out(digest, credential)
            if is_known
            else self._find_out_in_turn(digest, credential, origin)
        )
        task = asyncio.create_task(finding_out)
        self._asking[digest] = task

        def is_over(done: asyncio.Task[Caller | None]) -> None:
            del self._asking[digest]
            if not done.cancelled():
                # Marks the exception as retrieved: all requesters may have left.
                done.exception()

        task.add_done_callback(is_over)
        return task

    async def _find_out_in_turn(self, digest: bytes, credential: str, origin: str) -> Caller | None:
        """Looks up an unknown credential once its origin has its turn. Raises ApiError."""
        try:
            async with self._lookups.place(origin, self._memory.patience_s):
                return await self._find_out(digest, credential)
        except (TooManyWait, TimeoutError) as error:
            raise too_many_lookups() from error

    async def _ask_patiently(self, credential: str) -> Caller | None:
        """Looks up a credential, with retries after IdentificationThrottled. Raises ApiError."""
        for _ in range(self._memory.most_asks - 1):
            try:
                return await self._ask(credential)
            except IdentificationThrottled as again:
                await self._sleep(again.delay_s)
        try:
            return await self._ask(credential)
        except IdentificationThrottled as error:
            raise too_many_lookups() from error

    async def _find_out(self, digest: bytes, credential: str) -> Caller | None:
        caller = await self._ask_patiently(credential)
        now_s = self._clock()
        if caller is None:
            self._known.pop(digest, None)
            self._unknown[digest] = now_s + self._memory.unknown_s
            self._unknown.move_to_end(digest)
            if len(self._unknown) > self._memory.max_unknown:
                self._unknown.popitem(last=False)
        else:
            self._unknown.pop(digest, None)
            self._known[digest] = (now_s + self._memory.known_s, caller)
            self._known.move_to_end(digest)
            if len(self._known) > self._memory.max_known:
                self._known.popitem(last=False)
        return caller


# -- Middleware: places of the gateway, shared among tenants ---------------------------------------


class TenantConcurrency:
    """ASGI middleware behind CredentialGate that bounds concurrent requests per tenant."""

    def __init__(self, app: ASGIApp, places: Shares) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request while it holds a place of the caller's tenant. Raises ApiError: 429."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is None:
            await self._app(scope, receive, send)
            return
        tenant = caller.party
        if not self._places.may_take(tenant, 1):
            message = (
                f"the tenant has its share of the {self._places.num_all} concurrent requests of "
                "the gateway"
            )
            raise too_many_requests(message)
        self._places.take(tenant, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._places.give_back(tenant, 1)


# -- Middleware: credential check before every endpoint --------------------------------------------


class CredentialGate:
    """ASGI middleware that admits only requests with a credential known to schedulers.

    Health checks need no credential.
    """

    def __init__(self, app: ASGIApp, callers: Callable[[], KnownCallers]) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identifies the caller and passes the request on. Runs before the body is read.

        Raises ApiError.
        """
        if scope["type"] == "http" and not is_about_health(scope["path"]):
            credential = credential_of(scope["headers"])
            origin = origin_of(scope.get("client"))
            caller = await self._callers().identify(credential, origin)
            is_operation = is_for_operators(scope["path"])
            if not (caller.may_operate if is_operation else caller.may_generate):
                needed = _OPERATOR if is_operation else _GENERATE
                raise caller_not_allowed(f"the credential lacks the scope `{needed}`")
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
