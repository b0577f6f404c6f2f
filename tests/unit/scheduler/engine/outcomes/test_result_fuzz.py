"""Whatever an executor answers, only what the contract names is raised, and requests survive it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from scheduler_service.scheduler.values.config import Speculation
from scheduler_service.scheduler.values.plan import ContractBroken
from scheduler_service.scheduler.values.sampling_params import BeamParams
from scheduler_service.step_codec import ResultUnusable, ScoreColumns
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.result_mutations import COSTS

NUM_RUNS = 600
_PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"num_logprobs": 2},
    {"num_prompt_logprobs": 1, "num_logprobs": 0},
    {"n": 2, "temperature": 1.0},
    {"n": 1, "best_of": 2, "temperature": 1.0},
    {"beam": BeamParams(2), "n": 1},
)


def run(seed: int) -> None:
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


@pytest.mark.parametrize("first", range(0, NUM_RUNS, 100))
def test_nothing_else_is_raised_when_results_are_not_as_they_must_be(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed)


def test_row_has_no_scores_when_the_message_has_more_than_could_be_true() -> None:
    count = 2**20 + 1
    rows = np.zeros(count + 1, np.int32)
    rows[-1] = 1
    columns = rows.tobytes()
    offsets = np.zeros(count + 2, np.int32).tobytes()
    names = ("row_indexes", "positions", "token_ids", "logprobs", "ranks")
    scores = ScoreColumns(pb.Logprobs(top_offsets=offsets, **dict.fromkeys(names, columns)))
    assert list(scores) == [1]
    assert len(scores[1]) == 1
