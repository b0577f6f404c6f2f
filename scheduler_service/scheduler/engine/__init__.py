"""Engine: the state of one executor (rows, blocks, steps in flight), planning and results."""

from scheduler_service.scheduler.engine.adapter_slots import AdapterLoad
from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.preemption_costs import (
    ASSUMED_HOST_LINK_BYTES_PER_S,
    PreemptionCosts,
)
from scheduler_service.scheduler.engine.row_columns import NO_STAY, RELEASED, RowColumns
from scheduler_service.scheduler.engine.sequences import SequenceEndings, Siblings, rank_completions
from scheduler_service.scheduler.engine.step_draft import StepDraft
from scheduler_service.scheduler.engine.step_time_model import StepLoad, StepTimeModel
from scheduler_service.scheduler.engine.suspects import MAX_STEPS_OF_OTHERS

__all__ = [
    "ASSUMED_HOST_LINK_BYTES_PER_S",
    "MAX_STEPS_OF_OTHERS",
    "NO_STAY",
    "RELEASED",
    "AdapterLoad",
    "Engine",
    "Placement",
    "PreemptionCosts",
    "RowColumns",
    "SequenceEndings",
    "Siblings",
    "StepDraft",
    "StepLoad",
    "StepTimeModel",
    "rank_completions",
]
