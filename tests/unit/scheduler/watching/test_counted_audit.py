"""What the audit log is told is counted, by labels that callers do not choose."""

from __future__ import annotations

from scheduler_service.audit.audit import (
    AuditEvent,
    CallerRefused,
    ExecutorLost,
    ExecutorRefused,
    RequestAdmitted,
    RequestEnded,
    RequestRefused,
)
from scheduler_service.watching.metrics import CountedAudit
from splitserve_metrics.instruments import Instruments, Page
from splitserve_metrics.scheduler_table import SCHEDULER_METRICS
from tests.support.fakes.listed_audit import ListedAudit
from tests.support.metrics import Shown


def shown_of(*events: AuditEvent) -> Shown:
    made, audit = Instruments(SCHEDULER_METRICS), ListedAudit()
    counted = CountedAudit(audit, made, {"known"}.__contains__)
    for event in events:
        counted.record(event)
    assert audit.events == list(events)
    return Shown(Page(made.registry, []))


def test_tenants_are_told_apart_only_when_the_configuration_names_them() -> None:
    tenants = ["known", *(f"made-up-{number}" for number in range(100)), ""]
    shown = shown_of(
        *(RequestAdmitted("c", tenant, "r", 10, None, 1, "m", "") for tenant in tenants),
        *(RequestEnded(tenant, "r", "stop", 3) for tenant in tenants),
    )

    assert shown.value("splitserve_tenant_prompt_tokens_total", tenant="known") == 10
    assert shown.value("splitserve_tenant_prompt_tokens_total", tenant="other") == 1010
    assert shown.value("splitserve_tenant_output_tokens_total", tenant="other") == 303
    assert shown.value("splitserve_prompt_tokens_total") == 1020
    assert shown.value("splitserve_requests_total", reason="stop") == 102


def test_refusals_and_losses_are_counted_by_what_they_are() -> None:
    shown = shown_of(
        RequestRefused("c", "t", "r", "QUEUE_FULL", ""),
        RequestRefused("c", "t", "r", "QUEUE_FULL", ""),
        CallerRefused("m", "ipv4:1", "CALLER_UNKNOWN"),
        ExecutorRefused("a:2", "ipv4:2", "MODEL_MISMATCH"),
        ExecutorLost("a:1", 1, 3),
    )

    assert shown.value("splitserve_requests_refused_total", reason="QUEUE_FULL") == 2
    assert shown.value("splitserve_requests_refused_total", reason="CALLER_UNKNOWN") == 1
    assert shown.value("splitserve_requests_refused_total", reason="MODEL_MISMATCH") == 1
    assert shown.value("splitserve_executor_changes_total", change="lost") == 1
