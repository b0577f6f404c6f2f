"""Suspects need what others hold: both go on, whatever else arrives."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.scheduler.engine.suspects import MAX_STEPS_OF_OTHERS
from scheduler_service.scheduler.queue.key_order import TURN_EVERY
from scheduler_service.scheduler.queue.queue_policy import QUEUE_POLICIES
from scheduler_service.scheduler.values.config import BatchPolicyName, Feature, PreemptionMode
from scheduler_service.scheduler.values.request import Request, RequestStatus, SchedulingParams
from tests.support.core.driver import CoreDriver

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
def test_trials_take_no_turns_from_patient_rows_when_suspects_are_computed(
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
