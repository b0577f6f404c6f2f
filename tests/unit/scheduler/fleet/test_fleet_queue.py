"""One queue for all executors: policies hold across them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from scheduler_service.core.config import Feature
from scheduler_service.core.request import Request
from scheduler_service.fleet.fleet_queue import FleetQueue
from scheduler_service.fleet.host_state import HostState
from scheduler_service.fleet.router import Choice, LeastLoaded
from tests.unit.scheduler.fleet.queued_fleet import ONE_ROW, Fleet


def test_requests_wait_for_whichever_executor_is_free_first() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW)
    for name in "abcd":
        fleet.push(name)
    assert {name for name, _ in fleet.dispatch()} == {"a", "b"}
    assert fleet.step() == []
    assert len(fleet.queue) == 2
    at_second = next(iter(fleet.drivers[1].core.placement.requests))
    fleet.end(at_second)
    assert fleet.step() == [("c", 1)]


def test_first_come_is_first_served_across_executors() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW, ONE_ROW)
    for number in range(9):
        fleet.push(f"r{number}")
    served = [name for name, _ in fleet.dispatch()]
    while len(served) < 9:
        fleet.step()
        fleet.end(served[len(served) - 3])
        served += [name for name, _ in fleet.dispatch()]
    assert served == [f"r{number}" for number in range(9)]


def test_urgent_request_goes_before_all_that_wait_wherever_there_is_room() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW, policy="priority")
    fleet.push("a", priority=-1)
    fleet.push("b", priority=-1)
    fleet.dispatch()
    fleet.step()
    fleet.push("later")
    fleet.push("urgent", priority=-1)
    assert fleet.step() == []
    fleet.end("a")
    assert [name for name, _ in fleet.step()] == ["urgent"]


def test_urgent_request_goes_where_somebody_less_urgent_makes_way() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW, policy="priority")
    fleet.push("important", priority=-5)
    fleet.push("ordinary")
    where = dict(fleet.dispatch())
    fleet.step()
    fleet.push("urgent", priority=-3)
    assert fleet.dispatch() == [("urgent", where["ordinary"])]
    fleet.step()
    placement = fleet.drivers[where["ordinary"]].core.placement
    assert [s.request.request_id for s in placement.rows.running] == ["urgent"]


def test_tenant_has_its_share_of_all_executors_together() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW, policy="fair")
    for number in range(20):
        fleet.push(f"flood{number}", tenant="flood", max_tokens=4)
    for number in range(5):
        fleet.push(f"few{number}", tenant="few", max_tokens=4)
    order = [name for name, _ in fleet.dispatch()]
    while len(order) < 12:
        order += [name for name, _ in fleet.step()]
    # Both tenants ask for more than half: they get as much as the other.
    assert sum(name.startswith("few") for name in order[:10]) == 5


def test_tokens_count_for_a_tenant_whatever_executor_they_come_from() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW, policy="fair")
    fleet.push("a", tenant="one")
    fleet.dispatch()
    fleet.push("b", tenant="other")
    fleet.dispatch()
    fleet.push("a2", tenant="one")
    fleet.push("b2", tenant="other")
    fleet.step()
    # Only the executor of `a` goes on.
    first = next(d for d in fleet.drivers if "a" in d.core.placement.requests)
    for _ in range(5):
        first.plan()
        fleet.queue.charge(first.answer().num_sampled)
    fleet.end("a")
    assert fleet.step() == [("b2", fleet.drivers.index(first))]


def test_weights_of_tenants_may_change_while_requests_wait() -> None:
    fleet = Fleet(ONE_ROW, policy="fair")
    fleet.push("now", tenant="z")
    fleet.dispatch()
    for number in range(8):
        fleet.push(f"a{number}", 8, tenant="a", max_tokens=1)
        fleet.push(f"b{number}", 8, tenant="b", max_tokens=1)
    fleet.queue.weigh_tenants({"a": 3.0})
    fleet.end("now")
    order: list[str] = []
    while len(order) < 8:
        order += [name for name, _ in fleet.step()]
    assert sum(name.startswith("a") for name in order) == 6


def test_large_request_holds_up_one_executor_and_not_the_fleet() -> None:
    small_pool = {"num_device_blocks": 16}
    fleet = Fleet(small_pool, small_pool)
    fleet.push("x", 30, max_tokens=30)
    fleet.push("y", 30, max_tokens=30)
    fleet.dispatch()
    fleet.step()
    fleet.push("large", 40, max_tokens=5)
    for number in range(3):
        fleet.push(f"small{number}", max_tokens=5)
    given = dict(fleet.dispatch())
    for _ in range(10):
        given.update(fleet.step())
    # It waits at one of them, where no later one begins before it, and those go elsewhere.
    assert set(given) == {"large", "small0", "small1", "small2"}
    assert {given[f"small{number}"] for number in range(3)} == {1 - given["large"]}


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_all_requests_end_whatever_their_size(policy: str) -> None:
    fleet = Fleet({"num_device_blocks": 12}, {"num_device_blocks": 40}, ONE_ROW, policy=policy)
    for number in range(40):
        length = (3, 3, 30, 90)[number % 4]
        fleet.push(f"r{number}", length, max_tokens=4, tenant=f"t{number % 3}", priority=number % 2)
    ended: set[str] = set()
    fleet.dispatch()
    for _ in range(600):
        for driver in fleet.drivers:
            if driver.plan() is not None:
                ended.update(r.request_id for r in driver.answer().finished)
        fleet.dispatch()
    assert ended == {f"r{number}" for number in range(40)}
    assert len(fleet.queue) == 0


def test_request_ends_when_its_deadline_is_past_and_no_executor_is_there() -> None:
    fleet = Fleet(ONE_ROW, policy="deadline")
    late, lasting = fleet.push("late", deadline_ns=1_000), fleet.push("lasting")
    assert fleet.queue.next_look_ns == 1_000
    assert list(fleet.queue.take_overdue(1_000)) == []
    assert list(fleet.queue.dispatch(2_000, [])) == []
    for request in fleet.queue.take_overdue(2_000):
        fleet.queue.forget(request.request_id)
    assert late.error is not None
    assert late.error[0] == "DEADLINE_UNREACHABLE"
    assert not lasting.is_finished
    assert len(fleet.queue) == 1
    assert fleet.queue.next_look_ns is None


class FirstIsCheapest(LeastLoaded):
    """The first host would be worth waiting for."""

    def rank(self, request: Request, states: Sequence[HostState]) -> Iterator[Choice]:
        for state in sorted(states, key=lambda state: state.number):
            yield Choice(state, 1000.0 if state.number else 100.0)


def test_nobody_is_looked_at_again_and_again_when_its_wait_is_over_and_no_host_is_open() -> None:
    fleet = Fleet({"max_num_batched_tokens": 8}, ONE_ROW)
    fleet.queue = FleetQueue("fcfs", {}, FirstIsCheapest())
    cores = [driver.core for driver in fleet.drivers]
    fleet.push("long", 40)
    fleet.push("waits")
    assert fleet.dispatch() == [("long", 0)]
    assert fleet.queue.next_look_ns == 900

    assert list(fleet.queue.dispatch(900, cores[:1])) == []
    assert fleet.queue.next_look_ns is None
    assert [given.request.request_id for given in fleet.queue.dispatch(901, cores)] == ["waits"]


def test_executor_that_lacked_blocks_is_asked_again_when_it_has_more() -> None:
    fleet = Fleet({"num_device_blocks": 20}, {"num_device_blocks": 20})
    for name in "ab":
        fleet.push(name, 40, max_tokens=20)
    fleet.dispatch()
    fleet.step()
    for name in "cd":  # one waits at each
        fleet.push(name, 41, max_tokens=20, cache_salt=name)
    fleet.step()
    fleet.push("last", 42, max_tokens=20, cache_salt="last")
    assert fleet.step() == []
    fleet.end("a")
    fleet.end("c")
    assert [name for name, _ in fleet.step()] == ["last"]


def test_request_that_lacked_blocks_beside_others_begins_when_they_have_left() -> None:
    fleet = Fleet({"num_device_blocks": 20})
    for name, length in (("a", 40), ("b", 40), ("c", 50)):
        fleet.push(name, length, max_tokens=20, cache_salt=name)
    given = [name for name, _ in fleet.dispatch()]
    assert "c" not in given
    # Nothing had been allocated then: there are never more free blocks than there were.
    for _ in range(3):
        for name in given:
            fleet.end(name)
        given = [name for name, _ in fleet.step()]
        if not len(fleet.queue):
            break
    assert len(fleet.queue) == 0


def test_who_lacks_a_place_for_its_adapter_holds_up_nobody() -> None:
    features = frozenset({Feature.ADAPTERS})
    fleet = Fleet({"max_adapters": 1, "features": features})
    fleet.push("holder", adapter="a")
    fleet.dispatch()
    fleet.step()
    fleet.push("blocked", adapter="b")
    fleet.dispatch()
    fleet.step()
    fleet.push("plain")
    assert [name for name, _ in fleet.dispatch()] == ["plain"]
    fleet.step()
    placement = fleet.drivers[0].core.placement
    running = sorted(sequence.request.request_id for sequence in placement.rows.running)
    assert running == ["holder", "plain"]
