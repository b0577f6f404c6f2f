"""Sliding windows and encoders: which blocks are held, shared, moved and freed."""

from __future__ import annotations

import pytest

from executor_service.steps import RowStatus, StepInput
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    Feature,
    PreemptionMode,
    SchedulingParams,
    StepPlan,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import CoreDriver
from tests.support.core.in_process import CheckedEngine
from tests.support.fakes.fake_runner import StepFault


def most_blocks_in_use(engine: CheckedEngine) -> int:
    """Runs to the end; returns the most blocks that were in use after a step was planned."""
    most = 0
    while True:
        engine.engine.fill()
        most = max(most, engine.config.num_device_blocks - engine.core.num_free_blocks)
        if not engine.engine.in_flight:
            engine.check()
            return most
        engine.answer()


def test_sequence_outgrows_the_pool_when_its_window_fits() -> None:
    engine = CheckedEngine(num_device_blocks=4, sliding_window=6, max_model_len=150)
    request = engine.add([1, 2, 3], max_tokens=140)
    engine.run()
    assert len(request.sequence.token_ids) == 143


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("prompt_len", [3, 40])
def test_memory_is_bounded_when_sequences_are_long(prompt_len: int, num_sequences: int) -> None:
    engine = CheckedEngine(
        num_device_blocks=64, sliding_window=6, max_num_batched_tokens=8, prefix_caching=False
    )
    engine.add(list(range(prompt_len)), max_tokens=60, n=num_sequences)
    # A window of two blocks and a half, and what a step writes beyond it.
    assert most_blocks_in_use(engine) <= num_sequences * (3 + 2)


def test_window_is_found_when_what_is_behind_it_was_reused() -> None:
    driver = CoreDriver(sliding_window=4, num_device_blocks=16)
    driver.add(33, "first", max_tokens=1)
    driver.run()
    driver.add(33, "second", max_tokens=1)
    assert driver.next_rows() == [("second", 32, 1)]


