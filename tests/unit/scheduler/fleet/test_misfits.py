"""Requests that fit not every executor wait, and hold up nobody."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.fleet.queued_fleet import ONE_ROW, Fleet


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


def test_nobody_is_looked_for_again_and_again_when_all_who_were_left_over_are_gone() -> None:
    fleet = Fleet({"num_device_blocks": 4})
    names = [fleet.push(f"large{number}", 100, max_tokens=90).request_id for number in range(1000)]
    fleet.dispatch()
    assert fleet.queue.next_look_ns == 0
    for name in names:
        fleet.queue.forget(name)
    fleet.dispatch()
    assert fleet.queue.next_look_ns is None


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
