"""Queue policies: order, turns, fair shares, places, and how the engine obeys them."""

from __future__ import annotations

import pickle

import pytest

from scheduler_service.scheduler.engine.planning import MIN_SMALLEST_STEPS
from scheduler_service.scheduler.queue import (
    ACTIVE_NS,
    HELD_PER_LEFT,
    QUEUE_POLICIES,
    TURN_EVERY,
    FairShare,
    TenantShares,
    WaitingQueue,
    make_queue_policy,
)
from scheduler_service.scheduler.values import PreemptionMode, Request, SchedulingParams
from splitserve_options import OPTIONS
from tests.support.core.driver import (
    CoreDriver,
    admit_next,
    end,
    make_queue,
    make_request,
    names,
    order,
)

ALL_NAMES = list(QUEUE_POLICIES)


# -- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_NAMES)
def test_only_fair_charges_outputs(name: str) -> None:
    assert make_queue(name).charges_outputs is (name == "fair")


def test_options_offer_the_policies_there_are() -> None:
    (option,) = (option for option in OPTIONS if option.name == "queue-policy")
    assert option.choices == tuple(QUEUE_POLICIES)


@pytest.mark.parametrize("name", ["fcfs", "fair"])
def test_nobody_is_preempted_when_arrivals_rank(name: str) -> None:
    queue = make_queue(name)
    urgent, running = make_request(1, priority=-5), make_request(2, priority=5)
    assert queue.rank(urgent) < queue.rank(running)
    assert not queue.may_preempt(urgent, running)


def test_make_queue_policy_names_the_policies_when_it_knows_none() -> None:
    with pytest.raises(ValueError, match="queue_policy is 'lifo'; allowed: fcfs, priority, fair"):
        make_queue_policy("lifo", {})


