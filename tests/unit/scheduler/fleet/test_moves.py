"""A request that waits at one executor may begin at another."""

from __future__ import annotations

import pytest

from scheduler_service.core.admission_blocker import AdmissionBlocker
from scheduler_service.fleet.moves import has_waited, to_be_moved
from tests.unit.scheduler.core.test_cost_of_a_step import num_lines
from tests.unit.scheduler.fleet.queued_fleet import ONE_ROW, Fleet

MS = 1_000_000


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
    assert cores[1].openings.what_lacks(waiting) is AdmissionBlocker.BLOCKS
    assert waiting.sequence.block_hashes == hashes
    with pytest.raises(AssertionError, match="another engine's"):
        cores[1].num_cached_tokens(waiting)


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
    assert sorted(fleet.taken_back) == ["urgent", "usual"]


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


# -- what an arrival costs -------------------------------------------------------------------------


def lines_of_an_arrival(num_cores: int, *, is_passed_over: bool) -> int:
    """Lines that run for an urgent arrival where requests wait at every core, and all are open.

    `is_passed_over`: they wait although a step was planned since.
    """
    fleet = Fleet(*[{"num_device_blocks": 400}] * num_cores, policy="priority")
    for number, driver in enumerate(fleet.drivers):
        driver.core.tick(1)
        driver.num_requests = 10 * number
        driver.add(3, f"a{number}")
        driver.add(3, f"b{number}")
        if is_passed_over:
            driver.core.openings.step_planned({})
        assert driver.core.openings.is_open
    fleet.dispatch()
    fleet.now_ns = 200 * MS
    fleet.num_requests = 10 * num_cores
    fleet.push("arrival", priority=-1)
    return num_lines(fleet.dispatch)


@pytest.mark.parametrize("is_passed_over", [False, True])
def test_arrival_costs_in_proportion_to_the_executors_when_requests_wait_at_all(
    *, is_passed_over: bool
) -> None:
    few, many, most = (
        lines_of_an_arrival(number, is_passed_over=is_passed_over) for number in (16, 32, 64)
    )
    assert most - many <= 2.2 * (many - few)


def test_request_that_was_just_given_does_not_move_before_its_step_is_planned() -> None:
    fleet = Fleet({}, {})
    fleet.now_ns = MS
    for driver in fleet.drivers:
        driver.core.tick(fleet.now_ns)
        driver.core.openings.step_planned({})
        driver.core.tick(fleet.now_ns + 1)
    fleet.push("a")
    ((_, giver),) = fleet.dispatch()
    cores = [driver.core for driver in fleet.drivers]
    taker = cores[1 - giver]
    assert to_be_moved(100 * MS, taker, cores) is None
    assert not has_waited(cores[giver], 100 * MS)
    # Its executor takes very long for a step.
    assert to_be_moved(2000 * MS, taker, cores) == (cores[giver], "a")
    assert has_waited(cores[giver], 2000 * MS)
