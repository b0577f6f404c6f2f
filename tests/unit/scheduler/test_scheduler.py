"""The decisions of the scheduler core, one behaviour at a time."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.core.plan import ContractBroken, RowStatus, StepOutcome, StepStatus
from scheduler_service.core.request import FinishReason, Request, SequenceStatus
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.scheduler import MAX_FRUITLESS_LOSSES
from splitserve_rpc.domain_error import DomainError
from tests.support.core_driver import EOS, CoreDriver, rows_of


def test_schedule_returns_none_when_nothing_waits() -> None:
    assert CoreDriver().plan() is None


def test_schedule_puts_decodes_first_then_prefills_then_waiting_when_budget_is_short() -> None:
    driver = CoreDriver(max_num_batched_tokens=10)
    driver.add(4, "decoding")
    driver.step()
    driver.add(15, "prefilling")
    driver.step()
    driver.add(10, "waiting")
    plan, _ = driver.step()
    assert rows_of(plan) == [("decoding", 5, 1), ("prefilling", 9, 6), ("waiting", 0, 3)]


def test_schedule_samples_only_when_the_last_token_is_computed() -> None:
    driver = CoreDriver(max_num_batched_tokens=4)
    driver.add(6)
    assert [driver.step()[0].work.samples.tolist() for _ in range(3)] == [[False], [True], [True]]


def test_schedule_admits_no_more_than_max_num_seqs() -> None:
    driver = CoreDriver(max_num_seqs=2)
    for _ in range(3):
        driver.add(2)
    plan, _ = driver.step()
    assert [row[0] for row in rows_of(plan)] == ["r1", "r2"]
    assert driver.core.num_waiting == 1


def test_schedule_refers_to_the_step_in_flight_when_pipelined() -> None:
    driver = CoreDriver()
    driver.add(3, max_tokens=10)
    first, second, third = driver.plan(), driver.plan(), driver.plan()
    assert first
    assert second
    assert third
    assert first.work.token_ids == [1, 2, 3]
    assert second.work.token_ids == third.work.token_ids == []
    assert second.work.sampled_steps_back.tolist() == third.work.sampled_steps_back.tolist() == [1]


def test_schedule_plans_nothing_beyond_max_tokens_when_pipelined() -> None:
    driver = CoreDriver()
    request = driver.add(3, max_tokens=2)
    assert driver.plan()
    assert driver.plan()
    assert driver.plan() is None
    driver.answer()
    driver.answer()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.sequence.num_output_tokens == 2


def test_first_batch_is_a_snapshot_and_later_ones_are_deltas() -> None:
    driver = CoreDriver()
    driver.add(3)
    assert driver.step()[0].base_step_id is None
    assert driver.step()[0].base_step_id == 1


def test_block_table_grows_by_one_write_when_a_boundary_is_crossed() -> None:
    driver = CoreDriver(block_size=4)
    request = driver.add(3)
    writes = [driver.step()[0].table_writes for _ in range(6)]
    assert [len(each) for each in writes] == [0, 0, 1, 0, 0, 0]
    assert writes[2][0].start_index == 1
    assert list(writes[2][0].block_ids) == request.sequence.block_table[1:]


def test_apply_ends_with_stop_when_the_model_says_end_of_sequence() -> None:
    driver = CoreDriver(sample=lambda: EOS)
    request = driver.add(3)
    _, events = driver.step()
    assert events.token_ids == [EOS]
    assert events.finished == [request]
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, EOS)
    assert driver.core.num_free_blocks == 64


def test_apply_goes_on_after_end_of_sequence_when_ignore_eos() -> None:
    driver = CoreDriver(sample=lambda: EOS)
    request = driver.add(3, ignore_eos=True, max_tokens=5)
    driver.run()
    assert (request.finish_reason, request.sequence.num_output_tokens) == (FinishReason.LENGTH, 5)


def test_apply_ends_with_stop_when_a_stop_token_comes_although_ignore_eos() -> None:
    driver = CoreDriver(sample=lambda: 42)
    request = driver.add(3, ignore_eos=True, stop_token_ids=frozenset({42}))
    driver.run()
    assert request.stop_token_id == 42


def test_apply_ends_with_model_length_when_max_model_len_is_reached() -> None:
    driver = CoreDriver(max_model_len=10)
    request = driver.add(3, max_tokens=100)
    driver.run(depth=2)
    assert request.finish_reason is FinishReason.MODEL_LENGTH
    assert len(request.sequence.token_ids) == 10


def test_sequence_ends_with_model_length_when_it_fills_the_pool() -> None:
    driver = CoreDriver(num_device_blocks=3, block_size=4)
    request = driver.add(3)
    driver.run(depth=3)
    assert request.finish_reason is FinishReason.MODEL_LENGTH
    assert len(request.sequence.token_ids) == 12


def test_preemption_takes_the_youngest_when_blocks_run_out() -> None:
    driver = CoreDriver(num_device_blocks=4, block_size=4, max_num_batched_tokens=64)
    old, young = driver.add(7, max_tokens=8), driver.add(7, max_tokens=8)
    driver.step()
    driver.step()
    plan, _ = driver.step()
    assert rows_of(plan) == [("r1", 8, 1)]
    assert young.sequence.status is SequenceStatus.WAITING
    driver.run()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert len(young.sequence.token_ids) == 15


def test_preempted_sequence_keeps_the_tokens_of_steps_in_flight() -> None:
    driver = CoreDriver(num_device_blocks=4, block_size=4)
    old, young = driver.add(7, max_tokens=8), driver.add(7, max_tokens=8)
    driver.plan()
    driver.plan()
    driver.plan()  # the old one needs a block, which only a preemption frees
    assert young.sequence.status is SequenceStatus.WAITING
    driver.answer()
    driver.answer()
    assert young.sequence.num_output_tokens == 2
    driver.run(depth=2)
    assert len(old.sequence.token_ids) == len(young.sequence.token_ids) == 15


def test_blocks_of_a_step_in_flight_are_free_only_when_it_is_answered() -> None:
    driver = CoreDriver(sample=lambda: EOS)
    driver.add(3)
    driver.plan()
    driver.plan()
    driver.answer()
    assert driver.core.num_free_blocks == 63
    driver.answer()
    assert driver.core.num_free_blocks == 64


def test_prompt_that_fills_the_pool_is_served_in_chunks() -> None:
    driver = CoreDriver(num_device_blocks=4, block_size=4, max_num_batched_tokens=3)
    requests = [driver.add(15, max_tokens=1) for _ in range(3)]
    driver.run(depth=2)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "in_flight", "preempted"])
def test_abort_frees_everything_when_the_request_is(state: str) -> None:
    driver = CoreDriver(num_device_blocks=4, block_size=4, max_num_batched_tokens=6)
    request = driver.add(7, "doomed", max_tokens=8)
    if state in ("prefilling", "decoding", "in_flight"):
        driver.step()
    if state in ("decoding", "in_flight"):
        driver.step()
    if state == "in_flight":
        driver.plan()
    if state == "preempted":
        request.arrival = 5
        driver.add(7, "older")
        while request.sequence.status is not SequenceStatus.WAITING or request.num_preemptions == 0:
            driver.step()
    assert driver.core.abort("doomed") is request
    assert driver.core.abort("doomed") is None
    while driver.in_flight:
        assert driver.answer().requests == []
    driver.core.abort("older")
    assert request.finish_reason is FinishReason.ABORTED
    assert driver.core.num_free_blocks == 4
    assert driver.plan() is None


def test_row_that_fails_ends_its_request_alone() -> None:
    driver = CoreDriver()
    bad, good = driver.add(3), driver.add(3)
    driver.plan()
    events = driver.answer(row_statuses=[RowStatus.INVALID_LOGITS, RowStatus.OK], token_ids=[-1, 5])
    assert events.finished == [bad]
    assert bad.error is not None
    assert bad.error[0] == "INVALID_LOGITS"
    assert good.sequence.token_ids[-1] == 5


@pytest.mark.parametrize("status", [StepStatus.NEED_SNAPSHOT, StepStatus.REFUSED])
def test_next_batch_is_a_snapshot_of_recomputed_rows_when_a_step_was_not_executed(
    status: StepStatus,
) -> None:
    driver = CoreDriver()
    request = driver.add(3)
    driver.step()
    driver.plan()
    driver.plan()
    driver.answer(status)
    assert driver.plan() is None, "steps under way are answered first"
    driver.answer(status)
    plan, _ = driver.step()
    assert plan.base_step_id is None
    assert rows_of(plan) == [("r1", 0, 4)]
    assert plan.work.token_ids == request.sequence.token_ids[:4]


def test_failed_step_costs_a_recompute_and_no_snapshot() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.step()
    driver.plan()
    driver.answer(StepStatus.FAILED)
    plan, _ = driver.step()
    assert plan.base_step_id == 2
    assert rows_of(plan) == [("r1", 0, 4)]


def test_request_fails_with_a_reason_when_its_steps_fail_over_and_over() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    for _ in range(MAX_FRUITLESS_LOSSES):
        assert request.finish_reason is None
        driver.plan()
        driver.answer(StepStatus.FAILED)
    assert request.error is not None
    assert request.error[0] == "EXECUTOR_LOST_REPEATEDLY"
    assert driver.core.num_free_blocks == 64


def test_losses_are_forgiven_when_a_token_comes_in_between() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    for _ in range(3 * MAX_FRUITLESS_LOSSES):
        driver.plan()
        driver.answer(StepStatus.FAILED)
        driver.step()
    assert request.finish_reason is None


def test_evacuate_returns_requests_with_their_tokens_for_another_core() -> None:
    driver, other = CoreDriver(), CoreDriver(num_device_blocks=16)
    driver.add(3, max_tokens=6)
    driver.add(5, max_tokens=6)
    driver.step()
    driver.plan()
    moved = driver.core.evacuate()
    assert [request.sequence.num_output_tokens for request in moved] == [1, 1]
    for request in moved:
        other.core.readmit(request)
    other.run(depth=2)
    assert [request.sequence.num_output_tokens for request in moved] == [6, 6]
    assert other.core.num_free_blocks == 16


@pytest.mark.parametrize("token_id", [-1, 100])
def test_apply_refuses_a_token_outside_the_vocabulary(token_id: int) -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.plan()
    with pytest.raises(ContractBroken):
        driver.answer(token_ids=[token_id])


def test_apply_refuses_a_result_of_another_step() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.plan()
    with pytest.raises(ContractBroken):
        driver.core.apply(StepOutcome(2, StepStatus.OK, [1]))


def test_add_refuses_when_the_queue_is_full_and_says_when_to_retry() -> None:
    driver = CoreDriver(max_num_waiting=2)
    driver.add(3)
    driver.add(3)
    with pytest.raises(DomainError) as refusal:
        driver.add(3)
    assert refusal.value.reason == "QUEUE_FULL"
    assert refusal.value.retry_delay_s
    driver.step()
    driver.add(3)


@pytest.mark.parametrize(
    ("prompt_len", "params", "reason"),
    [
        (0, {}, "PROMPT_EMPTY"),
        (200, {}, "PROMPT_TOO_LONG"),
        (60, {}, "NEVER_FITS_KV_CACHE"),
        (10, {"max_tokens": 51}, "NEVER_FITS_KV_CACHE"),
        (10, {"temperature": float("nan")}, "SAMPLING_PARAMS_INVALID"),
    ],
)
def test_add_refuses_by_name_what_can_never_run(
    prompt_len: int, params: dict[str, Any], reason: str
) -> None:
    driver = CoreDriver(num_device_blocks=15, block_size=4)
    with pytest.raises(DomainError) as refusal:
        driver.add(prompt_len, **params)
    assert refusal.value.reason == reason
    assert driver.core.num_waiting == 0


@pytest.mark.parametrize(
    ("resume", "reason"),
    [([1, EOS], FinishReason.STOP), ([1, 2, 3, 4], FinishReason.LENGTH)],
)
def test_resumed_request_is_finished_at_once_when_it_has_all_its_tokens(
    resume: list[int], reason: FinishReason
) -> None:
    driver = CoreDriver()
    request = Request.create(
        "r", [1, 2], SamplingParams(max_tokens=4), arrival=1, seed=0, resume_token_ids=resume
    )
    driver.core.add(request)
    assert request.finish_reason is reason
    assert driver.plan() is None
