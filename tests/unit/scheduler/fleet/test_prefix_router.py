"""Whom the router of prefixes prefers, and how long a request waits for whoever that is."""

from __future__ import annotations

import pytest

from scheduler_service.fleet.fleet_queue import FleetQueue
from scheduler_service.fleet.holds import MAX_PASSED
from tests.unit.scheduler.fleet.prefix_fleet import (
    LONG,
    SYSTEM,
    TOKEN_NS,
    BusyHolder,
    PrefixFleet,
)


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_request_goes_where_its_prefix_is(holder: int) -> None:
    fleet = PrefixFleet({}, {}, {})
    fleet.compute(holder, SYSTEM)
    fleet.push([*SYSTEM, 50, 51])
    assert fleet.dispatch() == {"r1": holder}


def test_request_goes_elsewhere_when_those_that_run_there_cost_more_than_is_saved() -> None:
    fleet = PrefixFleet({}, {})
    fleet.compute(0, SYSTEM)
    for number in range(4):
        fleet.drivers[0].add([60 + number], max_tokens=100)
    fleet.drivers[0].step()
    fleet.push([*SYSTEM, 50, 51])
    assert fleet.dispatch() == {"r1": 1}


def test_request_goes_to_the_faster_executor_when_nobody_has_its_prefix() -> None:
    for speeds in ((1, 4), (4, 1)):
        fleet = PrefixFleet({}, {}, speeds=speeds)
        fleet.push(SYSTEM)
        assert fleet.dispatch() == {"r1": speeds.index(1)}


def test_longest_prefix_wins_when_block_sizes_differ() -> None:
    fleet = PrefixFleet({"block_size": 16}, {"block_size": 4})
    fleet.compute(0, SYSTEM)
    fleet.compute(1, SYSTEM[:28])
    fleet.push([*SYSTEM, 50, 51])
    fleet.push([*SYSTEM[:28], 50, 51])
    # 32 tokens at the first, and 28 at the second; then 16 and 28.
    assert fleet.dispatch() == {"r1": 0, "r2": 1}


def test_prefix_in_the_host_pool_counts() -> None:
    small = {"num_device_blocks": 30, "num_host_blocks": 64}
    fleet = PrefixFleet(small, small)
    fleet.compute(1, SYSTEM)
    fleet.compute(1, [77] * 118)
    core = fleet.drivers[1].core
    asked = fleet.push([*SYSTEM, 50, 51])
    hit = core.placement.blocks.prefixes.find(asked.sequence)
    assert hit.host_blocks
    assert fleet.dispatch() == {"r1": 1}


def test_request_goes_to_the_executor_with_blank_blocks_when_another_would_evict() -> None:
    fleet = PrefixFleet({"num_device_blocks": 32}, {"num_device_blocks": 32})
    fleet.compute(0, [77] * 100)
    fleet.push([*range(1, 60)])
    assert fleet.dispatch() == {"r1": 1}


def test_requests_that_arrive_together_meet_where_the_first_goes() -> None:
    fleet = PrefixFleet({}, {}, {})
    for last in (50, 51):
        fleet.push([*SYSTEM, last])
    where = fleet.dispatch()
    assert len(where) == 2
    assert len(set(where.values())) == 1


def test_family_has_a_home_that_is_the_same_in_the_next_life_of_a_fleet() -> None:
    homes = []
    for _ in range(2):
        fleet = PrefixFleet({}, {}, {}, {})
        lives: list[int] = []
        for family in range(12):
            fleet.push([family + 1] * 24)
            where = fleet.dispatch()
            lives += where.values()
            for name, number in where.items():
                fleet.drivers[number].core.abort(name)
                fleet.queue.forget(name)
                fleet.drivers[number].plan()
        homes.append(lives)
    assert homes[0] == homes[1]
    assert len(set(homes[0])) > 1


# -- waiting for a busy one ------------------------------------------------------------------------


def test_request_waits_for_a_busy_executor_when_that_saves_more() -> None:
    fleet = BusyHolder()
    fleet.push([*LONG, 50])
    assert fleet.dispatch() == {}
    fleet.open_holder()
    assert fleet.dispatch() == {"r1": 0}


def test_request_waits_no_longer_than_that_may_save() -> None:
    fleet = BusyHolder()
    request = fleet.push([*LONG, 50])
    assert fleet.dispatch() == {}
    better, other = fleet.queue.router.rank(request, fleet.queue.host_states)
    saved_ns = int(other.cost_ns - better.cost_ns)
    assert saved_ns > 50 * TOKEN_NS
    fleet.now_ns = saved_ns - 1
    assert fleet.dispatch() == {}
    fleet.now_ns = saved_ns + 1
    assert fleet.dispatch() == {"r1": 1}


def test_request_does_not_wait_for_a_busy_executor_when_others_are_as_good() -> None:
    fleet = BusyHolder()
    fleet.push([*LONG[:60], 50])
    assert fleet.dispatch() == {"r1": 1}


def test_others_begin_before_a_request_that_waits_but_not_many() -> None:
    fleet = BusyHolder()
    fleet.push([*LONG, 50])
    for number in range(MAX_PASSED + 2):
        fleet.push([60 + number])
    assert fleet.dispatch() == {f"r{number}": 1 for number in range(2, MAX_PASSED + 2)}
    assert next(iter(fleet.dispatch().items())) == ("r1", 1)


def test_urgent_request_does_not_wait_for_less_urgent_ones_that_wait() -> None:
    fleet = BusyHolder()
    fleet.queue = FleetQueue("priority", {})
    fleet.push([*LONG, 50])
    fleet.push([60], priority=1)
    assert fleet.dispatch() == {}
    fleet.push([61], priority=-1)
    assert fleet.dispatch() == {"r3": 1}
