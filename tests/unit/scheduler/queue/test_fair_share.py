"""Fair shares, rule by rule."""

from __future__ import annotations

import pickle

from scheduler_service.scheduler.queue.ordered_queue import OpenLanes
from scheduler_service.scheduler.queue.queue_policy import FairShare
from scheduler_service.scheduler.queue.waiting_queue import WaitingQueue
from tests.support.core.queue_driver import admit_next, end, make_queue, make_request, order


def test_fair_serves_the_tenant_that_was_served_least_when_several_wait() -> None:
    waiting = [make_request(a, tenant="a") for a in range(1, 4)]
    waiting += [make_request(a, tenant="b") for a in range(4, 7)]
    queue = make_queue("fair", waiting)
    admissions = [admit_next(queue, 10).arrival for _ in range(3)]
    queue.charge({"b": 10})
    admissions += [admit_next(queue, 10).arrival for _ in range(2)]
    assert admissions == [1, 4, 2, 3, 5]


def test_fair_counts_output_tokens_twice_when_they_are_sampled() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("aabb", start=1)]
    queue = make_queue("fair", waiting)
    admit_next(queue, 0)
    queue.charge({"a": 4})
    assert admit_next(queue, 7).scheduling.tenant == "b"
    assert admit_next(queue, 2).scheduling.tenant == "b"
    assert admit_next(queue, 0).scheduling.tenant == "a"


def test_fair_divides_by_the_weight_when_a_tenant_has_one() -> None:
    queue = make_queue("fair", weights={"a": 3})
    for arrival in range(1, 17):
        queue.push(make_request(arrival, tenant="ab"[arrival % 2]))
    tenants = [admit_next(queue, 6).scheduling.tenant for _ in range(8)]
    assert (tenants.count("a"), tenants.count("b")) == (6, 2)


def test_fair_tries_everybodys_first_request_before_anybodys_second_when_none_can_run() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("aabbca", start=1)]
    queue = make_queue("fair", waiting)
    queue.charge({"a": 1})
    assert order(queue) == [3, 5, 1, 4, 2, 6]


def test_fair_goes_on_with_the_new_counter_when_a_candidate_was_admitted() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("aaabb", start=1)]
    queue = make_queue("fair", waiting)
    yielded = []
    for request in queue.candidates():
        yielded.append(request.arrival)
        if request.arrival != 4:
            queue.begun(request, 2)
    assert yielded == [1, 4, 2, 3, 5]


def test_fair_orders_tenants_by_their_first_request_of_an_open_lane_when_they_are_level() -> None:
    arrivals = [("a", "x"), ("b", "y"), ("b", ""), ("a", "x"), ("a", "y"), ("a", "")]
    queue = make_queue(
        "fair",
        [
            make_request(arrival, tenant=tenant, adapter=adapter)
            for arrival, (tenant, adapter) in enumerate(arrivals, start=1)
        ],
    )
    for lanes, arrivals_in_order in [({""}, [3, 6]), ({"", "y"}, [2, 5, 3, 6]), ({"z"}, [])]:
        candidates = queue.candidates(OpenLanes(adapters=lanes))
        assert [request.arrival for request in candidates] == arrivals_in_order


def test_fair_gives_no_credit_when_a_tenant_asked_for_nothing() -> None:
    queue = make_queue("fair", [make_request(1, tenant="busy"), make_request(2, tenant="busy")])
    admit_next(queue, 1000)
    for arrival in (3, 4):
        queue.push(make_request(arrival, tenant="idle"))
    assert [admit_next(queue, 10).scheduling.tenant for _ in range(2)] == ["busy", "idle"]


def test_fair_lifts_to_the_last_tenant_that_waited_when_nobody_waits() -> None:
    queue = make_queue("fair", [make_request(1, tenant="busy")])
    admit_next(queue, 1000)
    for arrival, tenant in ((2, "idle"), (3, "busy"), (4, "idle")):
        queue.push(make_request(arrival, tenant=tenant))
    assert [admit_next(queue, 10).arrival for _ in range(3)] == [2, 3, 4]


def test_fair_never_lowers_a_counter_when_a_tenant_comes_back() -> None:
    queue = make_queue("fair", [make_request(1, tenant="a"), make_request(2, tenant="b")])
    admit_next(queue, 1000)
    queue.push(make_request(3, tenant="a"))
    queue.push(make_request(4, tenant="b"))
    assert order(queue) == [2, 3, 4]


def test_fair_charges_a_request_once_when_it_is_preempted() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("abab", start=1)]
    queue = make_queue("fair", waiting)
    preempted, _ = admit_next(queue, 10), admit_next(queue, 15)
    queue.push(preempted)
    assert admit_next(queue, 500) is preempted
    assert order(queue) == [3, 4]


def test_fair_remembers_a_tenant_when_it_was_served_more_than_those_who_wait() -> None:
    queue = make_queue("fair")
    for arrival, tenant in ((1, "a"), (3, "b")):
        queue.push(make_request(arrival, tenant=tenant))
    end(queue, admit_next(queue, 1))
    queue.forget_idle_tenants()
    queue.push(make_request(2, tenant="a"))
    assert order(queue) == [3, 2]


def test_fair_remembers_a_tenant_when_it_has_a_running_request() -> None:
    queue = make_queue("fair")
    for arrival, tenant in ((1, "a"), (3, "b"), (4, "b")):
        queue.push(make_request(arrival, tenant=tenant))
    admit_next(queue, 5)
    admit_next(queue, 8)
    queue.forget_idle_tenants()
    queue.charge({"a": 2})
    queue.push(make_request(2, tenant="a"))
    assert order(queue) == [4, 2]


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
