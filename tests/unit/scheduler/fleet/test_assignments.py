"""What is told of why a request went to one executor and to no other."""

from __future__ import annotations

import pytest

from scheduler_service.assignment import AssignedFor
from tests.unit.scheduler.fleet.prefix_fleet import LONG, SYSTEM, BusyHolder, PrefixFleet
from tests.unit.scheduler.fleet.queued_fleet import ONE_ROW, Fleet


def test_more_in_the_cache_decided_when_that_is_what_differs() -> None:
    fleet = PrefixFleet({}, {})
    fleet.compute(1, SYSTEM)
    fleet.push([*SYSTEM, 50, 51])
    assert fleet.dispatch() == {"r1": 1}

    given = fleet.assignments["r1"]
    assert given.why is AssignedFor.MOST_CACHED
    assert given.num_cached == len(SYSTEM)
    assert given.num_cached_elsewhere == 0
    assert given.cost_us is not None
    assert given.cost_elsewhere_us is not None
    # 40 tokens more, of a millisecond each, which count for more than those that only wait.
    assert given.cost_elsewhere_us - given.cost_us == pytest.approx(40_000 * 1.25, rel=0.01)


def test_less_before_it_decided_when_nobody_has_its_prefix() -> None:
    fleet = PrefixFleet({}, {})
    fleet.begin(0, [88] * 100)
    fleet.push([5] * 20)
    assert fleet.dispatch() == {"r1": 1}
    given = fleet.assignments["r1"]
    assert (given.why, given.num_ahead, given.num_running) == (AssignedFor.SOONEST, 0, 0)


def test_nothing_decided_when_executors_are_alike_or_there_is_one() -> None:
    fleet = PrefixFleet({}, {})
    fleet.push(SYSTEM)
    fleet.dispatch()
    assert fleet.assignments["r1"].why is AssignedFor.AS_GOOD
    alone = PrefixFleet({})
    alone.begin(0, [88] * 20)
    alone.push(SYSTEM)
    alone.dispatch()
    given = alone.assignments["r1"]
    assert (given.why, given.num_running) == (AssignedFor.ONLY_ONE, 1)
    assert given.cost_elsewhere_us is None


def test_waiting_for_a_better_one_is_told_when_it_was_in_vain_and_while_it_lasts() -> None:
    fleet = BusyHolder()
    fleet.push([*LONG, 50])
    assert fleet.dispatch() == {}
    ((_, hindrances),) = fleet.queue.heads(0, [driver.core for driver in fleet.drivers])
    assert [why.value for _, why in hindrances] == ["budget", "awaits_better"]

    fleet.now_ns = 10**12
    assert fleet.dispatch() == {"r1": 1}
    given = fleet.assignments["r1"]
    assert given.why is AssignedFor.WAITED_LONG_ENOUGH
    assert given.num_cached_elsewhere == len(LONG)


def test_better_one_that_is_busy_is_told_when_it_is_not_worth_waiting() -> None:
    fleet = BusyHolder()
    fleet.push([*LONG[:90], 50])
    assert fleet.dispatch() == {"r1": 1}
    given = fleet.assignments["r1"]
    assert (given.why, given.num_cached_elsewhere) == (AssignedFor.BETTER_IS_BUSY, 88)
    assert given.cost_us is not None
    assert given.cost_elsewhere_us is not None
    assert 0.8 * given.cost_us < given.cost_elsewhere_us < given.cost_us


def test_lack_of_room_decided_when_it_waits_for_it_or_goes_elsewhere() -> None:
    small_pool = {"num_device_blocks": 32}
    fleet = PrefixFleet(small_pool, small_pool)
    for number in (0, 1):
        fleet.begin(number, [70 + number] * 60)
    fleet.push([5] * 74)
    assert len(fleet.dispatch()) == 1
    assert fleet.assignments["r1"].why is AssignedFor.NO_ROOM_ANYWHERE

    filled = PrefixFleet(small_pool, small_pool)
    filled.compute(0, SYSTEM)
    filled.begin(0, [77] * 60)
    filled.push([*SYSTEM, *[50] * 34])
    assert filled.dispatch() == {"r1": 1}
    assert filled.assignments["r1"].why is AssignedFor.BETTER_LACKS_ROOM


def test_less_urgent_ones_decided_when_they_make_room() -> None:
    fleet = Fleet(ONE_ROW, policy="priority")
    fleet.push("ordinary", max_tokens=50)
    fleet.dispatch()
    fleet.step()
    fleet.push("urgent", priority=-3)
    assert fleet.dispatch() == [("urgent", 0)]
    assert fleet.assignments["urgent"].why is AssignedFor.OTHERS_YIELD
