"""What an executor shows of its code and of its draft model, if it has one."""

from __future__ import annotations

import pytest

from executor_service.metrics import ExecutorMetrics
from executor_service.service import ExecuteStreams, StepWorker
from executor_service.speculation import DraftTotals
from executor_service.steps import StepExecutor
from splitserve_metrics import MetricsAddress
from tests.support.fakes.fake_runner import FakeRunner
from tests.support.metrics import Shown
from tests.support.steps.step_driver import make_executor_info

GUESSES = "splitserve_executor_draft_tokens_total"


def shown(drafts: DraftTotals | None, slow_compute_reason: str = "") -> Shown:
    info = make_executor_info(compute="some code", slow_compute_reason=slow_compute_reason)
    runner = FakeRunner(block_size=info.block_size, num_device_blocks=info.num_device_blocks)
    metrics = ExecutorMetrics(MetricsAddress("127.0.0.1:0"))
    metrics.watch(info, StepWorker(StepExecutor(info, runner)), ExecuteStreams(), drafts)
    return Shown(metrics.page())


@pytest.mark.parametrize(("reason", "is_fastest"), [("", 1), ("no compiler", 0)])
def test_compute_is_shown_with_whether_it_is_the_fastest(reason: str, is_fastest: int) -> None:
    page = shown(None, reason)

    assert page.value("splitserve_executor_compute_is_fastest", compute="some code") == is_fastest


def test_guesses_are_shown_by_what_came_of_them() -> None:
    totals = DraftTotals()
    totals.add(num_guesses=5, num_right=3)
    totals.add(num_guesses=4, num_right=0)
    page = shown(totals)

    assert page.value(GUESSES, outcome="accepted") == 3
    assert page.value(GUESSES, outcome="rejected") == 6


def test_no_guesses_are_shown_without_a_draft_model() -> None:
    with pytest.raises(KeyError):
        shown(None).value(GUESSES, outcome="accepted")
