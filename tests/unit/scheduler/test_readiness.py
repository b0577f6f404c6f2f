"""Whether a scheduler serves, on a clock that stands still unless a test moves it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.service.readiness import Facts, Readiness, ReadinessJudge
from splitserve.scheduler.v1 import scheduler_pb2

BUSY = Facts(
    is_draining=False,
    num_connected=2,
    num_failing=0,
    has_work=True,
    num_steps=10,
    step_allowed_s=5.0,
)
S = 10**9


def judge_after(*looks: tuple[float, Facts]) -> Readiness:
    """What holds at the last of some moments."""
    judge = ReadinessJudge()
    return [judge.judge(facts, round(now_s * S)) for now_s, facts in looks][-1]


def test_scheduler_is_ready_when_steps_are_answered() -> None:
    looks = [(4.0 * number, replace(BUSY, num_steps=number)) for number in range(9)]
    assert judge_after(*looks) is Readiness.READY


def test_scheduler_makes_no_progress_when_no_step_is_answered_for_longer_than_allowed() -> None:
    assert judge_after((0, BUSY), (5.0, BUSY)) is Readiness.READY
    assert judge_after((0, BUSY), (5.1, BUSY)) is Readiness.NO_PROGRESS


def test_scheduler_is_ready_again_when_a_step_is_answered() -> None:
    answered = replace(BUSY, num_steps=11)
    assert judge_after((0, BUSY), (9, BUSY), (10, answered)) is Readiness.READY


def test_scheduler_has_all_the_time_of_a_step_when_work_comes_after_a_pause() -> None:
    idle = replace(BUSY, has_work=False)
    assert judge_after((0, BUSY), (1, idle), (1000, idle), (1004, BUSY)) is Readiness.READY
    assert judge_after((0, idle), (1000, idle), (1005.1, BUSY)) is Readiness.NO_PROGRESS


def test_scheduler_has_all_the_time_of_a_step_when_the_first_executor_comes() -> None:
    nobody = replace(BUSY, num_connected=0)
    assert judge_after((0, nobody), (100, nobody)) is Readiness.NO_EXECUTOR
    assert judge_after((0, nobody), (100, nobody), (104, BUSY)) is Readiness.READY


@pytest.mark.parametrize("facts", [BUSY, replace(BUSY, num_connected=0)])
def test_scheduler_drains_whatever_else_is_the_case(facts: Facts) -> None:
    draining = replace(facts, is_draining=True)
    assert judge_after((0, draining), (99, draining)) is Readiness.DRAINING


def test_every_readiness_has_its_name_in_the_contract() -> None:
    names = {f"READINESS_{readiness.value}" for readiness in Readiness}
    assert {*names, "READINESS_UNSPECIFIED"} == set(scheduler_pb2.Readiness.keys())


def test_readiness_is_executors_failing_when_all_connected_executors_fail() -> None:
    judge = ReadinessJudge()

    assert judge.judge(replace(BUSY, num_failing=1), 0) is Readiness.READY
    assert judge.judge(replace(BUSY, num_failing=2), 0) is Readiness.EXECUTORS_FAILING
