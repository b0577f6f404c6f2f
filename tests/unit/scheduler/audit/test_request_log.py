"""What is told of requests, before anybody has looked at how long their fields are."""

from __future__ import annotations

import pytest

from scheduler_service.audit.audit import RequestRefused
from scheduler_service.callers.caller import Caller, Scope
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.service.refusals import RequestLog
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes.listed_audit import ListedAudit


@pytest.mark.parametrize("tenant", ["", "t" * 129])
def test_names_of_a_refused_request_are_shortened_before_they_wait(tenant: str) -> None:
    audit = ListedAudit()
    log = RequestLog(Driver(ClusterConfig(), 1, lambda: None, audit=audit))
    caller = Caller("c" * 1000, tenant, frozenset({Scope.GENERATE}))
    message = api.GenerateRequest(request_id="r" * 4_000_000, tenant="m" * 4_000_000)

    with pytest.raises(DomainError), log.refusals(message, caller):
        raise DomainError("REQUEST_ID_INVALID", "too long")

    shown = ("t" if tenant else "m") * 128 + "..."
    assert audit.events == [
        RequestRefused("c" * 128 + "...", shown, "r" * 128 + "...", "REQUEST_ID_INVALID", "")
    ]
    whole = api.GenerateRequest(request_id="r" * 128)
    with pytest.raises(DomainError), log.refusals(whole, caller):
        raise DomainError("REQUEST_ID_INVALID", "why")
    assert isinstance(audit.events[1], RequestRefused)
    assert audit.events[1].request_id == "r" * 128
