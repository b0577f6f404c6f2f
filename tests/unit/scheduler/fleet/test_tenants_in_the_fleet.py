"""Under `fair`, no tenant waits for what another one has too much of, whichever part decides.

Each test drives the queue and the cores together: a request begins when it has a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.planning.room import MAX_BYPASSES
from scheduler_service.core.request import Request, RequestStatus
from tests.unit.scheduler.fleet.queued_fleet import Fleet

SWAPPING = {
    "num_device_blocks": 80,
    "num_host_blocks": 80,
    "preemption_mode": PreemptionMode.SWAP,
    "max_model_len": 400,
    "max_num_batched_tokens": 512,
    "prefix_caching": False,
}


def begins_within(fleet: Fleet, request: Request, num_steps: int) -> bool:
    """Whether a request that was just pushed has a row after so many steps."""
    fleet.dispatch()
    for _ in range(num_steps):
        fleet.step()
        if request.status is RequestStatus.RUNNING or request.is_finished:
            return True
    return False


def run_until_swapped(fleet: Fleet, most: int = 200) -> Request:
    """Steps until some request is swapped out; returns it."""
    fleet.dispatch()
    for _ in range(most):
        fleet.step()
        for driver in fleet.drivers:
            if driver.core.placement.swapped:
                return driver.core.placement.swapped[0]
    raise AssertionError("nobody was swapped out")


def swapped_by_its_own(fleet: Fleet) -> Request:
    """A large request of `a` is swapped out, for which a small one of `a` has to leave first."""
    fleet.push("known", tenant="b", max_tokens=1)
    fleet.push("small", tenant="a", max_tokens=300)
    fleet.push("large", 272, tenant="a", max_tokens=40)
    swapped = run_until_swapped(fleet)
    assert swapped.request_id == "large"
    return swapped


def test_other_tenant_begins_at_once_when_a_request_is_swapped_out() -> None:
    fleet = Fleet(SWAPPING, policy="fair")
    swapped_by_its_own(fleet)
    assert fleet.drivers[0].core.num_free_blocks >= 70
    for number in range(4):
        request = fleet.push(f"b{number}", tenant="b", max_tokens=60)
        assert begins_within(fleet, request, 2), f"request {number} of the other tenant waits"


def test_swapped_request_comes_back_when_another_tenant_goes_on_asking() -> None:
    fleet = Fleet(SWAPPING, policy="fair")
    swapped = swapped_by_its_own(fleet)
    for number in range(2000):
        if number % 3 == 0:
            fleet.push(f"b{number}", tenant="b", max_tokens=20)
        fleet.step()
        if swapped.is_finished:
            return
    raise AssertionError("the swapped request never came back")


def test_own_tenant_does_not_pass_a_swapped_request_when_it_asks_for_more() -> None:
    fleet = Fleet(SWAPPING, policy="fair")
    swapped_by_its_own(fleet)
    assert not begins_within(fleet, fleet.push("later", tenant="a"), 5)


@pytest.mark.parametrize("num_tenants", [1, 3])
def test_swapped_request_comes_back_first_when_it_waits_for_other_tenants(num_tenants: int) -> None:
    """It waits for room that others have, and these have been served more than its tenant."""
    fleet = Fleet({**SWAPPING, "max_num_waiting": 400}, policy="fair")
    large = fleet.push("large", 240, tenant="a", max_tokens=70)
    tenants = [f"b{number}" for number in range(num_tenants)]
    for number in range(6):
        fleet.push(f"first{number}", tenant=tenants[number % num_tenants], max_tokens=100)
    fleet.dispatch()
    fleet.step()
    fleet.drivers[0].preempt(large)
    assert large.status is RequestStatus.SWAPPED
    for number in range(3000):
        fleet.push(f"r{number}", tenant=tenants[number % num_tenants], max_tokens=40)
        fleet.step()
        if large.is_finished:
            return
        drop_waiting(fleet, 20)
    raise AssertionError("the large request never ended")


def drop_waiting(fleet: Fleet, most: int) -> None:
    """Keeps the queue short: those behind the first ones end."""
    for request in fleet.queue.first(fleet.now_ns, 1000)[most:]:
        fleet.queue.forget(request.request_id)


# -- oversized prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_cores", [1, 2])
def test_least_served_tenant_begins_at_once_when_oversized_prompts_of_another_wait(
    num_cores: int,
) -> None:
    """The giants wait for each other, however many requests passed them."""
    core = {**SWAPPING, "max_num_seqs": 16}
    fleet = Fleet(*[core] * num_cores, policy="fair")
    fleet.push("known", tenant="b", max_tokens=1)
    for number in range(4 * num_cores):
        fleet.push(f"giant{number}", 200, tenant="a", max_tokens=100)
    fleet.dispatch()
    for _ in range(3):
        fleet.step()
    for giant in giants(fleet):
        giant.num_bypasses = MAX_BYPASSES
    for number in range(8):
        request = fleet.push(f"b{number}", tenant="b", max_tokens=30)
        assert begins_within(fleet, request, 2), f"request {number} of the other tenant waits"


def giants(fleet: Fleet) -> Sequence[Request]:
    """Those that wait, wherever."""
    waiting = [request for driver in fleet.drivers for request in driver.core.queue]
    return [*waiting, *fleet.queue.first(fleet.now_ns, 100)]


def test_oversized_prompts_all_begin_when_another_tenant_goes_on_asking() -> None:
    fleet = Fleet({**SWAPPING, "max_num_seqs": 16}, policy="fair")
    waiting = {fleet.push(f"giant{n}", 250, tenant="a", max_tokens=10) for n in range(4)}
    for number in range(3000):
        if number % 4 == 0:
            fleet.push(f"b{number}", tenant="b", max_tokens=40)
        fleet.step()
        waiting = {request for request in waiting if not request.is_finished}
        if not waiting:
            return
    raise AssertionError(f"{len(waiting)} oversized prompts never began")


# -- what a core is given --------------------------------------------------------------------------


@pytest.mark.parametrize("num_tenants", [1, 2, 5])
def test_core_is_given_no_more_than_it_begins_soon_when_steps_share_few_prompt_tokens(
    num_tenants: int,
) -> None:
    fleet = Fleet(
        {
            "max_num_seqs": 256,
            "num_device_blocks": 20_000,
            "block_size": 16,
            "max_num_batched_tokens": 2048,
            "max_model_len": 1000,
            "max_num_waiting": 1000,
            "prefix_caching": False,
        },
        policy="fair",
    )
    for number in range(600):
        fleet.push(f"r{number}", 300, tenant=f"t{number % num_tenants}", max_tokens=200)
    fleet.dispatch()
    core = fleet.drivers[0].core
    most = core.num_waiting
    for _ in range(40):
        fleet.step()
        most = max(most, core.num_waiting)
    # As many as one step has tokens for, and one for each tenant.
    assert most <= 2048 // 300 + 1 + num_tenants
    assert core.num_running > 40


def test_newcomer_begins_at_once_when_a_long_prompt_of_another_is_computed() -> None:
    fleet = Fleet(
        {
            "num_device_blocks": 5000,
            "max_num_batched_tokens": 2048,
            "max_model_len": 10_000,
            "prefix_caching": False,
        },
        policy="fair",
    )
    fleet.push("known", tenant="b", max_tokens=1)
    fleet.push("long", 9000, tenant="a")
    fleet.dispatch()
    fleet.step()
    assert begins_within(fleet, fleet.push("b", 100, tenant="b"), 2)


def test_newcomer_begins_at_once_when_a_waiting_giant_of_another_has_the_turn() -> None:
    fleet = Fleet(
        {
            "block_size": 16,
            "num_device_blocks": 1000,
            "max_num_batched_tokens": 2048,
            "max_model_len": 20_000,
            "prefix_caching": False,
        },
        policy="fair",
    )
    fleet.push("known", tenant="b", max_tokens=1)
    fleet.push("long", 9000, tenant="a")
    fleet.dispatch()
    fleet.step()
    giant = fleet.push("giant", 9000, tenant="a")
    fleet.queue.forget("giant")
    fleet.drivers[0].core.readmit(giant)
    request = fleet.push("b", 100, tenant="b")
    assert [name for name, _ in fleet.dispatch()] == ["b"]
    fleet.step()
    assert request.status is RequestStatus.RUNNING


def test_last_executor_is_left_to_others_when_requests_take_all_rows() -> None:
    fleet = Fleet({"max_num_seqs": 8}, {"max_num_seqs": 8}, policy="fair")
    fleet.push("known", tenant="b", max_tokens=1)
    fleet.dispatch()
    fleet.step()
    large = [fleet.push(f"a{number}", tenant="a", n=8, max_tokens=8) for number in range(3)]
    fleet.dispatch()
    fleet.step()
    assert sum(request.status is RequestStatus.RUNNING for request in large) == 1
    assert begins_within(fleet, fleet.push("b", tenant="b"), 2)


def test_requests_that_take_all_rows_use_every_executor_when_their_tenant_is_alone() -> None:
    fleet = Fleet({"max_num_seqs": 8}, {"max_num_seqs": 8}, policy="fair")
    large = [fleet.push(f"a{number}", tenant="a", n=8, max_tokens=8) for number in range(3)]
    fleet.dispatch()
    fleet.step()
    assert sum(request.status is RequestStatus.RUNNING for request in large) == 2
