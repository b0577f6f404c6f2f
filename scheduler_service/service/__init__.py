"""gRPC services that clients, executors and operators call."""

from scheduler_service.service.admin import AdminServicer
from scheduler_service.service.caller_checks import CallerChecks, CallerNames, scopes_of
from scheduler_service.service.intake import Intake
from scheduler_service.service.live import LiveServicer
from scheduler_service.service.metrics_page import SchedulerMetrics
from scheduler_service.service.open_calls import (
    MAX_OPEN_STREAMS,
    MAX_TOKENIZERS,
    MAX_TOKENIZERS_AT_ONCE,
)
from scheduler_service.service.readiness import (
    Readiness,
    ReadinessInputs,
    ReadinessJudge,
    ReadinessWatch,
    StallWatchdog,
)
from scheduler_service.service.refusals import RefusalPauses, RequestLog, Sleep, caller_refusals
from scheduler_service.service.registry import (
    MAX_PENDING_OF_A_HOST,
    ExecutorAddresses,
    RegistryServicer,
    Resolver,
)
from scheduler_service.service.servicer import SchedulerServicer

__all__ = [
    "MAX_OPEN_STREAMS",
    "MAX_PENDING_OF_A_HOST",
    "MAX_TOKENIZERS",
    "MAX_TOKENIZERS_AT_ONCE",
    "AdminServicer",
    "CallerChecks",
    "CallerNames",
    "ExecutorAddresses",
    "Intake",
    "LiveServicer",
    "Readiness",
    "ReadinessInputs",
    "ReadinessJudge",
    "ReadinessWatch",
    "RefusalPauses",
    "RegistryServicer",
    "RequestLog",
    "Resolver",
    "SchedulerMetrics",
    "SchedulerServicer",
    "Sleep",
    "StallWatchdog",
    "caller_refusals",
    "scopes_of",
]
