"""Which steps count as answered."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.effects import ExecutorGone
from scheduler_service.scheduler.events import StepCompleted
from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.values.plan import StepOutcome, StepStatus
from tests.support.core.some_turns import turn

ADDRESS = "executor:1"
COMPLETED = StepCompleted(ADDRESS, StepOutcome(1, StepStatus.OK))


def test_turn_has_no_answer_when_the_executor_broke_the_contract_with_it() -> None:
    gone = ExecutorGone(ADDRESS, 1, LossCause.DIED, "it broke the step contract", [], 1)

    assert turn(gone, event=COMPLETED).answered is None


@pytest.mark.parametrize(
    ("cause", "is_drained"), [(LossCause.BLAMELESS, True), (LossCause.WITHDRAWN, False)]
)
def test_turn_has_the_answer_when_the_executor_leaves_after_it(
    cause: LossCause, is_drained: bool
) -> None:
    gone = ExecutorGone(ADDRESS, 1, cause, "why", [], 1, is_drained=is_drained)

    assert turn(gone, event=COMPLETED).answered is COMPLETED
