"""Fair shares, rule by rule."""

from __future__ import annotations

import pickle
from functools import partial

from scheduler_service.core.policies.fair_share import FairSharePolicy
from scheduler_service.core.policies.queue_policy import make_queue_policy
from scheduler_service.core.request import FinishReason
from tests.support.core.policy_driver import admit, admit_next, make_policy, make_request, order


def test_fair_serves_the_tenant_that_was_served_least_when_several_wait() -> None:
    waiting = [make_request(a, tenant="a") for a in range(1, 4)]
    waiting += [make_request(a, tenant="b") for a in range(4, 7)]
    policy = make_policy("fair", waiting)
    admissions = [admit_next(policy, 10).arrival for _ in range(3)]
    policy.sampled("b", 10)
    admissions += [admit_next(policy, 10).arrival for _ in range(2)]
    assert admissions == [1, 4, 2, 3, 5]


def test_fair_counts_output_tokens_twice_when_they_are_sampled() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("aabb", start=1)]
    policy = make_policy("fair", waiting)
    admit_next(policy, 0)
    policy.sampled("a", 4)
    assert admit_next(policy, 7).scheduling.tenant == "b"
    assert admit_next(policy, 2).scheduling.tenant == "b"
    assert admit_next(policy, 0).scheduling.tenant == "a"


def test_fair_divides_by_the_weight_when_a_tenant_has_one() -> None:
    policy = make_queue_policy("fair", {"a": 3})
    for arrival in range(1, 17):
        policy.push(make_request(arrival, tenant="ab"[arrival % 2]))
    tenants = [admit_next(policy, 6).scheduling.tenant for _ in range(8)]
    assert (tenants.count("a"), tenants.count("b")) == (6, 2)


def test_fair_tries_everybodys_first_request_before_anybodys_second_when_none_can_run() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("aabbca", start=1)]
    policy = make_policy("fair", waiting)
    policy.sampled("a", 1)
    assert order(policy) == [3, 5, 1, 4, 2, 6]


def test_fair_goes_on_with_the_new_counter_when_a_candidate_was_admitted() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("aaabb", start=1)]
    policy = make_policy("fair", waiting)
    yielded = []
    for request in policy.candidates():
        yielded.append(request.arrival)
        if request.arrival != 4:
            admit(policy, request, 2)
    assert yielded == [1, 4, 2, 3, 5]


def test_fair_orders_tenants_by_their_first_request_of_an_open_lane_when_they_are_level() -> None:
    arrivals = [("a", "x"), ("b", "y"), ("b", ""), ("a", "x"), ("a", "y"), ("a", "")]
    policy = make_policy(
        "fair",
        [
            make_request(arrival, tenant=tenant, adapter=adapter)
            for arrival, (tenant, adapter) in enumerate(arrivals, start=1)
        ],
    )
    for lanes, arrivals_in_order in [({""}, [3, 6]), ({"", "y"}, [2, 5, 3, 6]), ({"z"}, [])]:
        candidates = policy.candidates(0, partial(set, lanes))
        assert [request.arrival for request in candidates] == arrivals_in_order


def test_fair_gives_no_credit_when_a_tenant_asked_for_nothing() -> None:
    policy = make_policy("fair", [make_request(1, tenant="busy"), make_request(2, tenant="busy")])
    admit_next(policy, 1000)
    for arrival in (3, 4):
        policy.push(make_request(arrival, tenant="idle"))
    assert [admit_next(policy, 10).scheduling.tenant for _ in range(2)] == ["busy", "idle"]


def test_fair_lifts_to_the_last_tenant_that_waited_when_nobody_waits() -> None:
    policy = make_policy("fair", [make_request(1, tenant="busy")])
    admit_next(policy, 1000)
    for arrival, tenant in ((2, "idle"), (3, "busy"), (4, "idle")):
        policy.push(make_request(arrival, tenant=tenant))
    assert [admit_next(policy, 10).arrival for _ in range(3)] == [2, 3, 4]


def test_fair_never_lowers_a_counter_when_a_tenant_comes_back() -> None:
    policy = make_policy("fair", [make_request(1, tenant="a"), make_request(2, tenant="b")])
    admit_next(policy, 1000)
    policy.push(make_request(3, tenant="a"))
    policy.push(make_request(4, tenant="b"))
    assert order(policy) == [2, 3, 4]


def test_fair_charges_a_request_once_when_it_is_preempted() -> None:
    waiting = [make_request(a, tenant=tenant) for a, tenant in enumerate("abab", start=1)]
    policy = make_policy("fair", waiting)
    preempted, _ = admit_next(policy, 10), admit_next(policy, 15)
    policy.push(preempted)
    assert admit_next(policy, 500) is preempted
    assert order(policy) == [3, 4]


def test_fair_remembers_a_tenant_when_it_was_served_more_than_those_who_wait() -> None:
    policy = FairSharePolicy({})
    for arrival, tenant in ((1, "a"), (3, "b")):
        policy.push(make_request(arrival, tenant=tenant))
    admit_next(policy, 1).finish_reason = FinishReason.STOP
    policy.forget_idle_tenants()
    policy.push(make_request(2, tenant="a"))
    assert order(policy) == [3, 2]


def test_fair_remembers_a_tenant_when_it_has_a_running_request() -> None:
    policy = FairSharePolicy({})
    for arrival, tenant in ((1, "a"), (3, "b"), (4, "b")):
        policy.push(make_request(arrival, tenant=tenant))
    admit_next(policy, 5)
    admit_next(policy, 8)
    policy.forget_idle_tenants()
    policy.sampled("a", 2)
    policy.push(make_request(2, tenant="a"))
    assert order(policy) == [4, 2]


def test_fair_forgets_tenants_when_they_have_no_request() -> None:
    policy = FairSharePolicy({}, max_idle_tenants=50)
    sizes: list[int] = []
    for arrival in range(2000):
        request = make_request(arrival, tenant=f"t{arrival}")
        policy.push(request)
        if arrival >= 10:
            admitted = admit_next(policy, 10)
            admitted.finish_reason = FinishReason.STOP
        if arrival % 7 == 0:
            sizes.append(len(pickle.dumps(policy)))
    assert len(policy) == 10
    assert max(sizes[25:]) < 1.1 * max(sizes[:25])
