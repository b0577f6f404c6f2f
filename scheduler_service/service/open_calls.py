"""How many calls that last one tenant may have open, whatever comes of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

import grpc.aio

from scheduler_service.audit.audit import Audit, CallerRefused, NoAudit
from scheduler_service.callers.caller import Caller
from scheduler_service.driver import Driver
from scheduler_service.request_limits import RequestName
from scheduler_service.service.caller_checks import CallerNames
from scheduler_service.watching.turn import RequestRefused
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.interceptors import OnRefusal

# A gateway has one for all of its requests.
MAX_OPEN_STREAMS = 1024
# Each holds a piece of a file, until the caller reads it; those that wait hold nothing.
MAX_TOKENIZERS_AT_ONCE = 8
MAX_TOKENIZERS = 256
_RETRY_DELAY_S = 1.0


class OpenCalls:
    """Counts Generate and Session streams, and GetTokenizer calls, of each owner."""

    def __init__(self) -> None:
        self._streams = Places(MAX_OPEN_STREAMS, _too_many_streams)
        self._tokenizers = Places(MAX_TOKENIZERS, _too_many_tokenizers)
        # Kept by those that wait or have a turn.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def stream(self, tenant: str | None) -> Iterator[None]:
        """One is open within; None: nobody knows whose. Raises DomainError(QUOTA_EXCEEDED)."""
        if tenant is None:
            yield
            return
        with self._streams.taken(tenant):
            yield

    @asynccontextmanager
    async def tokenizer(self, owner: str) -> AsyncIterator[None]:
        """Waits for a turn: those that start together all get theirs.

        Raises DomainError(QUOTA_EXCEEDED).
        """
        with self._tokenizers.taken(owner):
            turns = self._turns.get(owner)
            if turns is None:
                turns = self._turns[owner] = asyncio.Semaphore(MAX_TOKENIZERS_AT_ONCE)
            async with turns:
                yield


def _too_many_streams(tenant: str) -> DomainError:
    message = (
        f"tenant {tenant!r} has {MAX_OPEN_STREAMS} Generate and Session streams open, as many as "
        "it may"
    )
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=_RETRY_DELAY_S)


def _too_many_tokenizers(owner: str) -> DomainError:
    message = f"{owner} has {MAX_TOKENIZERS} GetTokenizer calls open, as many as it may"
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=_RETRY_DELAY_S)


# -- How much of something there may be side by side, for each of those that want it ---------------


class Places:
    """`most` places for each owner; nothing is remembered of one that has none."""

    def __init__(self, most: int, refusal: Callable[[str], DomainError]) -> None:
        """`refusal`: what an owner is told that has all of its places."""
        self._most = most
        self._refusal = refusal
        self._num_taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, owner: str) -> Iterator[None]:
        """`owner` has one more within. Raises DomainError."""
        if self._num_taken[owner] >= self._most:
            raise self._refusal(owner)
        self._num_taken[owner] += 1
        try:
            yield
        finally:
            self._num_taken[owner] -= 1
            if not self._num_taken[owner]:
                del self._num_taken[owner]


# -- Who is refused again and again is read more slowly: refusals take time from others ------------

_FIRST_S = 0.01
_MOST_S = 0.1

Sleep = Callable[[float], Awaitable[object]]


class RefusalPauses:
    """Those of all Sessions: one for each tenant, however many Sessions it has."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep
        # Kept by the Sessions that are open.
        self._of: WeakValueDictionary[str, RefusalPause] = WeakValueDictionary()

    def of(self, tenant: str | None) -> RefusalPause:
        """For a Session of `tenant`; None: of many, or of nobody knows whom, which never pauses."""
        if tenant is None:
            return RefusalPause(None)
        pause = self._of.get(tenant)
        if pause is None:
            pause = self._of[tenant] = RefusalPause(self._sleep)
        return pause


