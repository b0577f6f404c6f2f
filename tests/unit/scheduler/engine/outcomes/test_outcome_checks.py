"""Results that cannot be: what is wrong with one row costs that row's request alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from scheduler_service.scheduler.values import (
    BeamParams,
    ContractBroken,
    Request,
    ScoredToken,
    Speculation,
    StepEvents,
    StepOutcome,
    StepStatus,
)
from scheduler_service.step_codec import ResultUnusable, ScoreColumns
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import CoreDriver
from tests.support.core.in_process import CheckedEngine
from tests.support.core.result_mutations import COSTS

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


def test_beams_go_on_when_a_candidate_has_probability_0() -> None:
    driver = CoreDriver(eos_token_ids=frozenset())
    request = driver.add(3, beam=BeamParams(2), max_tokens=2)
    apply(driver, score(top=[(TOKEN, -0.5), (8, -math.inf)]))
    assert not request.is_finished


@pytest.mark.parametrize("index", [-1, 0, 5, 2**31 - 1])
def test_scores_are_dropped_when_nobody_asked_for_them(index: int) -> None:
    driver = CoreDriver()
    plain = driver.add(3)
    events = apply(driver, score(), {index: [score(1, 2)]})
    assert events.prompt_logprobs == []
    assert events.client_keys.tolist() == [plain.client_key]


@pytest.mark.parametrize("num_statuses", [0, 1, 3])
def test_apply_takes_nothing_when_a_column_is_too_short_or_long(num_statuses: int) -> None:
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


NUM_RUNS = 600
_PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"num_logprobs": 2},
    {"num_prompt_logprobs": 1, "num_logprobs": 0},
    {"n": 2, "temperature": 1.0},
    {"n": 1, "best_of": 2, "temperature": 1.0},
    {"beam": BeamParams(2), "n": 1},
)


def run_with_changed_results(seed: int) -> None:
    """Requests of all kinds, answered with one change after another."""
    random = Random(seed)
    engine = CheckedEngine(
        depth=random.randint(1, 3),
        num_host_blocks=random.choice([0, 8]),
        us_per_token=1,
        max_run_ahead=random.choice([1, 4]),
        speculation=random.choice(list(Speculation)),
    )
    # It repeats itself, so that there is something to guess.
    engine.runner.num_words = random.choice([None, 2])
    for number in range(random.randint(1, 6)):
        params: dict[str, Any] = {"max_tokens": random.randint(1, 12)} | random.choice(_PARAMS)
        engine.add([number, *range(random.randint(1, 9))], **params)
    mutation = random.choice(list(COSTS))
    num_innocent = len(engine.requests)

    def alter(result: pb.StepResult) -> None:
        if result.status == pb.STEP_STATUS_OK and random.random() < 0.3:
            mutation(random, result)

    try:
        for _ in range(40):
            engine.engine.fill()
            if not engine.engine.in_flight:
                break
            engine.engine.answer(alter)
    except (ContractBroken, ResultUnusable):
        assert COSTS[mutation] == "anything", mutation.__name__
        moved = engine.core.evacuate()
        assert len(moved) + len(engine.engine.finished) == num_innocent
        return
    if COSTS[mutation] == "nothing":
        engine.drain()
        assert all(request.error is None for request in engine.requests)


@pytest.mark.cases(2)
@pytest.mark.parametrize("first", range(0, NUM_RUNS, 100))
def test_only_contract_errors_are_raised_for_changed_results(first: int) -> None:
    for seed in range(first, first + 100):
        run_with_changed_results(seed)


def test_scores_are_bounded_when_the_message_has_too_many() -> None:
    count = 2**20 + 1
    rows = np.zeros(count + 1, np.int32)
    rows[-1] = 1
    columns = rows.tobytes()
    offsets = np.zeros(count + 2, np.int32).tobytes()
    names = ("row_indexes", "positions", "token_ids", "logprobs", "ranks")
    scores = ScoreColumns(pb.Logprobs(top_offsets=offsets, **dict.fromkeys(names, columns)))
    assert list(scores) == [1]
    assert len(scores[1]) == 1
