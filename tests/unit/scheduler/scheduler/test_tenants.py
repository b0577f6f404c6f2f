"""Under `fair`, no tenant waits for what another one has too much of, whichever part decides."""

from __future__ import annotations

from itertools import islice

import pytest

from scheduler_service.scheduler.engine.planning import MAX_BYPASSES
from scheduler_service.scheduler.values import (
    PreemptionCause,
    PreemptionMode,
    Request,
    RequestStatus,
)
from tests.unit.scheduler.scheduler.routed_fleet import RoutedFleet

SWAPPING = {
    "num_device_blocks": 80,
    "num_host_blocks": 80,
    "preemption_mode": PreemptionMode.SWAP,
    "max_model_len": 400,
    "max_num_batched_tokens": 512,
    "prefix_caching": False,
}


def begins_within(fleet: RoutedFleet, request: Request, num_steps: int) -> bool:
    """Whether a request that was just pushed has a row after so many steps."""
    fleet.begun()
    for _ in range(num_steps):
        fleet.step()
        if request.status is RequestStatus.RUNNING or request.is_finished:
            return True
    return False


def run_until_swapped(fleet: RoutedFleet, most: int = 200) -> Request:
    """Steps until some request is swapped out; returns it."""
    fleet.begun()
    for _ in range(most):
        fleet.step()
        for number in range(len(fleet.numbered)):
            swapped = fleet.engine(number).placement.swapped
            if swapped:
                return swapped[0]
    raise AssertionError("nobody was swapped out")


def swapped_by_its_own(fleet: RoutedFleet) -> Request:
    """A large request of `a` is swapped out, for which a small one of `a` has to leave first."""
    fleet.push("known", tenant="b", max_tokens=1)
    fleet.push("small", tenant="a", max_tokens=300)
    fleet.push("large", 272, tenant="a", max_tokens=40)
    swapped = run_until_swapped(fleet)
    assert swapped.request_id == "large"
    return swapped


def test_other_tenant_begins_beside_a_swapped_request() -> None:
    fleet = RoutedFleet(SWAPPING, policy="fair")
    swapped_by_its_own(fleet)
    assert fleet.engine(0).num_free_blocks >= 70
    for number in range(4):
        request = fleet.push(f"b{number}", tenant="b", max_tokens=60)
        assert begins_within(fleet, request, 2), f"request {number} of the other tenant waits"


def test_swapped_request_comes_back_when_another_tenant_goes_on_asking() -> None:
    fleet = RoutedFleet(SWAPPING, policy="fair")
    swapped = swapped_by_its_own(fleet)
    for number in range(2000):
        if number % 3 == 0:
            fleet.push(f"b{number}", tenant="b", max_tokens=20)
        fleet.step()
        if swapped.is_finished:
            return
    raise AssertionError("the swapped request never came back")


def test_own_tenant_does_not_pass_a_swapped_request() -> None:
    fleet = RoutedFleet(SWAPPING, policy="fair")
    swapped_by_its_own(fleet)
    assert not begins_within(fleet, fleet.push("later", tenant="a"), 5)


@pytest.mark.parametrize("num_tenants", [1, 3])
def test_swapped_request_comes_back_before_other_tenants(num_tenants: int) -> None:
    """It waits for room that others have, and these have been served more than its tenant."""
    fleet = RoutedFleet(SWAPPING, policy="fair")
    large = fleet.push("large", 240, tenant="a", max_tokens=70)
    tenants = [f"b{number}" for number in range(num_tenants)]
    for number in range(6):
        fleet.push(f"first{number}", tenant=tenants[number % num_tenants], max_tokens=100)
    fleet.begun()
    fleet.step()
    fleet.engine(0).placement.preempt(large, PreemptionCause.BLOCKS)
    assert large.status is RequestStatus.SWAPPED
    for number in range(3000):
        fleet.push(f"r{number}", tenant=tenants[number % num_tenants], max_tokens=40)
        fleet.step()
        if large.is_finished:
            return
        drop_waiting(fleet, 20)
    raise AssertionError("the large request never ended")


def drop_waiting(fleet: RoutedFleet, most: int) -> None:
    """Keeps the queue short: those behind the first ones end."""
    for request in list(islice(fleet.scheduler.queue.candidates(), most, None)):
        fleet.abort(request.request_id)


# -- oversized prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_executors", [1, 2])
def test_least_served_tenant_begins_beside_oversized_prompts(
    num_executors: int,
) -> None:
    """The giants wait for each other, however many requests passed them."""
    executor = {**SWAPPING, "max_num_seqs": 16}
    fleet = RoutedFleet(*[executor] * num_executors, policy="fair")
    fleet.push("known", tenant="b", max_tokens=1)
    for number in range(4 * num_executors):
        fleet.push(f"giant{number}", 200, tenant="a", max_tokens=100)
    fleet.begun()
    for _ in range(3):
        fleet.step()
    assert fleet.scheduler.num_queued
    for giant in fleet.scheduler.queue:
        giant.num_bypasses = MAX_BYPASSES
    for number in range(8):
        request = fleet.push(f"b{number}", tenant="b", max_tokens=30)
        assert begins_within(fleet, request, 2), f"request {number} of the other tenant waits"


def test_oversized_prompts_all_begin_when_another_tenant_goes_on_asking() -> None:
    fleet = RoutedFleet({**SWAPPING, "max_num_seqs": 16}, policy="fair")
    waiting = {fleet.push(f"giant{n}", 250, tenant="a", max_tokens=10) for n in range(4)}
    for number in range(3000):
        if number % 4 == 0:
            fleet.push(f"b{number}", tenant="b", max_tokens=40)
        fleet.step()
        waiting = {request for request in waiting if not request.is_finished}
        if not waiting:
            return
    raise AssertionError(f"{len(waiting)} oversized prompts never began")


# -- long prompts and many rows --------------------------------------------------------------------


LONG_PROMPTS = {
    "block_size": 16,
    "num_device_blocks": 1300,
    "max_num_batched_tokens": 2048,
    "max_model_len": 20_000,
    "prefix_caching": False,
}


def test_newcomer_begins_beside_a_giant_with_the_turn() -> None:
    fleet = RoutedFleet({**LONG_PROMPTS, "num_device_blocks": 1000}, policy="fair")
    fleet.push("known", tenant="b", max_tokens=1)
    fleet.push("long", 9000, tenant="a")
    fleet.begun()
    fleet.step()
    giant = fleet.push("giant", 9000, tenant="a")
    fleet.step()
    assert giant in fleet.scheduler.queue
    assert begins_within(fleet, fleet.push("b", 100, tenant="b"), 1)


def test_last_executor_is_left_to_other_tenants() -> None:
    fleet = RoutedFleet({"max_num_seqs": 8}, {"max_num_seqs": 8}, policy="fair")
    fleet.push("known", tenant="b", max_tokens=1)
    fleet.begun()
    fleet.step()
    large = [fleet.push(f"a{number}", tenant="a", n=8, max_tokens=8) for number in range(3)]
    fleet.begun()
    fleet.step()
    assert sum(request.status is RequestStatus.RUNNING for request in large) == 1
    assert begins_within(fleet, fleet.push("b", tenant="b"), 2)
