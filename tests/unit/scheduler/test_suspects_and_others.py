"""Suspects need what others hold: both go on, whatever else arrives."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.core.config import BatchPolicyName, Feature, PreemptionMode
from scheduler_service.core.queue_policy import QueuePolicyName
from scheduler_service.core.request import Place, Request, SchedulingParams
from scheduler_service.core.suspects import MAX_STEPS_OF_OTHERS
from tests.support.core_driver import CoreDriver

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
    request = driver.add([*range(20, 20 + prompt)], name, max_tokens=2, **params)
    # As one that comes from a lost executor.
    request.trial_size = 1
    driver.core._placement.suspects.add(request)
    return request


@pytest.mark.parametrize("policy", QueuePolicyName)
@pytest.mark.parametrize("lack", _LACKS)
def test_suspect_has_its_trial_when_others_arrive_for_ever(
    lack: str, policy: QueuePolicyName
) -> None:
    config, others, of_suspect = _LACKS[lack]
    driver = CoreDriver(queue_policy=policy.value, **config)
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


@pytest.mark.parametrize("swaps_suspect", [True, False])
@pytest.mark.parametrize("policy", BatchPolicyName)
def test_swapped_requests_do_not_hold_up_those_of_other_steps(
    policy: BatchPolicyName, *, swaps_suspect: bool
) -> None:
    driver = CoreDriver(
        num_host_blocks=64, preemption_mode=PreemptionMode.SWAP, batch_policy=policy
    )
    swapped = driver.add(8, "swapped", max_tokens=8)
    driver.step()
    driver.core._placement.preempt(swapped)
    assert swapped.place is Place.SWAPPED
    other = driver.add(9, "other", max_tokens=8)
    suspect = swapped if swaps_suspect else other
    suspect.trial_size = 1
    driver.core._placement.suspects.add(suspect)

    names = {name for _ in range(4) for name, _, _ in driver.rows_of(driver.step()[0])}

    assert names == {"swapped", "other"}
