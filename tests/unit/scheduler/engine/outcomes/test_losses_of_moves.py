"""Steps that fail take the block moves with them that they were to make."""

from __future__ import annotations

import pytest

from executor_service.steps.step import StepInput
from scheduler_service.scheduler.values.config import BatchPolicyName, PreemptionMode
from scheduler_service.scheduler.values.plan import StepStatus
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver
from tests.support.fakes.fake_runner import StepFault

COMMON = list(range(1, 13))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_others_get_their_tokens_when_the_step_that_swaps_them_in_fails(depth: int) -> None:
    failed: list[int] = []

    def fault(step: StepInput) -> StepFault:
        if len(step.swap_in.sources) and not failed:
            failed.append(step.step_id)
            return StepFault(RuntimeError("asked for"))
        return StepFault()

    engine = CheckedEngine(
        num_device_blocks=8,
        num_host_blocks=8,
        depth=depth,
        fault=fault,
        preemption_mode=PreemptionMode.SWAP,
    )
    for start in (1, 40):
        engine.add(list(range(start, start + 12)), max_tokens=12)
    engine.run(has_faults=True)
    assert failed


def test_request_is_computed_again_when_it_comes_back_before_its_way_out_has_failed() -> None:
    driver = CoreDriver(
        num_host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=False
    )
    driver.add(9, "running")
    swapped = driver.add(9, "swapped")
    driver.step()
    driver.preempt(swapped)
    out, back = driver.plan(), driver.plan()
    assert out
    assert back
    assert [to for _, to in out.moves.swap_out] == [source for source, _ in back.moves.swap_in]
    driver.answer(StepStatus.FAILED)
    assert driver.answer().client_keys.tolist() == []
    assert driver.next_rows() == [("running", 0, 10), ("swapped", 0, 10)]


def test_request_is_computed_again_when_it_went_out_before_its_way_back_has_failed() -> None:
    driver = CoreDriver(
        num_host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=False
    )
    request = driver.add(7)
    driver.step()
    driver.step()
    driver.preempt(request)
    driver.step()
    back = driver.plan()
    assert back
    assert back.moves.swap_in
    assert driver.rows_of(back) == [], "its blocks are full: it is not in the step"
    driver.preempt(request)
    out = driver.plan()
    assert out
    assert [to for _, to in back.moves.swap_in] == [source for source, _ in out.moves.swap_out]
    driver.answer(StepStatus.FAILED)
    driver.answer()
    assert driver.next_rows() == [("r1", 0, 9)]


def test_blocks_of_a_fork_are_not_findable_when_what_it_copied_was_never_written() -> None:
    driver = CoreDriver(batch_policy=BatchPolicyName.PREFILL_FIRST)
    driver.add(2, n=2, resume=[[10], [20, 21, 22]])
    driver.plan()
    driver.add(1)
    forked = driver.plan()
    assert forked
    assert forked.moves.copy
    assert driver.rows_of(forked) == [("r1", 2, 3), ("r2", 0, 1)]
    assert driver.core.num_cached_blocks == 1
    driver.answer(StepStatus.FAILED)
    assert driver.core.num_cached_blocks == 0


def test_evicted_blocks_are_not_findable_when_the_step_that_was_to_keep_them_never_ran() -> None:
    engine = CheckedEngine(num_device_blocks=4, num_host_blocks=8)
    engine.add([*COMMON, 50], max_tokens=1)
    engine.run()
    engine.add(list(range(40, 53)), max_tokens=1)
    engine.engine.fill()
    assert engine.engine.in_flight[0][0].moves.swap_out
    engine.engine.skip(pb.STEP_STATUS_REFUSED)
    engine.run(has_faults=True)
    again = engine.add([*COMMON, 50], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0