@pytest.mark.parametrize("window", [3, 6])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_siblings_end_when_the_pool_just_holds_their_windows(block_size: int, window: int) -> None:
    num_blocks = 2 * (-(-window // block_size) + 2)
    for length in range(1, 30, 7):
        driver = CoreDriver(
            block_size=block_size, num_device_blocks=num_blocks, sliding_window=window
        )
        resume = [[10] * length, [20] * (30 - length)]
        request = driver.add(8, n=2, max_tokens=50, resume=resume)
        driver.run(max_steps=500)
        assert request.error is None


@pytest.mark.parametrize("batch_policy", BatchPolicyName)
def test_pairs_end_when_the_pool_holds_one_of_them(
    batch_policy: BatchPolicyName,
) -> None:
    driver = CoreDriver(
        block_size=1,
        num_device_blocks=30,
        sliding_window=8,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        prefix_caching=False,
        batch_policy=batch_policy,
        preemption_mode=PreemptionMode.RECOMPUTE,
    )
    requests = [driver.add(10 + i, n=2, max_tokens=14) for i in range(3)]
    driver.run(max_steps=2000)
    assert [request.error for request in requests] == [None] * 3


def test_older_request_keeps_its_blocks_beside_a_long_prompt() -> None:
    driver = CoreDriver(num_device_blocks=8, sliding_window=4, prefix_caching=False)
    old = driver.add(3, max_tokens=60)
    driver.step()
    young = driver.add(70, max_tokens=1)
    driver.run()
    assert (old.num_preemptions, young.num_preemptions) == (0, 0)


ENCODER = [11, 12, 13, 14, 15, 16]  # Two blocks of 4.
ENCODER_FEATURES = frozenset({Feature.CROSS_ATTENTION})


def encoder_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {"features": ENCODER_FEATURES, "prefix_caching": False}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def encoded(plan: StepPlan) -> list[bool]:
    """Whether each new row is to be encoded."""
    return [row.encoder_token_ids is not None for row in plan.new_rows]


def test_request_gets_blocks_for_its_encoder_when_it_is_admitted() -> None:
    driver = encoder_driver()
    request = driver.add(3, encoder=ENCODER)
    plan, _ = driver.step()
    assert plan.new_rows[0].cross_blocks == tuple(request.cross_blocks)
    assert len(request.cross_blocks) == 2
    assert driver.core.num_free_blocks == 64 - 3
    assert encoded(plan) == [True]


def test_request_waits_when_there_are_no_blocks_for_its_encoder() -> None:
    driver = encoder_driver(num_device_blocks=4)
    driver.add(5, "running", max_tokens=2)
    driver.step()
    driver.add(3, "translated", encoder=ENCODER, max_tokens=2)
    assert [name for name, _, _ in driver.next_rows()] == ["running"]
    driver.answer()
    assert [name for name, _, _ in driver.next_rows()] == ["translated"]


def test_siblings_share_the_blocks_of_the_encoder_when_they_join() -> None:
    driver = encoder_driver()
    request = driver.add(3, n=3, encoder=ENCODER)
    driver.step()
    plan, _ = driver.step()
    assert encoded(plan) == [False, False]
    assert {row.cross_blocks for row in plan.new_rows} == {tuple(request.cross_blocks)}
    assert driver.core.num_free_blocks == 64 - 2 - 3


def test_encoder_runs_again_when_a_request_is_recomputed() -> None:
    driver = encoder_driver(preemption_mode=PreemptionMode.RECOMPUTE)
    request = driver.add(3, encoder=ENCODER, max_tokens=4)
    driver.step()
    driver.preempt(request)
    assert driver.core.num_free_blocks == 64
    plan, _ = driver.step()
    assert encoded(plan) == [True]
    assert driver.core.num_free_blocks == 64 - 3
    driver.run()
    assert driver.core.num_free_blocks == 64


def test_encoder_does_not_run_again_after_a_snapshot() -> None:
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


def test_blocks_are_shared_when_encoder_and_prompt_agree() -> None:
    driver = encoder_driver(prefix_caching=True)
    driver.add(9, "first", encoder=ENCODER, max_tokens=1)
    driver.run()
    driver.add(9, "same", encoder=ENCODER)
    driver.add(9, "other", encoder=[*ENCODER[:-1], 99])
    driver.add(9, "none")
    assert driver.next_rows() == [("same", 8, 1), ("other", 0, 9), ("none", 0, 9)]


# -- encoder tokens in the prefix cache --------------------------------------------------------


def num_encodings(engine: CheckedEngine) -> int:
    """Requests whose encoder tokens some planned step encodes."""
    return sum(request.encoded_in_step > 0 for request in engine.requests)


def test_encoder_runs_once_for_requests_with_the_same_input() -> None:
    engine = CheckedEngine(depth=2)
    first = engine.add([1, 2, 3], encoder=ENCODER, max_tokens=6)
    engine.step()
    second = engine.add([7, 8], encoder=ENCODER, max_tokens=6)
    engine.step()
    assert second.cross_blocks == first.cross_blocks
    assert num_encodings(engine) == 1
    engine.run()
    # The blocks are free now, and can still be found.
    engine.add([9], encoder=ENCODER, max_tokens=3)
    engine.run()
    assert num_encodings(engine) == 1


@pytest.mark.parametrize(
    ("encoder", "scheduling"),
    [
        ([*ENCODER[:-1], 99], SchedulingParams()),
        (ENCODER[:-1], SchedulingParams()),
        (ENCODER, SchedulingParams(tenant="other")),
        (ENCODER, SchedulingParams(cache_salt="salt")),
        (ENCODER, SchedulingParams(adapter="french")),
        (ENCODER, SchedulingParams(uses_prefix_cache=False)),
    ],
)
def test_encoder_runs_again_for_what_must_not_be_shared(
    encoder: list[int], scheduling: SchedulingParams
) -> None:
    engine = CheckedEngine()
    engine.add([1, 2, 3], encoder=ENCODER, max_tokens=3)
    engine.add([1, 2, 3], encoder=encoder, scheduling=scheduling, max_tokens=3)
    engine.run()
    assert num_encodings(engine) == 2


def test_encoder_tokens_come_back_from_the_host_pool() -> None:
    engine = CheckedEngine(num_device_blocks=8, num_host_blocks=16)
    engine.add([1, 2, 3], encoder=ENCODER, max_tokens=2)
    engine.run()
    engine.add(list(range(1, 28)), max_tokens=2)  # needs all device blocks
    engine.run()
    engine.add([4, 5, 6], encoder=ENCODER, max_tokens=2)
    engine.run()
    assert num_encodings(engine) == 1


def test_encoder_tokens_of_a_preempted_request_are_found_again() -> None:
    engine = CheckedEngine(preemption_mode=PreemptionMode.RECOMPUTE)
    request = engine.add([1, 2, 3], encoder=ENCODER, max_tokens=6)
    engine.step(2)
    engine.preempt(request)
    step = request.encoded_in_step
    engine.run()
    assert request.encoded_in_step == step


def test_readers_of_encoder_tokens_are_recomputed_when_these_are_lost() -> None:
    faults = iter([StepFault(rows={0: RowStatus.FAILED})])
    engine = CheckedEngine(depth=1, fault=lambda _step: next(faults, StepFault()))
    bad = engine.add([1, 2, 3], encoder=ENCODER, max_tokens=6)
    engine.engine.fill()
    engine.engine.depth = 2
    good = engine.add([7, 8], encoder=ENCODER, max_tokens=6)
    engine.engine.fill()
    assert good.cross_blocks == bad.cross_blocks
    engine.drain()
    assert bad.error is not None
    assert bad.error[0] == "ROW_FAILED"
    engine.check_tokens(good)
    assert good.encoded_in_step > 0


def test_readers_of_encoder_tokens_go_on_when_the_request_that_brought_them_fails() -> None:
    step_ids = iter(range(1, 100))

    def fault(_step: StepInput) -> StepFault:
        return StepFault(rows={0: RowStatus.FAILED} if next(step_ids) == 4 else {})

    engine = CheckedEngine(fault=fault)
    bad = engine.add([1, 2, 3], encoder=ENCODER, max_tokens=9)
    engine.step(2)
    good = engine.add([7, 8], encoder=ENCODER, max_tokens=9)
    engine.drain()
    assert bad.error is not None
    engine.check_tokens(good)
    assert (good.num_fruitless_losses, good.encoded_in_step) == (0, 0)
    engine.check_blocks()


def test_steps_encode_no_more_than_their_budget() -> None:
    driver = encoder_driver(max_num_encoder_tokens=14)
    for number in range(5):
        driver.add(3, f"r{number}", encoder=[number, *ENCODER], max_tokens=2)
    driver.add(3, "long", encoder=list(range(40)), max_tokens=2)
    driver.add(3, "none", max_tokens=2)
    encoded_tokens = []
    while (plan := driver.plan()) is not None:
        rows = [row for row in plan.new_rows if row.encoder_token_ids is not None]
        encoded_tokens.append([len(row.encoder_token_ids) for row in rows])  # type: ignore[arg-type]
        driver.answer()
    assert [each for each in encoded_tokens if each] == [[7, 7], [7, 7], [7], [40]]
