"""What the rows of a step bring: tokens, ends, logprobs, failures of rows."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.plan import (
    ContractBroken,
    RowStatus,
    StepOutcome,
    StepStatus,
)
from scheduler_service.scheduler.values.request import FinishReason, SequenceStatus
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import EOS, CoreDriver

# -- tokens ------------------------------------------------------------------------------------


def test_apply_tells_whose_tokens_came_when_several_run() -> None:
    driver = CoreDriver()
    requests = [driver.add(3), driver.add(3)]
    driver.plan()
    events = driver.answer(token_ids=[5, 6])
    by_key = dict(zip(events.client_keys.tolist(), events.token_ids.tolist(), strict=True))
    assert by_key == {requests[0].client_key: 5, requests[1].client_key: 6}
    assert events.tokens == []


@pytest.mark.parametrize("ahead", [-1, 1])
def test_apply_refuses_a_result_when_it_is_of_another_step_than_the_oldest(ahead: int) -> None:
    driver = CoreDriver()
    driver.add(3)
    plans = [driver.plan(), driver.plan()]
    assert plans[0] is not None
    outcome = StepOutcome(plans[0].step_id + ahead, StepStatus.FAILED)
    with pytest.raises(ContractBroken, match="not expected"):
        driver.core.apply(outcome)


def test_apply_tells_nothing_when_a_row_did_not_sample() -> None:
    driver = CoreDriver(max_num_batched_tokens=4)
    driver.add(6)
    driver.plan()
    events = driver.answer()
    assert events.client_keys.tolist() == []


def test_apply_tells_the_sequence_of_each_token_when_a_request_has_several() -> None:
    driver = CoreDriver()
    driver.add(3, n=2, max_tokens=4)
    driver.step()
    driver.plan()
    events = driver.answer(token_ids=[5, 6])
    assert [(e.sequence.index, e.token_id) for e in events.tokens] == [(0, 5), (1, 6)]


@pytest.mark.parametrize("token_id", [-1, 100])
def test_request_fails_alone_when_its_token_is_outside_the_vocabulary(token_id: int) -> None:
    driver = CoreDriver()
    request, other = driver.add(3), driver.add(3)
    driver.plan()
    events = driver.answer(token_ids=[token_id, 7])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"
    assert f"sampled_token_id is {token_id}, allowed: 0 to 99" in request.error[1]
    assert events.client_keys.tolist() == [other.client_key]


def test_apply_breaks_off_when_the_result_is_of_another_step() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.plan()
    with pytest.raises(ContractBroken):
        driver.core.apply(StepOutcome(2, StepStatus.OK))


def test_apply_breaks_off_when_a_snapshot_is_answered_by_asking_for_one() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.plan()
    with pytest.raises(ContractBroken):
        driver.answer(StepStatus.NEED_SNAPSHOT)


# -- ends --------------------------------------------------------------------------------------


def test_apply_ends_with_stop_when_the_model_says_end_of_sequence() -> None:
    driver = CoreDriver(sample=lambda: EOS)
    request = driver.add(3)
    _, events = driver.step()
    assert events.token_ids.tolist() == [EOS]
    assert events.finished == [request]
    assert (request.finish_reason, request.sequence.stop_token_id) == (FinishReason.STOP, EOS)
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
    assert request.sequence.stop_token_id == 42


def test_apply_goes_on_when_a_token_stops_only_other_requests() -> None:
    driver = CoreDriver(sample=lambda: 42)
    request = driver.add(3, max_tokens=4)
    driver.add(3, stop_token_ids=frozenset({42}))
    driver.run()
    assert request.finish_reason is FinishReason.LENGTH


def test_apply_ends_with_model_length_when_max_model_len_is_reached() -> None:
    driver = CoreDriver(max_model_len=10)
    request = driver.add(3, max_tokens=100)
    driver.run(depth=2)
    assert request.finish_reason is FinishReason.MODEL_LENGTH
    assert len(request.sequence.token_ids) == 10


def test_apply_ends_with_model_length_when_a_sequence_fills_the_pool() -> None:
    driver = CoreDriver(num_device_blocks=3, block_size=4)
    request = driver.add(3)
    driver.run(depth=3)
    assert request.finish_reason is FinishReason.MODEL_LENGTH
    assert len(request.sequence.token_ids) == 12


def test_apply_drops_tokens_when_they_come_after_the_end() -> None:
    driver = CoreDriver(sample=lambda: EOS)
    request = driver.add(3)
    for _ in range(3):
        driver.plan()
    driver.answer()
    for _ in range(2):
        assert driver.answer().client_keys.tolist() == []
    assert request.sequence.num_output_tokens == 1


# -- several sequences -------------------------------------------------------------------------


def test_apply_ends_sequences_one_by_one_when_a_request_has_several() -> None:
    driver = CoreDriver()
    request = driver.add(3, n=2)
    driver.step()
    driver.plan()
    events = driver.answer(token_ids=[5, EOS])
    assert events.finished_sequences == [request.sequences[1]]
    assert events.finished == []
    driver.plan()
    events = driver.answer(token_ids=[EOS])
    assert events.finished_sequences == [request.sequences[0]]
    assert events.finished == [request]
    assert driver.core.num_free_blocks == 64


def test_apply_frees_only_the_own_blocks_when_one_of_several_sequences_ends() -> None:
    driver = CoreDriver(prefix_caching=False)
    driver.add(9, n=2)
    driver.step()
    driver.plan()
    assert driver.core.num_free_blocks == 64 - 4
    driver.answer(token_ids=[5, EOS])
    assert driver.core.num_free_blocks == 64 - 3


def test_request_finishes_when_one_sequence_ends_before_the_others_have_joined() -> None:
    driver = CoreDriver(sample=lambda: EOS)
    request = driver.add(3, n=3)
    driver.run()
    assert [s.finish_reason for s in request.sequences] == [FinishReason.STOP] * 3
    assert [s.num_output_tokens for s in request.sequences] == [1, 1, 1]


def test_best_of_returns_the_best_n_and_no_tokens_before_when_more_were_sampled() -> None:
    engine = CheckedEngine()
    request = engine.add([1, 2, 3], n=2, best_of=4, max_tokens=5)
    engine.run()
    assert len(request.completions) == 2
    means = [c.cumulative_logprob / len(c.token_ids) for c in request.completions]
    every = sorted((s.cumulative_logprob / 5 for s in request.sequences), reverse=True)
    assert means == every[:2]
    assert [len(tokens) for tokens in engine.engine.delivered["r1"]] == [5, 5]


# -- rows that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason"),
    [(RowStatus.INVALID_LOGITS, "INVALID_LOGITS"), (RowStatus.FAILED, "ROW_FAILED")],
)
def test_apply_ends_a_request_alone_when_its_row_fails(status: RowStatus, reason: str) -> None:
    driver = CoreDriver(prefix_caching=False)
    bad, good = driver.add(3), driver.add(3)
    driver.plan()
    events = driver.answer(row_statuses=[status, RowStatus.OK], token_ids=[-1, 5])
    assert (events.client_keys.tolist(), events.token_ids.tolist()) == ([good.client_key], [5])
    assert events.finished == [bad]
    assert bad.error
    assert bad.error[0] == reason


def test_apply_ends_all_sequences_of_a_request_when_one_row_fails() -> None:
    driver = CoreDriver()
    request = driver.add(3, n=2)
    driver.step()
    driver.plan()
    driver.answer(row_statuses=[RowStatus.OK, RowStatus.FAILED], token_ids=[5, -1])
    assert all(sequence.is_finished for sequence in request.sequences)
    assert driver.core.num_free_blocks == 64


def test_apply_computes_a_row_again_when_its_input_is_unavailable() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.step()
    driver.plan()
    driver.answer(row_statuses=[RowStatus.INPUT_UNAVAILABLE], token_ids=[-1])
    assert driver.next_rows() == [("r1", 0, 4)]


def test_apply_computes_again_when_the_input_of_a_preempted_row_is_unavailable() -> None:
    driver = CoreDriver()
    request = driver.add(3, max_tokens=4)
    driver.step()
    driver.plan()
    driver.preempt(request)
    driver.answer(row_statuses=[RowStatus.INPUT_UNAVAILABLE], token_ids=[-1])
    assert request.sequence.status is SequenceStatus.WAITING
    driver.run()
    assert request.sequence.num_output_tokens == 4
