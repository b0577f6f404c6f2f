"""What a tenant may take, as a rule of numbers, and the places of the queue."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.queue.queue_policy import (
    ACTIVE_NS,
    HELD_PER_LEFT,
    QUEUE_POLICIES,
    TenantShares,
    make_queue_policy,
)
from scheduler_service.scheduler.queue.waiting_queue import WaitingQueue
from tests.support.core.queue_driver import make_queue, make_request


def fill(queue: WaitingQueue, tenant: str, num_places: int, first_arrival: int) -> int:
    """Pushes requests of a tenant while it has a place; returns how many."""
    num_pushed = 0
    while queue.has_place(tenant, num_places):
        queue.push(make_request(first_arrival + num_pushed, tenant=tenant))
        num_pushed += 1
    return num_pushed


def shared(weights: dict[str, float]) -> TenantShares:
    """Shares of two tenants that both have a request."""
    shares = TenantShares(weights)
    shares.begins("a", "of a")
    shares.begins("b", "of b")
    return shares


@pytest.mark.parametrize(
    ("weight", "num_held", "num_left", "may_take"),
    [(1, 16, 1, True), (1, 17, 1, False), (2, 32, 1, True), (0.5, 9, 1, False), (1, 1, 0, False)],
)
def test_tenant_may_take_when_it_leaves_enough_for_what_it_has(
    *, weight: float, num_held: int, num_left: int, may_take: bool
) -> None:
    assert HELD_PER_LEFT == 16
    shares = shared({"a": weight})
    assert shares.may_take("a", num_held, num_left) is may_take


def test_tenant_may_take_the_last_when_it_has_nothing_or_is_alone() -> None:
    assert TenantShares({}).may_take("a", 1000, 0)
    assert shared({}).may_take("a", 0, 0)


def test_tenant_may_take_everything_when_others_have_been_idle_for_long() -> None:
    shares = shared({})
    assert not shares.may_take("a", 17, 1)
    shares.ends("b", "of b")
    shares.now_ns = ACTIVE_NS
    assert not shares.may_take("a", 17, 1)
    shares.now_ns = ACTIVE_NS + 1
    assert shares.may_take("a", 17, 1)
    shares.begins("b", "another of b")
    assert not shares.may_take("a", 17, 1)


def test_tenant_stays_active_when_only_one_of_its_requests_has_ended() -> None:
    shares = shared({})
    shares.begins("b", "of b")
    shares.begins("b", "another of b")
    shares.ends("b", "of b")
    shares.ends("b", "of b")
    shares.now_ns = 10 * ACTIVE_NS
    assert shares.is_shared


def test_fair_leaves_places_to_others_when_a_tenant_floods() -> None:
    queue = make_queue("fair")
    queue.push(make_request(1, tenant="b"))
    assert fill(queue, "a", 171, first_arrival=2) == 160
    assert all(queue.has_place(tenant, 171) for tenant in ("b", "c"))


def test_fair_leaves_places_to_others_when_none_is_known_yet() -> None:
    queue = make_queue("fair")
    assert fill(queue, "a", 170, first_arrival=1) == 160
    assert queue.has_place("b", 170)


def test_fair_takes_no_place_from_anybody_when_requests_come_back() -> None:
    queue = make_queue("fair")
    waiting = [make_request(arrival, tenant="a") for arrival in range(1, 11)]
    for request in waiting:
        queue.push(request)
    for request in waiting[:5]:
        queue.begun(request, 1)
    queue.push(make_request(11, tenant="b"))
    for request in waiting[:5]:
        queue.push(request)
    assert len(queue) == 11
    assert fill(queue, "c", 8, first_arrival=12) == 1


@pytest.mark.parametrize("name", sorted(set(QUEUE_POLICIES) - {"fair"}))
def test_has_place_ends_with_the_places_when_tenants_have_no_shares(name: str) -> None:
    queue = make_queue(name, [make_request(arrival) for arrival in (1, 2, 3)])
    assert queue.has_place("", 4)
    assert not queue.has_place("", 3)


@pytest.mark.parametrize("name", sorted(set(QUEUE_POLICIES) - {"fair"}))
def test_shares_are_none_when_the_policy_is_not_fair(name: str) -> None:
    assert make_queue_policy(name, {}).shares is None
