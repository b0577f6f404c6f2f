"""What `RequestAssigned` says of why a request began at one executor and at no other."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.admission import AssignedFor, Assignment
from tests.unit.scheduler.scheduler.routed_fleet import (
    LONG,
    SYSTEM,
    RoutedFleet,
    busy_holder,
    measured,
)


def assignment_at(fleet: RoutedFleet, name: str, number: int) -> Assignment:
    """Why a request began at this executor."""
    assert (name, number) in fleet.begun()
    return fleet.assignments[name].assignment


def test_more_in_the_cache_decided_when_that_is_what_differs() -> None:
    fleet = measured({}, {})
    fleet.compute(1, SYSTEM)
    fleet.push("r1", [*SYSTEM, 50, 51])
    given = assignment_at(fleet, "r1", 1)
    assert given.why is AssignedFor.MOST_CACHED
    assert given.num_cached == len(SYSTEM)
    assert given.num_cached_elsewhere == 0
    assert given.cost_us is not None
    assert given.cost_elsewhere_us is not None
    # 40 tokens more, of a millisecond each, which count for more than those that only wait.
    assert given.cost_elsewhere_us - given.cost_us == pytest.approx(40_000 * 1.25, rel=0.01)


def test_less_before_it_decided_when_nobody_has_its_prefix() -> None:
    fleet = measured({}, {})
    fleet.begin(0, [88] * 100)
    fleet.push("r1", [5] * 20)
    given = assignment_at(fleet, "r1", 1)
    assert (given.why, given.num_running) == (AssignedFor.SOONEST, 0)


def test_nothing_decided_when_executors_are_alike() -> None:
    fleet = measured({}, {})
    fleet.push("r1", SYSTEM)
    fleet.begun()
    assert fleet.assignments["r1"].assignment.why is AssignedFor.AS_GOOD


def test_nothing_decided_when_there_is_one_executor() -> None:
    fleet = measured({})
    fleet.begin(0, [88] * 20)
    fleet.push("r1", SYSTEM)
    fleet.answer_at(0)
    given = assignment_at(fleet, "r1", 0)
    assert (given.why, given.num_running) == (AssignedFor.ONLY_ONE, 1)
    assert given.cost_elsewhere_us is None


def test_no_other_could_begin_it_when_the_better_one_lacks_room() -> None:
    fleet = measured({"max_num_seqs": 1}, {})
    fleet.compute(0, SYSTEM)
    fleet.begin(0, [77] * 60)
    fleet.push("r1", [*SYSTEM, 50])
    assert assignment_at(fleet, "r1", 1).why is AssignedFor.ONLY_ONE


def test_waiting_for_a_better_one_is_told_while_it_lasts() -> None:
    fleet = busy_holder()
    fleet.push("r1", [*LONG, 50])
    assert fleet.begun() == []
    ((_, blockers),) = fleet.scheduler.heads()
    assert blockers == [("executor:0", "awaits_better"), ("executor:1", "awaits_better")]


def test_waiting_for_a_better_one_is_told_when_it_was_in_vain() -> None:
    fleet = busy_holder()
    fleet.push("r1", [*LONG, 50])
    assert fleet.begun() == []
    fleet.now_ns = 10**12
    given = assignment_at(fleet, "r1", 1)
    assert given.why is AssignedFor.WAITED_LONG_ENOUGH
    assert given.num_cached_elsewhere == len(LONG)


def test_better_one_that_is_busy_is_told_when_it_is_not_worth_waiting() -> None:
    fleet = busy_holder()
    fleet.push("r1", [*LONG[:76], 50])
    given = assignment_at(fleet, "r1", 1)
    assert (given.why, given.num_cached_elsewhere) == (AssignedFor.BETTER_IS_BUSY, 76)
    assert given.cost_us is not None
    assert given.cost_elsewhere_us is not None
    assert 0.8 * given.cost_us < given.cost_elsewhere_us < given.cost_us


def test_lack_of_room_is_told_when_it_waited_for_that_at_its_executor() -> None:
    small_pool = {"num_device_blocks": 32}
    fleet = measured(small_pool, small_pool)
    begun = [fleet.begin(number, [70 + number] * 60) for number in (0, 1)]
    fleet.push("r1", [5] * 74)
    fleet.step()
    ((_, blockers),) = fleet.scheduler.heads()
    assert [blocker for _, blocker in blockers] == ["blocks", "blocks"]
    fleet.abort(begun[1])
    fleet.answer_at(1)
    assert assignment_at(fleet, "r1", 1).why is AssignedFor.NO_ROOM_ANYWHERE
