"""One queue for all executors: policies hold across them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from scheduler_service.core.config import Feature
from scheduler_service.core.planning.room import Lack
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.fleet.fleet_queue import FleetQueue
from scheduler_service.fleet.host_state import Host, HostState
from scheduler_service.fleet.moves import to_be_moved
from scheduler_service.fleet.router import Choice, LeastLoaded
from tests.support.core.driver import CoreDriver

MS = 1_000_000


class Fleet:
    """Some cores, a queue before them, and a clock."""

    def __init__(
        self,
        *cores: Mapping[str, object],
        policy: str = "fcfs",
        weights: Mapping[str, float] | None = None,
    ) -> None:
        named: dict[str, Any] = {"queue_policy": policy, "tenant_weights": weights or {}}
        self.drivers = [CoreDriver(**(named | dict(core))) for core in cores]
        self.queue = FleetQueue(policy, weights or {})
        self.now_ns = 0
        self.num_requests = 0
        self.taken_back: list[str] = []

    def push(
        self, name: str, prompt: int = 3, *, max_tokens: int = 50, **scheduling: object
    ) -> Request:
        """A request waits for an executor."""
        self.num_requests += 1
        request = Request.create(
            name,
            [1 + at % 90 for at in range(prompt)],
            self.drivers[0].make_request(1, max_tokens=max_tokens, ignore_eos=True).params,
            arrival=self.num_requests,
            seed=0,
            scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
        )
        self.queue.push(request)
        return request

    def dispatch(self) -> list[tuple[str, int]]:
        """What goes where now, by the number of the core."""
        cores = [driver.core for driver in self.drivers]
        given = []
        for request, host in self.queue.dispatch(self.now_ns, cores, None, self.take_back):
            number = next(i for i, core in enumerate(cores) if core is host)
            cores[number].readmit(request)
            given.append((request.request_id, number))
        return given

    def take_back(self, host: Host, name: str) -> None:
        """A request that waits at a core waits for any of them."""
        core = next(driver.core for driver in self.drivers if driver.core is host)
        request = core.withdraw(name)
        assert request is not None
        self.queue.push(request)
        self.taken_back.append(name)

    def step(self) -> list[tuple[str, int]]:
        """Every core makes a step, whose tokens are charged; then what goes where."""
        for driver in self.drivers:
            if driver.plan() is not None:
                events = driver.answer()
                self.queue.charge(events.num_sampled)
        return self.dispatch()

    def end(self, name: str) -> None:
        """A request ends, wherever it runs."""
        ended = [driver.core.abort(name) for driver in self.drivers]
        assert any(ended)
        self.queue.forget(name)


ONE_ROW = {"max_num_seqs": 1}


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
    assert [request.request_id for request, _ in fleet.queue.dispatch(901, cores)] == ["waits"]


def test_request_that_was_admitted_before_pays_once() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW, policy="fair")
    fleet.push("a", 60, tenant="a")
    ((_, number),) = fleet.dispatch()
    (moved,) = fleet.drivers[number].core.evacuate()
    fleet.drivers.pop(number)
    fleet.queue.push(moved)
    fleet.push("later", tenant="a")
    fleet.push("b", tenant="b")
    assert fleet.dispatch() == [("a", 0)]
    fleet.end("a")
    fleet.drivers[0].plan()
    # Tenant b was put level with a, which did not pay again.
    assert fleet.dispatch() == [("later", 0)]


def test_waiting_request_moves_when_another_executor_would_begin_it_sooner() -> None:
    fleet = Fleet({"num_device_blocks": 16}, {"num_device_blocks": 16})
    fleet.push("a", 20, max_tokens=30)
    fleet.push("b", 20, max_tokens=30)
    fleet.dispatch()
    fleet.step()
    victim = fleet.drivers[0].core.placement.rows.sequence(0).request
    fleet.drivers[0].preempt(victim)
    cores = [driver.core for driver in fleet.drivers]
    assert to_be_moved(1_000, cores[1], cores) is None
    found = to_be_moved(20_000_000, cores[1], cores)
    assert found == (cores[0], victim.request_id)
    moved = cores[0].withdraw(victim.request_id)
    assert moved is not None
    assert len(moved.sequence.token_ids) == 21
    fleet.queue.push(moved)
    del fleet.drivers[0]
    assert fleet.dispatch() == [(victim.request_id, 0)]


def test_request_is_not_moved_while_a_step_in_flight_concerns_it() -> None:
    fleet = Fleet(ONE_ROW, ONE_ROW)
    request = fleet.push("a")
    ((_, number),) = fleet.dispatch()
    driver, taker = fleet.drivers[number], fleet.drivers[1 - number].core
    driver.plan()
    driver.preempt(request)
    late_ns, cores = 10**12, [each.core for each in fleet.drivers]
    assert to_be_moved(late_ns, taker, cores) is None
    driver.answer()
    assert to_be_moved(late_ns, taker, cores) == (driver.core, "a")


def fleet_where_two_wait_at_a_busy_host(policy: str = "priority") -> Fleet:
    """`urgent` and `usual` wait at one host, `first` runs at the other, and `later` anywhere."""
    fleet = Fleet(ONE_ROW, ONE_ROW, policy=policy)
    fleet.push("first", priority=-5)
    fleet.push("usual")
    fleet.dispatch()
    fleet.step()
    fleet.push("urgent", priority=-3)
    fleet.push("most urgent", priority=-4)
    fleet.step()
    fleet.step()
    fleet.push("later", priority=1)
    fleet.dispatch()
    fleet.now_ns += 10 * MS
    return fleet


def test_request_begins_elsewhere_before_those_that_go_after_it_when_its_host_is_busy() -> None:
    fleet = fleet_where_two_wait_at_a_busy_host()
    assert fleet.dispatch() == []
    begun = []
    for ended in ("first", "urgent", "usual"):
        fleet.end(ended)
        begun += [name for name, _ in fleet.dispatch()]
        fleet.step()
    assert begun == ["urgent", "usual", "later"]
    assert fleet.taken_back == ["urgent", "usual"]


def test_request_is_not_taken_back_when_whoever_is_next_goes_before_it() -> None:
    fleet = fleet_where_two_wait_at_a_busy_host()
    fleet.push("new", priority=-4)
    fleet.end("first")
    assert [name for name, _ in fleet.dispatch()] == ["new"]
    assert fleet.taken_back == []


def test_request_is_not_taken_back_at_once() -> None:
    fleet = fleet_where_two_wait_at_a_busy_host()
    fleet.now_ns -= 5 * MS
    fleet.end("first")
    assert [name for name, _ in fleet.dispatch()] == ["later"]
    assert fleet.taken_back == []


def test_hashes_of_blocks_are_made_anew_where_blocks_are_of_another_size() -> None:
    fleet = Fleet({"block_size": 4}, {"block_size": 8})
    request = fleet.push("a", 33)
    cores = [driver.core for driver in fleet.drivers]
    for core in cores:
        assert core.num_cached_tokens(request) == 0
    cores[0].readmit(request)
    fleet.drivers[0].step()
    again = fleet.push("b", 33)
    assert [core.num_cached_tokens(again) for core in cores] == [32, 0]
    assert [core.num_cached_tokens(again) for core in reversed(cores)] == [0, 32]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
@pytest.mark.parametrize("is_there", [True, False])
def test_requests_that_fit_elsewhere_hold_up_nobody(policy: str, is_there: bool) -> None:
    fleet = Fleet({"num_device_blocks": 4}, {"num_device_blocks": 64, **ONE_ROW}, policy=policy)
    fleet.push("first", 100, max_tokens=90)
    assert fleet.dispatch() == [("first", 1)]
    fleet.step()
    # More than are passed where there is a lack of room.
    for number in range(20):
        fleet.push(f"large{number}", 100, max_tokens=90)
    fleet.push("small", max_tokens=4)
    if not is_there:
        del fleet.drivers[1]
    assert fleet.dispatch() == [("small", 0)]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_any_number_of_requests_that_fit_elsewhere_hold_up_nobody_for_long(policy: str) -> None:
    fleet = Fleet({"num_device_blocks": 4}, {"num_device_blocks": 64, **ONE_ROW}, policy=policy)
    fleet.push("first", 100, max_tokens=90)
    assert fleet.dispatch() == [("first", 1)]
    fleet.step()
    for number in range(1000):
        fleet.push(f"large{number}", 100, max_tokens=90)
    fleet.push("small", max_tokens=4)
    given = fleet.dispatch()
    num_more = 0
    while fleet.queue.next_look_ns == 0:
        given += fleet.dispatch()
        num_more += 1
    assert given == [("small", 0)]
    assert num_more < 10
    # From now on that takes no time.
    fleet.push("small2", max_tokens=4)
    assert fleet.dispatch() == [("small2", 0)]
    assert fleet.queue.num_unfitting([fleet.drivers[0].core]) == 1000
    fleet.end("first")
    assert fleet.dispatch() == [("large0", 1)]


def test_who_fits_no_kind_of_hosts_is_asked_again_when_there_is_another_kind() -> None:
    fleet = Fleet({"num_device_blocks": 4}, {"num_device_blocks": 64}, {"num_device_blocks": 8})
    (_, large, middle) = fleet.drivers
    del fleet.drivers[1:]
    for number in range(10):
        fleet.push(f"large{number}", 100, max_tokens=90)
        fleet.push(f"middle{number}", 20, max_tokens=8)
    fleet.dispatch()
    assert fleet.queue.num_unfitting([fleet.drivers[0].core]) == 20

    fleet.drivers.append(middle)
    assert {name[:-1] for name, _ in fleet.dispatch()} == {"middle"}
    assert fleet.queue.num_unfitting([driver.core for driver in fleet.drivers]) == 10
    fleet.drivers.append(large)
    assert ("large0", 2) in fleet.dispatch()


def test_hashes_of_a_request_are_its_cores_when_another_is_asked_about_it() -> None:
    # Blocks are of different sizes, and the second has too few for what waits at the first.
    fleet = Fleet({"block_size": 4}, {"block_size": 8, "num_device_blocks": 10})
    cores = [driver.core for driver in fleet.drivers]
    waiting = fleet.drivers[0].add(40, max_tokens=20)
    fleet.drivers[1].add(50, max_tokens=20)
    for driver in fleet.drivers:
        driver.step()
    fleet.drivers[0].preempt(waiting)
    hashes = list(waiting.sequence.block_hashes)
    assert hashes
    assert to_be_moved(10**12, cores[1], cores) is None
    assert cores[1].openings.what_lacks(waiting) is Lack.BLOCKS
    assert waiting.sequence.block_hashes == hashes
    with pytest.raises(AssertionError, match="another core's"):
        cores[1].num_cached_tokens(waiting)


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
