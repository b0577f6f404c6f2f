"""Outcomes of steps: checks of results, new tokens, and losses after failures."""

from scheduler_service.scheduler.engine.outcomes.losses import (
    MAX_FRUITLESS_LOSSES,
    MAX_UNSAMPLED_NS,
    FailureRecovery,
    detach,
    evacuate,
    is_lost_too_often,
    take_back,
)
from scheduler_service.scheduler.engine.outcomes.outcome_checks import OutcomeChecks
from scheduler_service.scheduler.engine.outcomes.results import PromisedTokenRollback, Results
from scheduler_service.scheduler.engine.outcomes.step_parts import StepParts

__all__ = [
    "MAX_FRUITLESS_LOSSES",
    "MAX_UNSAMPLED_NS",
    "FailureRecovery",
    "OutcomeChecks",
    "PromisedTokenRollback",
    "Results",
    "StepParts",
    "detach",
    "evacuate",
    "is_lost_too_often",
    "take_back",
]