class RefusalPause:
    """Of one tenant, whose Sessions make it one after the other. `sleep`: None never to pause."""

    def __init__(self, sleep: Sleep | None) -> None:
        self._sleep = sleep
        self._next_s = _FIRST_S
        self._turn = asyncio.Lock()

    async def after(self, refusal_reason: str | None) -> None:
        """Pauses after a submit that was refused for its tenant's quota; None: it was not."""
        if refusal_reason is None:
            self._next_s = _FIRST_S
        elif refusal_reason == "QUOTA_EXCEEDED" and self._sleep is not None:
            async with self._turn:
                pause_s, self._next_s = self._next_s, min(2 * self._next_s, _MOST_S)
                await self._sleep(pause_s)


# -- What becomes of requests and calls that are refused -------------------------------------------

_OF_CALLERS = frozenset({"CALLER_UNKNOWN", "CALLER_NOT_ALLOWED"})
_MAX_TEXT_CHARS = 128
_SUBMIT = "/splitserve.scheduler.v1.SchedulerService/Session"


def caller_refusals(audit: Audit, names: CallerNames) -> OnRefusal:
    """Returns what tells `audit` of callers that may not do what they tried."""

    def tell(method: str, context: grpc.aio.ServicerContext, reason: str) -> None:
        if reason not in _OF_CALLERS:
            return
        name = names.of_refused(context, reason)
        audit.record(CallerRefused(method, context.peer(), reason, name))

    return tell


class RequestLog:
    """Tells the watchers of `driver` which requests were refused, and `audit` which callers.

    `tells_tenants_apart`: whether each tenant has request ids of its own.
    """

    def __init__(
        self, driver: Driver, audit: Audit | None = None, *, tells_tenants_apart: bool = False
    ) -> None:
        self._driver = driver
        self._audit = audit or NoAudit()
        self._tells_tenants_apart = tells_tenants_apart

    @contextmanager
    def refusals(self, message: api.GenerateRequest, caller: Caller) -> Iterator[None]:
        """Tells of a DomainError that is raised within, which refuses the request."""
        try:
            yield
        except DomainError as error:
            self._driver.refused(self._refused(message, caller, error))
            raise

    def _refused(
        self, message: api.GenerateRequest, caller: Caller, error: DomainError
    ) -> RequestRefused:
        """Shortens the texts of clients: their lengths are not checked, and watchers keep them."""
        name = RequestName(
            _shortened(message.request_id), caller.tenant if self._tells_tenants_apart else None
        )
        tenant = _shortened(caller.tenant or message.tenant)
        limit = _shortened(error.limit)
        return RequestRefused(
            name, _shortened(caller.name), tenant, error.reason, limit, str(error)
        )

    @contextmanager
    def unknown_callers(self, peer: str, name: Callable[[str], str]) -> Iterator[None]:
        """Tells of a DomainError that is raised within, which refuses the caller of a request.

        A Session of `peer` brought the request. `name`: of the caller, by the reason.
        """
        try:
            yield
        except DomainError as error:
            self._audit.record(CallerRefused(_SUBMIT, peer, error.reason, name(error.reason)))
            raise


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]}..."


# --------------------------------------------------------------------------------------------------
# Work that nobody began, though nothing is in the way: a bug of ours, and no reason to hang.

_log = logging.getLogger(__name__)


class ForgottenWork:
    """Sees to it that what could begin begins, if there is no step from one look to the next.

    Whatever changes, `Scheduler` looks at requests that wait, so there is never anything to do
    here. If there is, the log says so, and no request waits for ever.
    """

    def __init__(self, cluster: Driver) -> None:
        self._cluster = cluster
        # Steps answered by the time of a look at which nothing was in flight; None: something was.
        self._num_steps: int | None = None

    async def look(self) -> None:
        """To be called now and then, with far more time between than a step takes to begin."""
        cluster = self._cluster
        # Whoever was woken by now, by what came while this process stood still, say, begins first.
        await asyncio.sleep(0)
        before = self._num_steps
        is_still = cluster.scheduler.has_work and not cluster.scheduler.is_computing
        self._num_steps = cluster.membership.num_steps_answered if is_still else None
        if not is_still or before != self._num_steps:
            return
        cluster.look_again()
        await asyncio.sleep(0)  # those that were woken plan their steps
        if cluster.scheduler.is_computing:
            _log.error("wake_up_missed num_unfinished=%d", cluster.num_unfinished)
