"""Requests that make steps fail are found and end alone, whatever else needs their room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from executor_service.steps import StepInput
from scheduler_service.scheduler.engine import MAX_STEPS_OF_OTHERS
from scheduler_service.scheduler.engine.outcomes import MAX_FRUITLESS_LOSSES
from scheduler_service.scheduler.queue import QUEUE_POLICIES, TURN_EVERY
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    Feature,
    FinishReason,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulingParams,
    StepStatus,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import CoreDriver, names
from tests.support.core.in_process import CheckedEngine
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


def test_guilty_request_ends_alone_when_steps_are_refused() -> None:
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


def test_suspects_from_quarantine_take_turns() -> None:
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


def test_running_suspect_is_tried_when_the_next_has_no_room() -> None:
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


_ADAPTERS = frozenset({Feature.LOGPROBS, Feature.ADAPTERS})
# What a suspect may lack while others run: a configuration, what others are, and what it is.
_LACKS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "blocks": ({"num_device_blocks": 12}, {}, {"prompt": 36}),
    "rows": ({"max_num_seqs": 4}, {}, {"n": 4, "temperature": 1.0}),
    "adapter slot": (
        {"max_adapters": 1, "features": _ADAPTERS},
        {"scheduling": SchedulingParams(adapter="a")},
        {"scheduling": SchedulingParams(adapter="b")},
    ),
}


def add_suspect(driver: CoreDriver, name: str, prompt: int = 4, **params: Any) -> Request:  # noqa: ANN401
    """It comes from a lost executor."""
    tokens = [20 + p % 70 for p in range(prompt)]
    request = driver.make_request(tokens, name, max_tokens=2, **params)
    request.trial_size = 1
    driver.core.readmit(request)
    return request


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
@pytest.mark.parametrize("lack", _LACKS)
def test_suspect_has_its_trial_when_others_arrive_for_ever(lack: str, policy: str) -> None:
    config, others, of_suspect = _LACKS[lack]
    driver = CoreDriver(queue_policy=policy, **config)
    num_others = 0
    suspect: Request | None = None
    for step in range(4 * MAX_STEPS_OF_OTHERS):
        while driver.core.num_waiting < 3:
            num_others += 1
            driver.add([1, 2, 3, 4, num_others % 90], f"o{num_others}", max_tokens=4, **others)
        if step == 4:
            suspect = add_suspect(driver, "suspect", **of_suspect)
        plan = driver.plan()
        assert plan is not None
        driver.answer()
        if suspect is not None and suspect.is_finished:
            assert suspect.error is None
            return
    raise AssertionError(f"{suspect} is still waiting")


@pytest.mark.parametrize("is_swapped_suspect", [True, False])
@pytest.mark.parametrize("policy", BatchPolicyName)
def test_swapped_request_holds_up_nobody_when_it_is_their_turn(
    policy: BatchPolicyName, *, is_swapped_suspect: bool
) -> None:
    driver = CoreDriver(
        num_device_blocks=12,
        num_host_blocks=12,
        preemption_mode=PreemptionMode.SWAP,
        batch_policy=policy,
    )
    running = driver.add(16, "running", max_tokens=12)
    swapped = driver.add([90] * 20, "swapped", max_tokens=8)
    driver.step()
    driver.preempt(swapped)
    swapped_at = driver.core.last_step_id
    driver.core.placement.blocks.extend(running.sequence.row_id, 3)
    small = driver.add([91] * 3, "small", max_tokens=2)
    suspect = swapped if is_swapped_suspect else small
    suspect.trial_size = 1
    driver.core.placement.suspects.add(suspect)

    while small.status is not RequestStatus.RUNNING:
        assert swapped.status is RequestStatus.SWAPPED
        assert driver.core.last_step_id < swapped_at + 4
        driver.step()

    driver.run()


@pytest.mark.parametrize("num_steps_since_turn", [0, 1])
def test_trials_take_no_turns_from_patient_rows(
    num_steps_since_turn: int,
) -> None:
    driver = CoreDriver(queue_policy="priority", max_num_batched_tokens=2, prefix_caching=False)
    for name, priority in [("patient", 1), ("r1", 0), ("r2", 0)]:
        scheduling = SchedulingParams(priority=priority)
        driver.add(1, name, max_tokens=150, scheduling=scheduling)
        driver.step()
    while "patient" not in {name for name, _, _ in driver.next_rows()}:
        driver.answer()
    driver.answer()
    for _ in range(num_steps_since_turn):
        driver.step()
    # Computed in 50 trials, between which the urgent rows take all tokens of the others.
    suspect = add_suspect(driver, "suspect", 100)

    num_since, longest = 0, 0
    while not suspect.is_finished:
        names = {name for name, _, _ in driver.next_rows()}
        driver.answer()
        if "patient" in names:
            num_since = 0
        elif "suspect" not in names:
            num_since += 1
            longest = max(longest, num_since)

    assert longest == TURN_EVERY
