"""The queue policies as the core obeys them: urgency, deadlines, fair shares."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.planning.lateness import MIN_SMALLEST_STEPS
from scheduler_service.scheduler.queue.key_order import TURN_EVERY
from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.request import RequestStatus, SchedulingParams
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver, names

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
URGENT, NORMAL, PATIENT = (SchedulingParams(priority=priority) for priority in (-1, 0, 5))


def priority_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {"queue_policy": "priority", "prefix_caching": False}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def tenant(name: str) -> SchedulingParams:
    return SchedulingParams(tenant=name)


# -- urgency -----------------------------------------------------------------------------------


def test_urgent_request_preempts_the_least_urgent_when_blocks_are_exhausted() -> None:
    driver = priority_driver(num_device_blocks=6)
    driver.add(7, "normal", scheduling=NORMAL)
    driver.add(7, "patient", scheduling=PATIENT)
    driver.step()
    driver.add(10, "urgent", scheduling=URGENT)
    assert names(driver.next_rows()) == ["normal", "urgent"]
    assert driver.core.num_preemptions == 1


def test_urgent_request_preempts_the_least_urgent_when_only_rows_are_exhausted() -> None:
    driver = priority_driver(max_num_seqs=2)
    driver.add(7, "patient", scheduling=PATIENT)
    driver.add(7, "normal", scheduling=NORMAL)
    driver.step()
    driver.add(3, "urgent", scheduling=URGENT)
    assert names(driver.next_rows()) == ["normal", "urgent"]


def test_urgent_request_preempts_as_many_as_it_needs_when_it_has_several_sequences() -> None:
    driver = priority_driver(max_num_seqs=3)
    for name in ("old", "middle", "young"):
        driver.add(3, name, scheduling=PATIENT)
    driver.step()
    driver.add(3, "pair", n=2, scheduling=URGENT)
    assert sorted(names(driver.next_rows())) == ["old", "pair"]


def test_urgent_request_preempts_nobody_when_that_would_not_be_enough() -> None:
    driver = priority_driver(num_device_blocks=6)
    driver.add(11, "normal", scheduling=URGENT)
    driver.add(3, "patient", scheduling=PATIENT)
    driver.step()
    driver.add(15, "urgent", scheduling=URGENT)
    assert names(driver.next_rows()) == ["normal", "patient"]
    assert driver.core.num_preemptions == 0


def test_request_preempts_nobody_when_all_are_as_urgent() -> None:
    driver = priority_driver(max_num_seqs=1)
    driver.add(3, "first", scheduling=NORMAL)
    driver.step()
    driver.add(3, "second", scheduling=NORMAL)
    assert names(driver.next_rows()) == ["first"]


def test_victims_of_an_urgent_request_are_copied_out_when_they_are_swapped() -> None:
    driver = priority_driver(num_device_blocks=4, num_host_blocks=8, preemption_mode=SWAP)
    victim = driver.add(7, "patient", scheduling=PATIENT, max_tokens=8)
    driver.step()
    driver.add(10, "urgent", scheduling=URGENT, max_tokens=2)
    plan = driver.plan()
    assert plan
    assert len(plan.moves.swap_out) == 2
    assert driver.rows_of(plan) == [("urgent", 0, 10)]
    driver.answer()
    driver.run()
    assert victim.num_preemptions == 1


def test_urgent_request_waits_for_blocks_when_its_victims_still_write_them() -> None:
    driver = priority_driver(num_device_blocks=4)
    driver.add(7, "patient", scheduling=PATIENT)
    driver.plan()
    driver.add(14, "urgent", scheduling=URGENT)
    assert driver.plan() is None
    driver.answer()
    assert names(driver.next_rows()) == ["urgent"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_patient_request_is_preempted_once_when_an_urgent_one_needs_its_blocks(
    mode: PreemptionMode, depth: int
) -> None:
    engine = CheckedEngine(
        num_device_blocks=12,
        num_host_blocks=16,
        depth=depth,
        preemption_mode=mode,
        queue_policy="priority",
    )
    engine.add(list(range(1, 9)), "normal", max_tokens=20, scheduling=NORMAL)
    patient = engine.add(list(range(1, 15)), max_tokens=12, scheduling=PATIENT)
    engine.step(2)
    engine.add(list(range(50, 82)), "urgent", max_tokens=4, scheduling=NORMAL)
    engine.run()
    assert patient.num_preemptions == 1


def test_patient_request_has_its_turn_when_urgent_ones_keep_arriving() -> None:
    driver = priority_driver(max_num_seqs=1)
    driver.add(2, "patient", scheduling=PATIENT, max_tokens=3)
    admitted: list[str] = []
    for number in range(2 * TURN_EVERY):
        driver.add(2, f"u{number}", scheduling=URGENT, max_tokens=1)
        admitted += names(driver.next_rows())
        driver.answer()
    assert admitted.index("patient") == TURN_EVERY
    # It has its turn to the end: nobody preempts it.
    assert admitted[TURN_EVERY : TURN_EVERY + 3] == ["patient"] * 3


def test_rows_that_were_picked_are_left_out_when_their_request_makes_way() -> None:
    engine = CheckedEngine(num_device_blocks=10, queue_policy="priority", depth=2)
    for start in (0, 20, 40):
        engine.add(list(range(start, start + 9)), max_tokens=12, scheduling=PATIENT)
        engine.step(2)
    for start in (60, 80):
        engine.add(list(range(start, start + 17)), max_tokens=12, scheduling=URGENT)
        engine.step(1)
    engine.run()
    assert engine.core.num_preemptions > 0


# -- deadlines ---------------------------------------------------------------------------------


def deadline_driver(step_us: int = 1000) -> CoreDriver:
    """A core that has seen steps of that length, as small as they can be."""
    driver = CoreDriver(queue_policy="deadline", max_num_batched_tokens=8)
    for _ in range(MIN_SMALLEST_STEPS):
        driver.add(1, max_tokens=1)
        driver.plan()
        driver.answer(compute_us=step_us)
    return driver


@pytest.mark.parametrize(("deadline_us", "is_refused"), [(2999, True), (3000, False)])
def test_request_is_refused_before_it_runs_when_its_deadline_cannot_be_met(
    deadline_us: int, is_refused: bool
) -> None:
    driver = deadline_driver()
    scheduling = SchedulingParams(deadline_ns=deadline_us * 1000)
    # Two steps of prompt, and one more for the second token.
    request = driver.add(12, "late", scheduling=scheduling, max_tokens=2, min_tokens=2)
    plan = driver.plan()
    assert (plan is None) is is_refused
    assert driver.core.take_ended().finished == [request] * is_refused
    if is_refused:
        assert request.error
        assert request.error[0] == "DEADLINE_UNREACHABLE"


def test_request_is_refused_when_it_has_waited_too_long() -> None:
    driver = deadline_driver()
    driver.core.tick(5_000_000)
    request = driver.add(3, scheduling=SchedulingParams(deadline_ns=4_000_000))
    assert driver.plan() is None
    assert request.error
    assert "could come 0.002 s after its deadline" in request.error[1]


def test_request_is_not_refused_when_it_has_tokens_already() -> None:
    driver = deadline_driver()
    driver.core.tick(5_000_000)
    driver.add(3, "resumed", scheduling=SchedulingParams(deadline_ns=1), resume=[[4]])
    assert names(driver.next_rows()) == ["resumed"]


def test_deadline_does_not_matter_when_the_policy_is_another() -> None:
    driver = CoreDriver()
    driver.core.tick(5_000_000)
    driver.add(3, "late", scheduling=SchedulingParams(deadline_ns=1))
    assert names(driver.next_rows()) == ["late"]


def test_earlier_deadline_runs_first_when_rows_are_short() -> None:
    driver = CoreDriver(queue_policy="deadline", max_num_seqs=1)
    driver.add(3, "later", scheduling=SchedulingParams(deadline_ns=9_000))
    driver.add(3, "sooner", scheduling=SchedulingParams(deadline_ns=8_000))
    assert names(driver.next_rows()) == ["sooner"]


# -- fair shares -------------------------------------------------------------------------------


def test_tenants_alternate_when_one_asks_for_much_more() -> None:
    driver = CoreDriver(queue_policy="fair", max_num_seqs=1, prefix_caching=False)
    for number in range(6):
        driver.add(4, f"a{number}", scheduling=tenant("a"), max_tokens=2)
    for number in range(3):
        driver.add(4, f"b{number}", scheduling=tenant("b"), max_tokens=2)
    admitted: list[str] = []
    while (plan := driver.plan()) is not None:
        admitted += [row.sequence.request.request_id for row in plan.new_rows]
        driver.answer()
    assert admitted == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_tenant_pays_for_its_outputs_when_they_are_long() -> None:
    driver = CoreDriver(queue_policy="fair", max_num_seqs=1, prefix_caching=False)
    driver.add(4, "a0", scheduling=tenant("a"), max_tokens=12)
    driver.add(4, "a1", scheduling=tenant("a"), max_tokens=1)
    for number in range(4):
        driver.add(4, f"b{number}", scheduling=tenant("b"), max_tokens=1)
    admitted: list[str] = []
    while (plan := driver.plan()) is not None:
        admitted += [row.sequence.request.request_id for row in plan.new_rows]
        driver.answer()
    # "a" was served 4 + 2 x 12, "b" 4 + 2 each time.
    assert admitted == ["a0", "b0", "b1", "b2", "b3", "a1"]


def test_preempted_request_is_charged_once_when_it_comes_back() -> None:
    driver = CoreDriver(
        queue_policy="fair", max_num_seqs=2, prefix_caching=False, preemption_mode=RECOMPUTE
    )
    request = driver.add(9, "a0", scheduling=tenant("a"))
    driver.add(12, "b0", scheduling=tenant("b"))
    driver.add(4, "b1", scheduling=tenant("b"))
    driver.add(4, "a1", scheduling=tenant("a"))
    driver.step()
    driver.preempt(request)
    driver.step()
    assert request.status is RequestStatus.RUNNING
    # "a" was served 9 + 2 x 2, not another 10 for what it computed again; "b" 12 + 2 x 2.
    in_order = driver.core.queue.candidates()
    assert [waiting.request_id for waiting in in_order] == ["a1", "b1"]
