"""Limits on open calls, slow-down and log of refused requests, and recovery of forgotten work."""

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

# Of one tenant. A gateway needs one Session for all of its requests.
MAX_OPEN_STREAMS = 1024
# GetTokenizer calls of one owner. A call that sends holds a chunk of a file until the caller reads
# it; a call that waits for its turn holds nothing.
MAX_TOKENIZERS_AT_ONCE = 8
MAX_TOKENIZERS = 256
_RETRY_DELAY_S = 1.0


class OpenCalls:
    """Limits each tenant's Generate and Session streams, and each owner's GetTokenizer calls."""

    def __init__(self) -> None:
        self._streams = Places(MAX_OPEN_STREAMS, _too_many_streams)
        self._tokenizers = Places(MAX_TOKENIZERS, _too_many_tokenizers)
        # Semaphores are kept alive by the calls that wait for them or hold them.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def stream(self, tenant: str | None) -> Iterator[None]:
        """Counts an open stream of `tenant` within the block. Raises DomainError(QUOTA_EXCEEDED).

        `tenant` None: the tenant is unknown, and the stream is not counted.
        """
        if tenant is None:
            yield
            return
        with self._streams.taken(tenant):
            yield

    @asynccontextmanager
    async def tokenizer(self, owner: str) -> AsyncIterator[None]:
        """Waits for a turn of `owner` to send a tokenizer, and holds the turn within the block.

        Raises DomainError(QUOTA_EXCEEDED) if MAX_TOKENIZERS calls of `owner` are open.
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


# -- Concurrency limit of each owner ---------------------------------------------------------------


class Places:
    """Counter that gives each owner at most `most` places; owners without places cost no memory."""

    def __init__(self, most: int, refusal: Callable[[str], DomainError]) -> None:
        """`refusal` makes the error for an owner whose places are all taken."""
        self._most = most
        self._refusal = refusal
        self._num_taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, owner: str) -> Iterator[None]:
        """Takes a place of `owner` for the block. Raises the DomainError of `refusal`."""
        if self._num_taken[owner] >= self._most:
            raise self._refusal(owner)
        self._num_taken[owner] += 1
        try:
            yield
        finally:
            self._num_taken[owner] -= 1
            if not self._num_taken[owner]:
                del self._num_taken[owner]


# -- Backoff for Sessions whose requests are refused -----------------------------------------------
#
# Every refusal takes time from other callers, so such a Session is read more slowly.

_FIRST_S = 0.01
_MOST_S = 0.1

Sleep = Callable[[float], Awaitable[object]]


class RefusalPauses:
    """Backoff of each tenant, shared by all Sessions of the tenant."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep
        # Kept alive by the open Sessions.
        self._of: WeakValueDictionary[str, RefusalPause] = WeakValueDictionary()

    def of(self, tenant: str | None) -> RefusalPause:
        """Returns the backoff for a Session of `tenant`.

        `tenant` None: the Session serves many tenants or an unknown one, and is never paused.
        """
        if tenant is None:
            return RefusalPause(None)
        pause = self._of.get(tenant)
        if pause is None:
            pause = self._of[tenant] = RefusalPause(self._sleep)
        return pause


class RefusalPause:
    """Backoff of one tenant: its Sessions pause one after the other, 10 to 100 ms each.

    `sleep` None: never pauses.
    """

    def __init__(self, sleep: Sleep | None) -> None:
        self._sleep = sleep
        self._next_s = _FIRST_S
        self._turn = asyncio.Lock()

    async def after(self, refusal_reason: str | None) -> None:
        """Pauses after a submit that was refused for QUOTA_EXCEEDED, twice as long each time.

        `refusal_reason` None: the request was accepted, which resets the pause.
        """
        if refusal_reason is None:
            self._next_s = _FIRST_S
        elif refusal_reason == "QUOTA_EXCEEDED" and self._sleep is not None:
            async with self._turn:
                pause_s, self._next_s = self._next_s, min(2 * self._next_s, _MOST_S)
                await self._sleep(pause_s)


# -- Reports of refused requests and calls ---------------------------------------------------------

_OF_CALLERS = frozenset({"CALLER_UNKNOWN", "CALLER_NOT_ALLOWED"})
_MAX_TEXT_CHARS = 128
_SUBMIT = "/splitserve.scheduler.v1.SchedulerService/Session"


def caller_refusals(audit: Audit, names: CallerNames) -> OnRefusal:
    """Returns a callback that records calls of unknown or not allowed callers in the audit log."""

    def tell(method: str, context: grpc.aio.ServicerContext, reason: str) -> None:
        if reason not in _OF_CALLERS:
            return
        name = names.of_refused(context, reason)
        audit.record(CallerRefused(method, context.peer(), reason, name))

    return tell


class RequestLog:
    """Reports refused requests to the watchers of `driver`, and refused callers to `audit`.

    `tells_tenants_apart`: each tenant has a namespace of request ids of its own.
    """

    def __init__(
        self, driver: Driver, audit: Audit | None = None, *, tells_tenants_apart: bool = False
    ) -> None:
        self._driver = driver
        self._audit = audit or NoAudit()
        self._tells_tenants_apart = tells_tenants_apart

    @contextmanager
    def refusals(self, message: api.GenerateRequest, caller: Caller) -> Iterator[None]:
        """Reports a DomainError raised in the block as refusal of the request; raises it again."""
        try:
            yield
        except DomainError as error:
            self._driver.refused(self._refused(message, caller, error))
            raise

    def _refused(
        self, message: api.GenerateRequest, caller: Caller, error: DomainError
    ) -> RequestRefused:
        """Returns the report of a refused request.

        Texts of clients are shortened: their lengths are unchecked, and watchers keep them.
        """
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
        """Records a DomainError raised in the block as a refusal of a caller; raises it again.

        `peer`: peer of the Session that brought the request. `name` returns the name of the caller
        in the audit log, given the reason of the refusal.
        """
        try:
            yield
        except DomainError as error:
            self._audit.record(CallerRefused(_SUBMIT, peer, error.reason, name(error.reason)))
            raise


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]}..."


# -- Recovery of forgotten work --------------------------------------------------------------------
#
# If work can start and no step is in flight, a wake-up was missed. That is a bug of ours, which
# must not make requests hang.

_log = logging.getLogger(__name__)


class ForgottenWork:
    """Watchdog that wakes the scheduler if it has work, but runs no step between two looks.

    `Scheduler` looks at the waiting requests after every event, so the watchdog should never find
    any work. If it does, it logs an error, and no request waits for ever.
    """

    def __init__(self, cluster: Driver) -> None:
        self._cluster = cluster
        # Steps answered until the last look, if there was work and no step in flight; else None.
        self._num_steps: int | None = None

    async def look(self) -> None:
        """Compares with the previous look, and wakes the scheduler if it stood still since.

        To be called periodically; the period must be much longer than the start of a step takes.
        """
        cluster = self._cluster
        # Callbacks that are already due run first, such as those from a stall of this process.
        await asyncio.sleep(0)
        before = self._num_steps
        is_still = cluster.scheduler.has_work and not cluster.scheduler.is_computing
        self._num_steps = cluster.membership.num_steps_answered if is_still else None
        if not is_still or before != self._num_steps:
            return
        cluster.look_again()
        await asyncio.sleep(0)  # lets woken callbacks plan their steps
        if cluster.scheduler.is_computing:
            _log.error("wake_up_missed num_unfinished=%d", cluster.num_unfinished)
