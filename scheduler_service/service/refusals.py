"""Refused requests and calls: backoff for Sessions, and reports for log and audit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import grpc.aio

from scheduler_service.audit import Audit, CallerRefused, NoAudit
from scheduler_service.callers import Caller
from scheduler_service.driver import Driver
from scheduler_service.request_limits import RequestName
from scheduler_service.service.caller_checks import CallerNames
from scheduler_service.watching import RequestRefused
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError
from splitserve_rpc import OnRefusal

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