@pytest.mark.parametrize("weight", [0, -1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fair", "fcfs"])
def test_make_queue_policy_names_a_weight_out_of_range(name: str, weight: float) -> None:
    with pytest.raises(ValueError, match=r"tenant_weights\['a'\] is .*; allowed: above 0"):
        make_queue_policy(name, {"a": weight})


# -- priority and deadline ---------------------------------------------------------------------


def test_priority_orders_by_class_then_arrival_when_several_wait() -> None:
    waiting = [
        make_request(1, 3),
        make_request(2, -1),
        make_request(3, 0),
        make_request(4, -1),
    ]
    assert order(make_queue("priority", waiting)) == [2, 4, 3, 1]


def test_deadline_orders_by_class_deadline_and_arrival() -> None:
    waiting = [
        make_request(1, 1, deadline_ns=5),
        make_request(2),
        make_request(3, deadline_ns=9),
        make_request(4, deadline_ns=7),
        make_request(5, deadline_ns=9),
        make_request(6),
    ]
    assert order(make_queue("deadline", waiting)) == [4, 3, 5, 2, 6, 1]


@pytest.mark.parametrize("name", ["priority", "deadline"])
def test_running_request_is_preempted_only_by_a_more_urgent_class(name: str) -> None:
    queue = make_queue(name)
    running = make_request(9, priority=1)
    assert queue.may_preempt(make_request(10, priority=0), running)
    assert not queue.may_preempt(make_request(1, priority=1, deadline_ns=1), running)
    assert not queue.may_preempt(make_request(2, priority=2), running)
    running.is_protected = True
    assert not queue.may_preempt(make_request(10, priority=0), running)


def test_whoever_has_the_turn_stays_first_when_it_cannot_run() -> None:
    queue = make_queue("priority", [make_request(1, priority=5)])
    for arrival in range(10, 10 + TURN_EVERY):
        queue.push(make_request(arrival))
        queue.begun(next(r for r in queue if r.arrival == arrival), 1)
    for arrival in (30, 31, 32):
        queue.push(make_request(arrival))
    passing = iter(queue.candidates())
    assert next(passing).arrival == 1
    queue.begun(next(passing), 1)
    assert [request.arrival for request in passing] == [31, 32]
    assert order(queue) == [1, 31, 32]


def protect_by_turn(queue: WaitingQueue, request: Request) -> None:
    """Admits `request`, which must be older than all others, out of turn."""
    queue.push(request)
    for arrival in range(1000, 1000 + TURN_EVERY):
        queue.push(make_request(arrival, priority=-50))
        admit_next(queue)
    assert admit_next(queue) is request
    assert request.is_protected


def test_protected_requests_rank_first_by_arrival() -> None:
    queue = make_queue("priority")
    older, younger = make_request(1, priority=9), make_request(2, priority=8)
    protect_by_turn(queue, younger)
    protect_by_turn(queue, older)
    ranks = [queue.rank(request) for request in (older, younger, make_request(3, priority=-100))]
    assert ranks == sorted(ranks)


def test_protected_request_takes_no_turn_from_others() -> None:
    queue = make_queue("priority")
    protected, patient = make_request(1, priority=9), make_request(2, priority=9)
    protect_by_turn(queue, protected)
    queue.push(patient)
    for arrival in range(10, 10 + TURN_EVERY):
        queue.push(make_request(arrival))
        admit_next(queue)
    queue.push(protected)
    queue.push(make_request(50))
    assert [admit_next(queue), admit_next(queue)] == [protected, patient]


def test_fair_serves_the_least_served_tenant() -> None:
    waiting = [make_request(a, tenant="a") for a in range(1, 4)]
    waiting += [make_request(a, tenant="b") for a in range(4, 7)]
    queue = make_queue("fair", waiting)
    admissions = [admit_next(queue, 10).arrival for _ in range(3)]
    queue.charge({"b": 10})
    admissions += [admit_next(queue, 10).arrival for _ in range(2)]
    assert admissions == [1, 4, 2, 3, 5]


def test_fair_forgets_tenants_when_they_have_no_request() -> None:
    queue = WaitingQueue(FairShare({}), max_idle_tenants=50)
    sizes: list[int] = []
    for arrival in range(2000):
        request = make_request(arrival, tenant=f"t{arrival}")
        queue.push(request)
        if arrival >= 10:
            end(queue, admit_next(queue, 10))
        if arrival % 7 == 0:
            sizes.append(len(pickle.dumps(queue)))
    assert len(queue) == 10
    assert max(sizes[25:]) < 1.1 * max(sizes[:25])


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
def test_tenant_may_take_when_it_leaves_enough(
    *, weight: float, num_held: int, num_left: int, may_take: bool
) -> None:
    assert HELD_PER_LEFT == 16
    shares = shared({"a": weight})
    assert shares.may_take("a", num_held, num_left) is may_take


def test_tenant_may_take_the_last_when_first_or_alone() -> None:
    assert TenantShares({}).may_take("a", 1000, 0)
    assert shared({}).may_take("a", 0, 0)


def test_tenant_may_take_everything_when_others_are_idle() -> None:
    shares = shared({})
    assert not shares.may_take("a", 17, 1)
    shares.ends("b", "of b")
    shares.now_ns = ACTIVE_NS
    assert not shares.may_take("a", 17, 1)
    shares.now_ns = ACTIVE_NS + 1
    assert shares.may_take("a", 17, 1)
    shares.begins("b", "another of b")
    assert not shares.may_take("a", 17, 1)


def test_tenant_stays_active_while_a_request_is_left() -> None:
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
def test_has_place_ends_with_the_places_without_shares(name: str) -> None:
    queue = make_queue(name, [make_request(arrival) for arrival in (1, 2, 3)])
    assert queue.has_place("", 4)
    assert not queue.has_place("", 3)


@pytest.mark.parametrize("name", sorted(set(QUEUE_POLICIES) - {"fair"}))
def test_shares_are_none_when_the_policy_is_not_fair(name: str) -> None:
    assert make_queue_policy(name, {}).shares is None


SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
URGENT, NORMAL, PATIENT = (SchedulingParams(priority=priority) for priority in (-1, 0, 5))


def priority_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {"queue_policy": "priority", "prefix_caching": False}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def tenant(name: str) -> SchedulingParams:
    return SchedulingParams(tenant=name)


# -- urgency -----------------------------------------------------------------------------------


def test_urgent_request_preempts_the_least_urgent_when_blocks_are_exhausted() -> None:
    driver = priority_driver(num_device_blocks=6)
    driver.add(7, "normal", scheduling=NORMAL)
    driver.add(7, "patient", scheduling=PATIENT)
    driver.step()
    driver.add(10, "urgent", scheduling=URGENT)
    assert names(driver.next_rows()) == ["normal", "urgent"]
    assert driver.core.num_preemptions == 1


def test_urgent_request_preempts_the_least_urgent_for_a_row() -> None:
    driver = priority_driver(max_num_seqs=2)
    driver.add(7, "patient", scheduling=PATIENT)
    driver.add(7, "normal", scheduling=NORMAL)
    driver.step()
    driver.add(3, "urgent", scheduling=URGENT)
    assert names(driver.next_rows()) == ["normal", "urgent"]


def test_urgent_request_preempts_as_many_as_it_needs() -> None:
    driver = priority_driver(max_num_seqs=3)
    for name in ("old", "middle", "young"):
        driver.add(3, name, scheduling=PATIENT)
    driver.step()
    driver.add(3, "pair", n=2, scheduling=URGENT)
    assert sorted(names(driver.next_rows())) == ["old", "pair"]


def test_urgent_request_preempts_nobody_when_that_would_not_be_enough() -> None:
    driver = priority_driver(num_device_blocks=6)
    driver.add(11, "normal", scheduling=URGENT)
    driver.add(3, "patient", scheduling=PATIENT)
    driver.step()
    driver.add(15, "urgent", scheduling=URGENT)
    assert names(driver.next_rows()) == ["normal", "patient"]
    assert driver.core.num_preemptions == 0


def test_urgent_request_waits_for_blocks_being_written() -> None:
    driver = priority_driver(num_device_blocks=4)
    driver.add(7, "patient", scheduling=PATIENT)
    driver.plan()
    driver.add(14, "urgent", scheduling=URGENT)
    assert driver.plan() is None
    driver.answer()
    assert names(driver.next_rows()) == ["urgent"]


# -- deadlines ---------------------------------------------------------------------------------


def deadline_driver(step_us: int = 1000) -> CoreDriver:
    """A core that has seen steps of that length, as small as they can be."""
    driver = CoreDriver(queue_policy="deadline", max_num_batched_tokens=8)
    for _ in range(MIN_SMALLEST_STEPS):
        driver.add(1, max_tokens=1)
        driver.plan()
        driver.answer(compute_us=step_us)
    return driver


@pytest.mark.parametrize(("deadline_us", "is_refused"), [(2999, True), (3000, False)])
def test_request_is_refused_when_its_deadline_cannot_be_met(
    deadline_us: int, is_refused: bool
) -> None:
    driver = deadline_driver()
    scheduling = SchedulingParams(deadline_ns=deadline_us * 1000)
    # Two steps of prompt, and one more for the second token.
    request = driver.add(12, "late", scheduling=scheduling, max_tokens=2, min_tokens=2)
    plan = driver.plan()
    assert (plan is None) is is_refused
    assert driver.core.take_ended().finished == [request] * is_refused
    if is_refused:
        assert request.error
        assert request.error[0] == "DEADLINE_UNREACHABLE"


def test_request_is_refused_when_it_has_waited_too_long() -> None:
    driver = deadline_driver()
    driver.core.tick(5_000_000)
    request = driver.add(3, scheduling=SchedulingParams(deadline_ns=4_000_000))
    assert driver.plan() is None
    assert request.error
    assert "at least 0.002 s after the deadline" in request.error[1]


def test_request_is_not_refused_when_it_has_tokens_already() -> None:
    driver = deadline_driver()
    driver.core.tick(5_000_000)
    driver.add(3, "resumed", scheduling=SchedulingParams(deadline_ns=1), resume=[[4]])
    assert names(driver.next_rows()) == ["resumed"]


def test_deadline_does_not_matter_when_the_policy_is_another() -> None:
    driver = CoreDriver()
    driver.core.tick(5_000_000)
    driver.add(3, "late", scheduling=SchedulingParams(deadline_ns=1))
    assert names(driver.next_rows()) == ["late"]
