"""A request that makes steps fail is found, and ends alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from executor_service.steps.step import StepInput
from scheduler_service.scheduler.engine.outcomes.losses import MAX_FRUITLESS_LOSSES
from scheduler_service.scheduler.values.plan import StepStatus
from scheduler_service.scheduler.values.request import FinishReason, Request
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver, names
from tests.support.fakes.fake_runner import StepFault

MAX_TOKENS = 6


class Poison:
    """Fails every step that feeds the token of a guilty request; `failed`: by seed, how often."""

    def __init__(self, *guilty: int, from_length: int = 0) -> None:
        self.guilty = guilty
        self.from_length = from_length
        self.num_steps = 0
        self.failed: Counter[int] = Counter()

    def __call__(self, step: StepInput) -> StepFault:
        self.num_steps += 1
        lengths = (step.num_computed_tokens + step.num_new_tokens).tolist()
        seeds = step.seeds.tolist()
        for seed, length in zip(seeds, lengths, strict=True):
            if seed in self.guilty and length >= self.from_length:
                self.failed.update(seeds)
                return StepFault(error=RuntimeError("a row that nobody survives"))
        return StepFault()


def add_requests(engine: CheckedEngine, count: int, **params: Any) -> list[Request]:  # noqa: ANN401
    return [
        engine.add([number, 5, 6, 7, 8], max_tokens=MAX_TOKENS, **params)
        for number in range(1, count + 1)
    ]


def check_ends(engine: CheckedEngine, requests: list[Request], *guilty: int) -> None:
    """The guilty have ended with an error, and all others with their tokens."""
    for number, request in enumerate(requests, 1):
        if number in guilty:
            assert request.finish_reason is FinishReason.ERROR
        else:
            assert request.error is None
            engine.check_tokens(request)
    engine.check_blocks()


@pytest.mark.parametrize("from_length", [0, 8])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("count", "most_failures", "most_steps"), [(1, 0, 30), (4, 1, 40), (8, 2, 50), (16, 2, 60)]
)
def test_guilty_request_ends_alone_when_every_step_with_it_fails(
    count: int, most_failures: int, most_steps: int, depth: int, from_length: int
) -> None:
    poison = Poison(count, from_length=from_length)
    engine = CheckedEngine(depth=depth, fault=poison, max_num_seqs=16, num_device_blocks=128)
    requests = add_requests(engine, count)

    engine.drain()

    check_ends(engine, requests, count)
    innocent = [poison.failed[number] for number in range(1, count)]
    # Steps in flight behind the first that failed have the same rows.
    assert max(innocent, default=0) <= most_failures + depth - 1
    assert poison.num_steps <= most_steps


@pytest.mark.parametrize("params", [{"n": 2, "temperature": 1.0}, {"num_logprobs": 1}])
def test_guilty_requests_end_alone_when_there_are_several(params: dict[str, Any]) -> None:
    poison = Poison(2, 5, 6)
    engine = CheckedEngine(depth=2, fault=poison, max_num_seqs=16, num_device_blocks=128)
    requests = add_requests(engine, 8, **params)

    engine.drain()

    check_ends(engine, requests, 2, 5, 6)


def test_others_arrive_and_go_on_when_a_guilty_request_is_tried() -> None:
    poison = Poison(3)
    engine = CheckedEngine(depth=2, fault=poison, max_num_seqs=16, num_device_blocks=128)
    requests = add_requests(engine, 4)
    engine.step(3)
    late = [engine.add([90 + i, 5], max_tokens=MAX_TOKENS) for i in range(3)]

    engine.drain()

    check_ends(engine, requests, 3)
    for request in late:
        assert request.error is None
        assert poison.failed[request.sequence.seed] == 0


def test_guilty_request_ends_alone_when_its_row_makes_steps_be_refused() -> None:
    engine = CheckedEngine(depth=2, max_num_seqs=16, num_device_blocks=128)
    requests = add_requests(engine, 8)
    in_process, num_refused, num_steps = engine.engine, 0, 0

    def is_refused(batch: pb.ScheduleBatch) -> bool:
        return 4 in np.frombuffer(batch.new_rows.seeds, "<i8")

    for _ in range(200):
        num_steps += 1
        in_process.fill()
        if not in_process.in_flight:
            break
        if is_refused(pb.ScheduleBatch.FromString(in_process.in_flight[0][1])):
            in_process.skip(pb.STEP_STATUS_REFUSED)
            num_refused += 1
        else:
            in_process.answer()

    check_ends(engine, requests, 4)
    assert num_refused == MAX_FRUITLESS_LOSSES
    assert num_steps < 60


def test_suspects_take_turns_by_the_token_when_they_come_from_quarantine() -> None:
    driver = CoreDriver(max_num_batched_tokens=4)
    for number, num_trials in ((1, 3), (2, 2), (3, 1)):
        # Of two chunks.
        request = driver.make_request([number] * 6, f"r{number}", max_tokens=8)
        request.trial_size, request.num_trials_left = 1, num_trials
        driver.core.readmit(request)
    tried = []
    while driver.core.placement.suspects:
        tried += names(driver.next_rows())
        assert driver.plan() is None, "a trial is in flight"
        driver.answer()
        if len(tried) == 6:
            break
    assert tried == ["r1", "r1", "r2", "r2", "r3", "r3"]
    # Whoever has come through runs with the others, between trials of those that have not.
    tried.clear()
    while driver.core.placement.suspects:
        rows = names(driver.next_rows())
        tried += [] if "r3" in rows else rows
        driver.answer()
    assert tried == ["r1", "r2", "r1"]
    driver.run(depth=2)


def test_those_that_run_are_tried_when_the_next_suspect_has_no_room() -> None:
    driver = CoreDriver(num_device_blocks=8)
    for name, num_tokens in (("small", 5), ("large", 28)):
        request = driver.make_request([num_tokens] * num_tokens, name, max_tokens=4)
        request.trial_size, request.num_trials_left = 1, 3
        driver.core.readmit(request)
    tried = []
    while driver.core.placement.suspects:
        tried += names(driver.next_rows())
        driver.answer()
    assert tried == ["small"] * 4 + ["large"] * 3
    driver.run(depth=2)


def test_nobody_is_suspected_any_more_when_all_got_a_token() -> None:
    driver = CoreDriver()
    for number in range(1, 9):
        driver.add([number, 2, 3], max_tokens=4)
    driver.plan()
    driver.answer(StepStatus.FAILED)
    sizes = []
    while driver.core.placement.suspects:
        sizes.append(len(driver.next_rows()))
        assert driver.plan() is None  # a trial is in flight
        driver.answer()
    # Trials take turns with steps of those that are suspects no longer.
    assert sizes == [2, 2, 2, 4, 2, 6, 2]
    driver.run(depth=2)
