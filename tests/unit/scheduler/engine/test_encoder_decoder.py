"""Encoder-decoder models: cross blocks are allocated, filled and freed once for each request."""

from __future__ import annotations

import pytest

from executor_service.steps.step import StepInput
from scheduler_service.scheduler.values.config import BatchPolicyName, Feature, PreemptionMode
from scheduler_service.scheduler.values.plan import StepPlan
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver
from tests.support.fakes.fake_runner import StepFault

ENCODER = [11, 12, 13, 14, 15, 16]  # Two blocks of 4.
FEATURES = frozenset({Feature.CROSS_ATTENTION})


def make_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {"features": FEATURES, "prefix_caching": False}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def encoded(plan: StepPlan) -> list[bool]:
    """Whether each new row is to be encoded."""
    return [row.encoder_token_ids is not None for row in plan.new_rows]


def test_request_gets_blocks_for_its_encoder_when_it_is_admitted() -> None:
    driver = make_driver()
    request = driver.add(3, encoder=ENCODER)
    plan, _ = driver.step()
    assert plan.new_rows[0].cross_blocks == tuple(request.cross_blocks)
    assert len(request.cross_blocks) == 2
    assert driver.core.num_free_blocks == 64 - 3
    assert encoded(plan) == [True]


def test_request_waits_when_there_are_no_blocks_for_its_encoder() -> None:
    driver = make_driver(num_device_blocks=4)
    driver.add(5, "running", max_tokens=2)
    driver.step()
    driver.add(3, "translated", encoder=ENCODER, max_tokens=2)
    assert [name for name, _, _ in driver.next_rows()] == ["running"]
    driver.answer()
    assert [name for name, _, _ in driver.next_rows()] == ["translated"]


def test_siblings_share_the_blocks_of_the_encoder_when_they_join() -> None:
    driver = make_driver()
    request = driver.add(3, n=3, encoder=ENCODER)
    driver.step()
    plan, _ = driver.step()
    assert encoded(plan) == [False, False]
    assert {row.cross_blocks for row in plan.new_rows} == {tuple(request.cross_blocks)}
    assert driver.core.num_free_blocks == 64 - 2 - 3


def test_blocks_of_the_encoder_are_freed_once_when_all_sequences_have_ended() -> None:
    driver = make_driver()
    request = driver.add(3, n=3, max_tokens=5, encoder=ENCODER)
    driver.run(depth=2)
    assert request.cross_blocks == []
    assert driver.core.num_free_blocks == 64


def test_blocks_of_the_encoder_wait_for_the_step_that_reads_them_when_aborted() -> None:
    driver = make_driver()
    driver.add(3, "doomed", encoder=ENCODER)
    driver.plan()
    driver.core.abort("doomed")
    assert driver.core.num_free_blocks == 64 - 3
    driver.answer()
    assert driver.core.num_free_blocks == 64


def test_abort_frees_the_blocks_of_the_encoder_when_the_request_was_swapped() -> None:
    driver = make_driver(preemption_mode=PreemptionMode.SWAP, num_host_blocks=8)
    request = driver.add(3, "doomed", encoder=ENCODER)
    driver.step()
    driver.preempt(request)
    driver.step()
    assert driver.core.num_free_host_blocks == 5
    driver.core.abort("doomed")
    assert driver.core.num_free_host_blocks == 8


def test_encoder_runs_again_in_new_blocks_when_a_request_is_recomputed() -> None:
    driver = make_driver(preemption_mode=PreemptionMode.RECOMPUTE)
    request = driver.add(3, encoder=ENCODER, max_tokens=4)
    driver.step()
    driver.preempt(request)
    assert driver.core.num_free_blocks == 64
    plan, _ = driver.step()
    assert encoded(plan) == [True]
    assert driver.core.num_free_blocks == 64 - 3
    driver.run()
    assert driver.core.num_free_blocks == 64


def test_encoder_does_not_run_again_when_a_request_was_swapped() -> None:
    driver = make_driver(preemption_mode=PreemptionMode.SWAP, num_host_blocks=8)
    request = driver.add(3, encoder=ENCODER)
    driver.step()
    driver.preempt(request)
    assert len(driver.step()[0].moves.swap_out) == 3
    plan, _ = driver.step()
    assert len(plan.moves.swap_in) == 3
    assert encoded(plan) == [False]


def test_encoder_does_not_run_again_when_the_executor_wants_a_snapshot_later() -> None:
    engine = CheckedEngine(batch_policy=BatchPolicyName.PREFILL_FIRST)
    engine.add([1, 2, 3], "translated", encoder=ENCODER, max_tokens=9)
    engine.step(3)
    engine.add([4, 5], max_tokens=2)
    engine.engine.fill()
    engine.engine.skip(pb.STEP_STATUS_NEED_SNAPSHOT)
    engine.engine.fill()
    snapshot, _ = engine.engine.in_flight[0]
    assert snapshot.base_step_id is None
    rows = {row.sequence.request.request_id: row for row in snapshot.new_rows}
    assert rows["translated"].encoder_token_ids is None
    engine.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", PreemptionMode)
def test_requests_get_their_tokens_when_translations_are_preempted(
    mode: PreemptionMode, depth: int
) -> None:
    engine = CheckedEngine(
        num_device_blocks=16, num_host_blocks=12, depth=depth, preemption_mode=mode
    )
    for start in (0, 20, 40):
        encoder = list(range(start, start + 7))
        engine.add([1, 2, 3, 4, 5], encoder=encoder, max_tokens=14, n=2)
    engine.run()
    assert engine.core.num_preemptions > 0


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_requests_get_their_tokens_when_the_step_that_swaps_their_encoder_out_fails(
    num_sequences: int,
) -> None:
    failed: list[int] = []

    def fault(step: StepInput) -> StepFault:
        if len(step.swap_out.sources) and not failed:
            failed.append(step.step_id)
            return StepFault(RuntimeError("asked for"))
        return StepFault()

    engine = CheckedEngine(
        num_device_blocks=14,
        num_host_blocks=16,
        preemption_mode=PreemptionMode.SWAP,
        host_prefix_cache=False,
        fault=fault,
    )
    for start in (0, 20):
        encoder = list(range(start, start + 6))
        engine.add([1, 2, 3, 4], encoder=encoder, max_tokens=14, n=num_sequences)
    engine.step(3)
    engine.preempt(engine.requests[1])
    engine.run(has_faults=True)
    assert failed


def test_blocks_are_shared_when_encoder_and_prompt_agree() -> None:
    driver = make_driver(prefix_caching=True)
    driver.add(9, "first", encoder=ENCODER, max_tokens=1)
    driver.run()
    driver.add(9, "same", encoder=ENCODER)
    driver.add(9, "other", encoder=[*ENCODER[:-1], 99])
    driver.add(9, "none")
    assert driver.next_rows() == [("same", 8, 1), ("other", 0, 9), ("none", 0, 9)]
