from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler_service.core.plan import ContractBroken, StepOutcome, StepStatus
from scheduler_service.core.request import Request, ScoredToken
from scheduler_service.core.result_checks import check_prompt_logprobs, check_row, check_tokens
from scheduler_service.core.sampling_params import BeamParams, SamplingParams
from tests.support.core_driver import CoreDriver

VOCAB_SIZE = 100


def a_request(**params: object) -> Request:
    """Has a prompt of 9 tokens."""
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request.create("r1", range(1, 10), sampling, arrival=1, seed=0)
    request.num_candidates = 2
    return request


def a_score(position: int, *top: tuple[int, float]) -> ScoredToken:
    return ScoredToken(position, 7, -1.0, 1, top)


def an_outcome(token_id: int, scored: ScoredToken | None) -> StepOutcome:
    logprobs = {} if scored is None else {0: scored}
    tokens = np.array([token_id], np.int32)
    return StepOutcome(1, StepStatus.OK, tokens, logprobs=logprobs)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_tokens_are_refused_when_one_is_outside_the_vocabulary(token_id: int) -> None:
    check_tokens(np.array([0, VOCAB_SIZE - 1], np.int32), VOCAB_SIZE)
    check_tokens(np.empty(0, np.int32), VOCAB_SIZE)
    with pytest.raises(ContractBroken):
        check_tokens(np.array([5, token_id], np.int32), VOCAB_SIZE)
    with pytest.raises(ContractBroken):
        check_row(a_request().sequence, 0, an_outcome(token_id, None), VOCAB_SIZE)


@pytest.mark.parametrize(
    "params", [{"num_logprobs": 0}, {"best_of": 2}, {"beam": BeamParams(2)}], ids=str
)
def test_row_is_refused_when_it_asked_for_logprobs_and_got_none(params: dict[str, object]) -> None:
    sequence = a_request(**params).sequence
    check_row(sequence, 0, an_outcome(7, a_score(9, (7, -1.0), (8, -2.0))), VOCAB_SIZE)
    with pytest.raises(ContractBroken, match="none"):
        check_row(sequence, 0, an_outcome(7, None), VOCAB_SIZE)


@pytest.mark.parametrize(
    "second", [(VOCAB_SIZE, -1.0), (-1, -1.0), (8, math.nan), (8, math.inf), None], ids=str
)
def test_beam_is_refused_when_a_candidate_is_none(second: tuple[int, float] | None) -> None:
    sequence = a_request(beam=BeamParams(2)).sequence
    top = [(7, -1.0)] if second is None else [(7, -1.0), second]
    with pytest.raises(ContractBroken, match="candidate"):
        check_row(sequence, 0, an_outcome(7, a_score(9, *top)), VOCAB_SIZE)


def test_beam_may_have_candidates_of_probability_0() -> None:
    sequence = a_request(beam=BeamParams(2)).sequence
    scored = a_score(9, (7, -1.0), (8, -math.inf))
    check_row(sequence, 0, an_outcome(7, scored), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("start", "positions"),
    [(0, [1, 2, 3]), (0, [1, 2, 3, 4, 5]), (0, [2, 3, 4, 5]), (0, []), (4, [5, 6, 7])],
)
def test_prompt_logprobs_are_refused_when_they_are_not_those_of_the_input(
    start: int, positions: list[int]
) -> None:
    sequence = a_request(num_prompt_logprobs=0).sequence
    with pytest.raises(ContractBroken, match="prompt logprobs"):
        check_prompt_logprobs(sequence, start, 4, [a_score(p) for p in positions])


def test_prompt_logprobs_are_refused_when_those_before_never_came() -> None:
    sequence = a_request(num_prompt_logprobs=0).sequence
    scored = [a_score(position) for position in range(5, 9)]
    with pytest.raises(ContractBroken, match="before position 5"):
        check_prompt_logprobs(sequence, 4, 5, scored)
    sequence.request.num_prompt_logprobs_sent = 4
    check_prompt_logprobs(sequence, 4, 5, scored)


def test_apply_gives_nobody_prompt_logprobs_when_nobody_asked() -> None:
    driver = CoreDriver()
    driver.add(3)
    plan = driver.core.schedule()
    assert plan
    tokens = np.array([7], np.int32)
    scores = {0: [a_score(5)]}
    outcome = StepOutcome(plan.step_id, StepStatus.OK, tokens, prompt_logprobs=scores)
    assert driver.core.apply(outcome).prompt_logprobs == []


@pytest.mark.parametrize(("index", "position"), [(-1, 1), (1, 1), (0, 1), (0, 2)])
def test_apply_breaks_off_when_prompt_logprobs_are_of_another_row_or_position(
    index: int, position: int
) -> None:
    driver = CoreDriver()
    driver.add(3, num_prompt_logprobs=0)
    plan = driver.core.schedule()
    assert plan
    tokens = np.array([7], np.int32)
    scores = {index: [a_score(position)]}
    outcome = StepOutcome(plan.step_id, StepStatus.OK, tokens, prompt_logprobs=scores)
    with pytest.raises(ContractBroken, match="prompt logprobs"):
        driver.core.apply(outcome)
