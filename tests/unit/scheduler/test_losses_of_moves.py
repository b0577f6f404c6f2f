"""Steps that fail take the block moves with them that they were to make."""

from __future__ import annotations

import pytest

from executor_service.step import StepInput
from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.plan import StepStatus
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.checked_engine import CheckedEngine
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import StepFault

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
    driver.core._placement.preempt(swapped)
    out, back = driver.plan(), driver.plan()
    assert out
    assert back
    assert [to for _, to in out.moves.swap_out] == [source for source, _ in back.moves.swap_in]
    driver.answer(StepStatus.FAILED)
    assert driver.answer().client_keys.tolist() == []
    assert driver.next_rows() == [("running", 0, 10), ("swapped", 0, 10)]


def test_evicted_blocks_are_not_findable_when_the_step_that_was_to_keep_them_never_ran() -> None:
    engine = CheckedEngine(num_device_blocks=4, num_host_blocks=8)
    engine.add([*COMMON, 50], max_tokens=1)
    engine.run()
    engine.add(list(range(40, 53)), max_tokens=1)
    engine.engine.fill()
    assert engine.core._in_flight[0].moves.swap_out
    engine.engine.skip(pb.STEP_STATUS_REFUSED)
    engine.run(has_faults=True)
    again = engine.add([*COMMON, 50], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0
