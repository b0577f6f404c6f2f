"""What is wrong with one row of a result costs that row's request, and nobody else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from scheduler_service.scheduler.values.plan import (
    ContractBroken,
    StepEvents,
    StepOutcome,
    StepStatus,
)
from scheduler_service.scheduler.values.request import Request, ScoredToken
from scheduler_service.scheduler.values.sampling_params import BeamParams
from tests.support.core.driver import CoreDriver

TOKEN = 7
VOCAB_SIZE = 100
TOP = ((TOKEN, -0.5), (8, -1.0))


def score(
    position: int = 3,
    token_id: int = TOKEN,
    logprob: float = -0.5,
    rank: int = 1,
    top: Sequence[tuple[int, float]] = TOP,
) -> ScoredToken:
    return ScoredToken(position, token_id, logprob, rank, top)


def apply(
    driver: CoreDriver,
    scored: ScoredToken | None,
    prompt: Mapping[int, list[ScoredToken]] | None = None,
) -> StepEvents:
    """Row 0 gets these scores, and every row a token."""
    plan = driver.core.schedule()
    assert plan is not None
    tokens = np.full(len(plan.work.row_ids), TOKEN, np.int32)
    logprobs = {} if scored is None else {0: [scored]}
    outcome = StepOutcome(
        plan.step_id, StepStatus.OK, tokens, logprobs=logprobs, prompt_logprobs=prompt or {}
    )
    return driver.core.apply(outcome)


def check_failed_alone(request: Request, events: StepEvents, other: Request) -> None:
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"
    assert events.tokens == []
    assert events.client_keys.tolist() == [other.client_key]


@pytest.mark.parametrize(
    "scored",
    [
        None,
        score(position=2),
        score(token_id=6),
        score(logprob=math.nan),
        score(logprob=0.5),
        score(rank=0),
        score(rank=VOCAB_SIZE + 1),
        score(top=[(VOCAB_SIZE, -1.0), (8, -1.0)]),
        score(top=[(-1, -1.0), (8, -1.0)]),
        score(top=[(8, math.inf), (9, -1.0)]),
        score(top=[(8, -1.0), (8, -1.0)]),
        score(top=[(8, -1.0), (9, -2.0), (10, -3.0)]),
    ],
)
@pytest.mark.parametrize("params", [{"num_logprobs": 2}, {"beam": BeamParams(2)}], ids=str)
def test_request_fails_alone_when_its_logprobs_cannot_be(
    params: dict[str, object], scored: ScoredToken | None
) -> None:
    driver = CoreDriver(eos_token_ids=frozenset())
    request, other = driver.add(3, **params), driver.add(3)  # type: ignore[arg-type]
    events = apply(driver, scored)
    check_failed_alone(request, events, other)


def test_beams_fail_alone_when_they_got_fewer_candidates_than_asked_for() -> None:
    driver = CoreDriver(eos_token_ids=frozenset())
    request, other = driver.add(3, beam=BeamParams(2)), driver.add(3)
    events = apply(driver, score(top=TOP[:1]))
    check_failed_alone(request, events, other)


def test_beams_go_on_when_a_candidate_has_probability_0() -> None:
    driver = CoreDriver(eos_token_ids=frozenset())
    request = driver.add(3, beam=BeamParams(2), max_tokens=2)
    apply(driver, score(top=[(TOKEN, -0.5), (8, -math.inf)]))
    assert not request.is_finished


@pytest.mark.parametrize(
    "scored",
    [
        [],
        [score(1, 2, top=())],
        [score(1, 2, top=()), score(3, 3, top=())],
        [score(1, 3, top=()), score(2, 2, top=())],
        [score(1, 2, top=()), score(2, 3, math.nan, top=())],
        [score(1, 2, top=()), score(2, 3, top=()), score(3, 4, top=())],
    ],
    ids=["none", "one", "positions", "tokens", "nan", "more"],
)
def test_request_fails_alone_when_its_prompt_logprobs_are_not_those_of_its_prompt(
    scored: list[ScoredToken],
) -> None:
    driver = CoreDriver()
    request, other = driver.add([1, 2, 3], num_prompt_logprobs=0), driver.add(3)
    events = apply(driver, None, {0: scored})
    check_failed_alone(request, events, other)


@pytest.mark.parametrize("index", [-1, 0, 5, 2**31 - 1])
def test_scores_are_dropped_when_nobody_asked_for_them(index: int) -> None:
    driver = CoreDriver()
    plain = driver.add(3)
    events = apply(driver, score(), {index: [score(1, 2)]})
    assert events.prompt_logprobs == []
    assert events.client_keys.tolist() == [plain.client_key]


@pytest.mark.parametrize("num_statuses", [0, 1, 3])
def test_apply_takes_nothing_when_a_column_is_not_as_long_as_the_step(num_statuses: int) -> None:
    driver = CoreDriver()
    requests = [driver.add(3), driver.add(3)]
    plan = driver.core.schedule()
    assert plan is not None
    statuses = [1] * num_statuses
    outcome = StepOutcome(plan.step_id, StepStatus.OK, np.full(2, TOKEN, np.int32), statuses)
    with pytest.raises(ContractBroken, match="2 rows"):
        driver.core.apply(outcome)
    assert driver.core.oldest_step_in_flight == plan.step_id
    assert [request.sequence.num_output_tokens for request in driver.core.evacuate()] == [0, 0]
    assert not any(request.is_finished for request in requests)
