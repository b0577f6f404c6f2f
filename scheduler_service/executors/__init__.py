"""Executors of the scheduler: joining, leaving and loss, sessions, links, and step time limits."""

from scheduler_service.executors.answer_watch import (
    BELIEVED_STEPS,
    FACTOR,
    FIRST_LENIENCE,
    GOOD_STEPS,
    MAX_LENIENCE,
    AnswerWatch,
    LivenessVerdict,
    MeasuredStep,
    SignsOfLife,
    StepPatience,
    StepSize,
)
from scheduler_service.executors.applicants import MAX_PENDING_JOINS, Tasks
from scheduler_service.executors.drains import MAX_TIMEOUT_S, Drained
from scheduler_service.executors.executor_link import (
    ExecutorGone,
    ExecutorLink,
    ExecutorLost,
    ExecutorRestarted,
    ExecutorSilent,
    LinkConfig,
    execute_method,
    is_refused,
)
from scheduler_service.executors.executor_session import (
    MAX_REPEATED,
    ExecutorSession,
    Life,
    StepAlarm,
)
from scheduler_service.executors.handshake import (
    check_address,
    check_executor_info,
    core_config,
    epoch_for,
)
from scheduler_service.executors.membership import Connect, Membership

__all__ = [
    "BELIEVED_STEPS",
    "FACTOR",
    "FIRST_LENIENCE",
    "GOOD_STEPS",
    "MAX_LENIENCE",
    "MAX_PENDING_JOINS",
    "MAX_REPEATED",
    "MAX_TIMEOUT_S",
    "AnswerWatch",
    "Connect",
    "Drained",
    "ExecutorGone",
    "ExecutorLink",
    "ExecutorLost",
    "ExecutorRestarted",
    "ExecutorSession",
    "ExecutorSilent",
    "Life",
    "LinkConfig",
    "LivenessVerdict",
    "MeasuredStep",
    "Membership",
    "SignsOfLife",
    "StepAlarm",
    "StepPatience",
    "StepSize",
    "Tasks",
    "check_address",
    "check_executor_info",
    "core_config",
    "epoch_for",
    "execute_method",
    "is_refused",
]
