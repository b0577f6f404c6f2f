"""More faults of the first engines: urgency, starvation, swapping, counters.

See test_faults_of_first_engines.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.scheduler.values.config import BatchPolicyName
from scheduler_service.scheduler.values.request import SchedulingParams
from tests.support.core.checked_engine import swapping_engine
from tests.support.core.driver import CoreDriver

URGENT, PATIENT = SchedulingParams(priority=-1), SchedulingParams(priority=1)
PROMPT = list(range(1, 14))


# -- urgency -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_policy", BatchPolicyName)
def test_urgent_request_goes_first_when_prefills_fill_the_steps(
    batch_policy: BatchPolicyName,
) -> None:
    driver = CoreDriver(
        queue_policy="priority", max_num_seqs=2, batch_policy=batch_policy, prefix_caching=False
    )
    for _ in range(4):
        driver.add(9, scheduling=PATIENT)
    driver.step()
    driver.add(9, "urgent", scheduling=URGENT)
    assert ("urgent", 0, 9) in driver.next_rows()


@pytest.mark.parametrize("depth", [1, 2])
def test_victims_of_an_urgent_request_find_their_blocks_when_they_come_back(depth: int) -> None:
    engine = swapping_engine(queue_policy="priority", num_device_blocks=9, depth=depth)
    victims = [
        engine.add(list(range(start, start + 9)), max_tokens=7, scheduling=PATIENT)
        for start in (0, 20)
    ]
    engine.step(2)
    engine.add(list(range(40, 70)), max_tokens=3, scheduling=URGENT)
    engine.run()
    assert [request.num_preemptions for request in victims] == [1, 1]


# -- starvation --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_policy", BatchPolicyName)
def test_swapped_request_comes_back_when_new_ones_never_stop_arriving(
    batch_policy: BatchPolicyName,
) -> None:
    # Those who keep arriving take what becomes free, two blocks at a time; it needs eight.
    engine = swapping_engine(
        num_device_blocks=16, batch_policy=batch_policy, max_num_waiting=200, prefix_caching=False
    )
    swapped = engine.add(list(range(25)), max_tokens=20)
    for number in range(60):
        for extra in range(3):
            engine.add([number] * 5, max_tokens=2 + extra)
        engine.step()
        if number == 6:
            engine.preempt(swapped)
    assert swapped.is_finished
    engine.run()


def test_adapter_is_served_when_another_one_never_stops_arriving() -> None:
    engine = swapping_engine(max_adapters=1)
    engine.add(PROMPT, scheduling=SchedulingParams(adapter="a"), max_tokens=4)
    limited = engine.add(PROMPT, scheduling=SchedulingParams(adapter="b"), max_tokens=4)
    for number in range(200):
        engine.add([number], scheduling=SchedulingParams(adapter="a"), max_tokens=3)
        engine.step()
        if limited.is_finished:
            break
    assert limited.is_finished
    engine.run()


# -- swapping ----------------------------------------------------------------------------------


def test_shared_blocks_stay_shared_when_a_request_is_swapped() -> None:
    engine = swapping_engine(prefix_caching=False)
    request = engine.add(PROMPT, n=3, max_tokens=12)
    engine.step(2)
    in_use = 64 - engine.core.num_free_blocks
    engine.preempt(request)
    assert 16 - engine.core.num_free_host_blocks == in_use == 3 + 3
    engine.step(2)
    assert 64 - engine.core.num_free_blocks == in_use
    engine.run()


def test_preemptions_are_counted_when_causes_differ() -> None:
    causes: list[dict[str, Any]] = [{"num_device_blocks": 8}, {"max_num_seqs": 1}]
    for options in causes:
        engine = swapping_engine(queue_policy="priority", **options)
        engine.add(PROMPT, max_tokens=12, scheduling=PATIENT)
        engine.step(2)
        engine.add(list(range(20, 33)), max_tokens=12, scheduling=URGENT)
        engine.run()
        counts = [request.num_preemptions for request in engine.requests]
        assert engine.core.num_preemptions == sum(counts) > 0
