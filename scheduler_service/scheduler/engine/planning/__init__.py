"""Planning of the next step: arrival checks, admission, and the tokens that each row computes."""

from scheduler_service.scheduler.engine.planning.arrival_checks import (
    check_encoder_length,
    check_prompt_length,
    check_request,
    fits,
    max_len_of,
    prepare_request,
)
from scheduler_service.scheduler.engine.planning.batch_policy import PrefillFirst, QueueState
from scheduler_service.scheduler.engine.planning.lateness import (
    MAX_REFUSALS,
    MIN_SMALLEST_STEPS,
    DeadlineEnforcer,
    earliest_finish_ns,
)
from scheduler_service.scheduler.engine.planning.room import MAX_BYPASSES, Room
from scheduler_service.scheduler.engine.planning.rows import GrowingRows
from scheduler_service.scheduler.engine.planning.step_limits import PromptLimit, PromptTokens
from scheduler_service.scheduler.engine.planning.step_planner import StepPlanner

__all__ = [
    "MAX_BYPASSES",
    "MAX_REFUSALS",
    "MIN_SMALLEST_STEPS",
    "DeadlineEnforcer",
    "GrowingRows",
    "PrefillFirst",
    "PromptLimit",
    "PromptTokens",
    "QueueState",
    "Room",
    "StepPlanner",
    "check_encoder_length",
    "check_prompt_length",
    "check_request",
    "earliest_finish_ns",
    "fits",
    "max_len_of",
    "prepare_request",
]
