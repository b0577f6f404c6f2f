"""Counts what the audit log is told, and tells it."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service.audit.audit import Audit
from scheduler_service.audit.events import (
    AuditEvent,
    CallerRefused,
    ExecutorDrained,
    ExecutorLost,
    ExecutorRefused,
    ExecutorRegistered,
    ExecutorWithdrawn,
    RequestAdmitted,
    RequestEnded,
    RequestQuarantined,
    RequestRefused,
)
from scheduler_service.core.request import FinishReason
from splitserve_metrics.instruments import Instruments
from splitserve_rpc.errors import CODE_OF_REASON

_OTHER = "other"
_CHANGES = ("joined", "drained", "lost", "withdrawn")
# Of a request; the errors are those that mean a fault, which alerts are about.
_ENDS = (
    *(reason.value for reason in FinishReason if reason is not FinishReason.ERROR),
    "INVARIANT_BROKEN",
    "EXECUTOR_LOST_REPEATEDLY",
    "ROW_FAILED",
)


class CountedAudit:
    """Implements `Audit`, before `audit`. `has_numbers`: whether a tenant has its own."""

    def __init__(
        self, audit: Audit, instruments: Instruments, has_numbers: Callable[[str], bool]
    ) -> None:
        self._audit = audit
        self._has_numbers = has_numbers
        self._refused = instruments.counter("splitserve_requests_refused_total")
        self._ended = instruments.counter("splitserve_requests_total")
        self._prompt_tokens = instruments.counter("splitserve_prompt_tokens_total")
        self._tenant_requests = instruments.counter("splitserve_tenant_requests_total")
        self._tenant_prompts = instruments.counter("splitserve_tenant_prompt_tokens_total")
        self._tenant_outputs = instruments.counter("splitserve_tenant_output_tokens_total")
        self._changes = instruments.counter("splitserve_executor_changes_total")
        self._quarantined = instruments.counter("splitserve_requests_quarantined_total")
        # One that begins with 1 has not risen, as Prometheus sees it: the first would be nobody's.
        for counter, labels in (
            (self._changes, _CHANGES), (self._refused, CODE_OF_REASON), (self._ended, _ENDS)
        ):  # fmt: skip
            for label in labels:
                counter.labels(label)

    def record(self, event: AuditEvent) -> None:
        self._count(event)
        self._audit.record(event)

    def close(self) -> None:
        self._audit.close()

    def _count(self, event: AuditEvent) -> None:
        match event:
            case RequestAdmitted():
                self._prompt_tokens.inc(event.num_prompt_tokens)
                tenant = self._label(event.tenant)
                self._tenant_prompts.labels(tenant).inc(event.num_prompt_tokens)
            case RequestEnded():
                self._ended.labels(event.reason).inc()
                tenant = self._label(event.tenant)
                self._tenant_requests.labels(tenant).inc()
                self._tenant_outputs.labels(tenant).inc(event.num_output_tokens)
            case RequestRefused() | CallerRefused() | ExecutorRefused():
                self._refused.labels(event.reason).inc()
            case ExecutorRegistered():
                self._changes.labels("joined").inc()
            case ExecutorDrained():
                self._changes.labels("drained").inc()
            case ExecutorLost():
                self._changes.labels("lost").inc()
            case ExecutorWithdrawn():
                self._changes.labels("withdrawn").inc()
            case RequestQuarantined():
                self._quarantined.inc()
            case _:
                pass

    def _label(self, tenant: str) -> str:
        """Callers can name any number of tenants, of whom each would be a series for ever."""
        return tenant if self._has_numbers(tenant) else _OTHER
