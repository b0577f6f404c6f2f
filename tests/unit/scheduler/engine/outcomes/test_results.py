"""What the rows of a step bring: tokens, ends, the best completions, failed rows."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.scheduler.engine import rank_completions
from scheduler_service.scheduler.values import (
    ContractBroken,
    FinishReason,
    Request,
    RowStatus,
    SamplingParams,
    Sequence,
    StepOutcome,
    StepStatus,
)
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
def test_apply_refuses_a_result_of_another_step_than_the_oldest(ahead: int) -> None:
    driver = CoreDriver()
    driver.add(3)
    plans = [driver.plan(), driver.plan()]
    assert plans[0] is not None
    outcome = StepOutcome(plans[0].step_id + ahead, StepStatus.FAILED)
    with pytest.raises(ContractBroken, match="unexpected result"):
        driver.core.apply(outcome)


def test_apply_names_the_sequence_of_each_token() -> None:
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
    assert f"sampled_token_id is {token_id}; allowed: 0 to 99" in request.error[1]
    assert events.client_keys.tolist() == [other.client_key]


def test_apply_refuses_a_snapshot_request_after_a_snapshot() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.plan()
    with pytest.raises(ContractBroken):
        driver.answer(StepStatus.NEED_SNAPSHOT)


# -- ends --------------------------------------------------------------------------------------

STOP, LENGTH, MODEL_LENGTH = FinishReason.STOP, FinishReason.LENGTH, FinishReason.MODEL_LENGTH


@pytest.mark.parametrize(
    ("sampled", "config", "params", "reason", "stop_token_id", "num_tokens"),
    [
        (EOS, {}, {}, STOP, EOS, 4),
        (EOS, {}, {"ignore_eos": True, "max_tokens": 5}, LENGTH, None, 8),
        (42, {}, {"ignore_eos": True, "stop_token_ids": frozenset({42})}, STOP, 42, 4),
        (7, {"max_model_len": 10}, {"max_tokens": 100}, MODEL_LENGTH, None, 10),
        # It fills the pool.
        (7, {"num_device_blocks": 3}, {}, MODEL_LENGTH, None, 12),
    ],
)
def test_apply_ends_a_request_when_a_limit_is_reached(
    sampled: int,
    config: dict[str, object],
    params: dict[str, Any],
    reason: FinishReason,
    stop_token_id: int | None,
    num_tokens: int,
) -> None:
    driver = CoreDriver(sample=lambda: sampled, **config)
    request = driver.add(3, **params)
    driver.run(depth=2)
    assert (request.finish_reason, request.sequence.stop_token_id) == (reason, stop_token_id)
    assert len(request.sequence.token_ids) == num_tokens
    assert driver.core.num_free_blocks == driver.config.num_device_blocks


# -- several sequences -------------------------------------------------------------------------


def test_apply_ends_sequences_of_a_request_one_by_one() -> None:
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


def test_apply_computes_a_row_again_when_its_input_is_unavailable() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.step()
    driver.plan()
    driver.answer(row_statuses=[RowStatus.INPUT_UNAVAILABLE], token_ids=[-1])
    assert driver.next_rows() == [("r1", 0, 4)]


def make_sequences(*logprobs_and_lengths: tuple[float, int]) -> list[Sequence]:
    params = SamplingParams(best_of=len(logprobs_and_lengths))
    outputs = [[5] * length for _, length in logprobs_and_lengths]
    request = Request.create("r", [1, 2], params, arrival=0, seed=0, resume_token_ids=outputs)
    for sequence, (logprob, _) in zip(request.sequences, logprobs_and_lengths, strict=True):
        sequence.cumulative_logprob = logprob
    return request.sequences


def rank(sequences: list[Sequence], n: int) -> list[int]:
    return [sequence.index for sequence in rank_completions(sequences, n)]


def test_rank_completions_returns_the_best_n_when_there_are_more() -> None:
    assert rank(make_sequences((-4.0, 2), (-1.0, 2), (-2.0, 2)), 2) == [1, 2]


def test_rank_completions_compares_means_when_lengths_differ() -> None:
    assert rank(make_sequences((-2.0, 1), (-3.0, 3), (-3.0, 2)), 3) == [1, 2, 0]


def test_rank_completions_prefers_the_smaller_index_when_tied() -> None:
    sequences = make_sequences((-2.0, 2), (-1.0, 1), (-4.0, 4))
    assert rank(sequences[::-1], 2) == [0, 1]


def test_rank_completions_puts_empty_outputs_last() -> None:
    assert rank(make_sequences((0.0, 0), (-90.0, 1)), 2) == [1, 0]
