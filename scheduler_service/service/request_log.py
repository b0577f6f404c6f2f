"""What becomes of requests and calls that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc.aio

from scheduler_service.audit.audit import Audit, NoAudit
from scheduler_service.audit.events import CallerRefused
from scheduler_service.callers.caller import Caller
from scheduler_service.driver import Driver
from scheduler_service.request_names import RequestName
from scheduler_service.service.caller_names import CallerNames
from scheduler_service.watching.turn import RequestRefused
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.interceptors import OnRefusal

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
