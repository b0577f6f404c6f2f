"""Tells the audit log what becomes of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import grpc.aio

from scheduler_service.audit.audit import Audit, NoAudit
from scheduler_service.audit.events import (
    CallerRefused,
    RequestAdmitted,
    RequestEnded,
    RequestRefused,
)
from scheduler_service.callers.admission import Charge
from scheduler_service.callers.caller import Caller
from scheduler_service.callers.quotas import num_computed_outputs
from scheduler_service.core.request import Request
from scheduler_service.observer import NoObserver, Observer
from scheduler_service.request_names import RequestName
from scheduler_service.service.caller_names import CallerNames
from scheduler_service.service.intake import Accepted
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.interceptors import OnRefusal

# Its client is gone, or the scheduler was stopped, while it ran.
_ABANDONED = "abandoned"
_MAX_TEXT_CHARS = 128
_OF_CALLERS = frozenset({"CALLER_UNKNOWN", "CALLER_NOT_ALLOWED"})
_SUBMIT = "/splitserve.scheduler.v1.SchedulerService/Session"


def caller_refusals(audit: Audit, names: CallerNames) -> OnRefusal:
    """Tells `audit` of callers that may not do what they tried."""

    def tell(method: str, context: grpc.aio.ServicerContext, reason: str) -> None:
        if reason not in _OF_CALLERS:
            return
        name = names.of_refused(context, reason)
        audit.record(CallerRefused(method, context.peer(), reason, name))

    return tell


class RequestLog:
    """Of one scheduler. `audit`, `observer`: None where nobody wants to know.

    `tells_tenants_apart`: whether ids are those of their tenant.
    """

    def __init__(
        self,
        audit: Audit | None = None,
        observer: Observer | None = None,
        *,
        tells_tenants_apart: bool = False,
    ) -> None:
        self._audit = audit or NoAudit()
        self._has_audit = not isinstance(self._audit, NoAudit)
        self._observer = observer or NoObserver()
        self._tells_tenants_apart = tells_tenants_apart

    @contextmanager
    def refusals(self, message: api.GenerateRequest, caller: Caller) -> Iterator[None]:
        """Whatever is raised within refuses the request."""
        try:
            yield
        except DomainError as error:
            tenant = caller.tenant or message.tenant
            # Nobody has looked yet at how long they are, and they wait to be written.
            who, tenant, request_id = map(_shown, (caller.name, tenant, message.request_id))
            refused = RequestRefused(who, tenant, request_id, error.reason, _shown(error.limit))
            self._audit.record(refused)
            if request_id:
                name = RequestName(request_id, self._tenant_of_ids(caller))
                self._observer.request_refused(name, tenant, error.reason, str(error))
            raise

    def _tenant_of_ids(self, caller: Caller) -> str | None:
        return caller.tenant if self._tells_tenants_apart else None

    def followed(self, accepted: Accepted) -> Accepted:
        """The same, whose end is told."""
        if not self._has_audit:
            return accepted
        admission, request = accepted.admission, accepted.request
        name, tenant = admission.name.own_id, request.scheduling.tenant
        charge = _Followed(admission.charge, self._audit, tenant, name, request)
        return replace(accepted, admission=replace(admission, charge=charge))

    @contextmanager
    def unknown_callers(self, peer: str, name: Callable[[str], str]) -> Iterator[None]:
        """Whatever is raised within refuses whose request a Session of `peer` brought.

        `name`: of who was refused, by the reason.
        """
        try:
            yield
        except DomainError as error:
            self._audit.record(CallerRefused(_SUBMIT, peer, error.reason, name(error.reason)))
            raise

    def admitted(
        self, accepted: Accepted, caller: Caller, model: executor.ModelInfo | None
    ) -> None:
        """It was submitted."""
        if not self._has_audit:
            return
        request = accepted.request
        event = RequestAdmitted(
            caller.name,
            request.scheduling.tenant,
            accepted.admission.name.own_id,
            request.sequences[0].num_prompt_tokens,
            request.params.max_tokens,
            request.params.num_sequences,
            "" if model is None else model.name,
            request.scheduling.adapter,
        )
        self._audit.record(event)


class _Followed:
    """Implements `Charge`. `request`: as it came, with the outputs that others computed."""

    def __init__(
        self, charge: Charge, audit: Audit, tenant: str, request_id: str, request: Request
    ) -> None:
        self._charge = charge
        self._audit = audit
        self._tenant = tenant
        self._request_id = request_id
        self._num_resumed_tokens = num_computed_outputs(request)

    def begin(self) -> None:
        self._charge.begin()

    def end(self, request: Request) -> None:
        num_tokens = num_computed_outputs(request) - self._num_resumed_tokens
        how = _how_it_ended(request)
        self._audit.record(RequestEnded(self._tenant, self._request_id, how, num_tokens))
        self._charge.end(request)


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]}..."


def _how_it_ended(request: Request) -> str:
    if request.error is not None:
        reason, _ = request.error
        return reason
    return _ABANDONED if request.finish_reason is None else request.finish_reason.value
