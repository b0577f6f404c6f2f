"""The queue policies, rule by rule; for fair shares see test_fair_share.py."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.queue.key_order import TURN_EVERY
from scheduler_service.scheduler.queue.queue_policy import QUEUE_POLICIES, make_queue_policy
from scheduler_service.scheduler.queue.waiting_queue import WaitingQueue
from scheduler_service.scheduler.values.request import Request
from splitserve_options.options import OPTIONS
from tests.support.core.queue_driver import admit_next, make_queue, make_request, order

ALL_NAMES = list(QUEUE_POLICIES)


# -- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_NAMES)
def test_requests_wait_when_they_were_not_removed(name: str) -> None:
    requests = [make_request(1, tenant="a"), make_request(2, tenant="b"), make_request(3)]
    queue = make_queue(name, requests)
    queue.remove(requests[1])
    assert len(queue) == 2
    assert {request.arrival for request in queue} == {1, 3}
    assert sorted(order(queue)) == [1, 3]


@pytest.mark.parametrize("name", ALL_NAMES)
def test_candidates_go_on_when_each_is_admitted(name: str) -> None:
    queue = make_queue(name, [make_request(arrival) for arrival in (2, 1, 3)])
    admitted = []
    for request in queue.candidates():
        queue.begun(request, 1)
        admitted.append(request.arrival)
    assert admitted == [1, 2, 3]
    assert len(queue) == 0


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
def test_make_queue_policy_names_the_weight_when_it_is_out_of_range(
    name: str, weight: float
) -> None:
    with pytest.raises(ValueError, match=r"tenant_weights\['a'\] is .*; allowed: above 0"):
        make_queue_policy(name, {"a": weight})


# -- first come, first served ------------------------------------------------------------------


def test_fcfs_puts_a_request_back_at_its_place_when_it_was_preempted() -> None:
    queue = make_queue("fcfs", [make_request(arrival) for arrival in (4, 1, 3)])
    queue.push(make_request(2))
    assert order(queue) == [1, 2, 3, 4]


# -- priority and deadline ---------------------------------------------------------------------


def test_priority_orders_by_class_then_arrival_when_several_wait() -> None:
    waiting = [make_request(1, 3), make_request(2, -1), make_request(3, 0), make_request(4, -1)]
    assert order(make_queue("priority", waiting)) == [2, 4, 3, 1]


def test_deadline_orders_by_class_then_deadline_then_arrival_when_several_wait() -> None:
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
def test_running_request_is_preempted_only_when_a_more_urgent_class_waits(name: str) -> None:
    queue = make_queue(name)
    running = make_request(9, priority=1)
    assert queue.may_preempt(make_request(10, priority=0), running)
    assert not queue.may_preempt(make_request(1, priority=1, deadline_ns=1), running)
    assert not queue.may_preempt(make_request(2, priority=2), running)
    running.is_protected = True
    assert not queue.may_preempt(make_request(10, priority=0), running)


@pytest.mark.parametrize("name", ["priority", "deadline"])
def test_longest_waiting_request_has_every_ninth_turn_when_others_are_more_urgent(
    name: str,
) -> None:
    patient = [make_request(1, priority=5), make_request(2, priority=5)]
    queue = make_queue(name, patient)
    admissions = []
    for arrival in range(100, 100 + 2 * TURN_EVERY + 2):
        queue.push(make_request(arrival, priority=-1))
        admissions.append(admit_next(queue))
    assert admissions[TURN_EVERY] is patient[0]
    assert admissions[2 * TURN_EVERY + 1] is patient[1]
    assert [request for request in admissions if request.is_protected] == patient


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


def test_turn_comes_in_the_middle_of_the_candidates_when_enough_were_admitted() -> None:
    waiting = [make_request(1, priority=5), *(make_request(a) for a in range(2, 14))]
    queue = make_queue("priority", waiting)
    admissions = []
    for request in queue.candidates():
        queue.begun(request, 1)
        admissions.append(request.arrival)
    assert admissions == [*range(2, 2 + TURN_EVERY), 1, *range(2 + TURN_EVERY, 14)]


def protect_by_turn(queue: WaitingQueue, request: Request) -> None:
    """Admits `request`, which must be older than all others, out of turn."""
    queue.push(request)
    for arrival in range(1000, 1000 + TURN_EVERY):
        queue.push(make_request(arrival, priority=-50))
        admit_next(queue)
    assert admit_next(queue) is request
    assert request.is_protected


def test_protected_requests_rank_first_and_by_arrival_when_others_are_more_urgent() -> None:
    queue = make_queue("priority")
    older, younger = make_request(1, priority=9), make_request(2, priority=8)
    protect_by_turn(queue, younger)
    protect_by_turn(queue, older)
    ranks = [queue.rank(request) for request in (older, younger, make_request(3, priority=-100))]
    assert ranks == sorted(ranks)


def test_protected_request_takes_no_turn_from_others_when_it_comes_back() -> None:
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
