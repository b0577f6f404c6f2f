"""Health of executors: whom failures are laid on, who is withdrawn, and who is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler import (
    FIRST_PROBE_NS,
    LAST_PROBE_NS,
    MAX_BLAME,
    MAX_FAILURES_IN_A_ROW,
    CircuitBreakers,
    ExecutorState,
    MoveReason,
)
from scheduler_service.scheduler.values import AssignedFor
from scheduler_service.watching import LifeKind, LifeRecorder
from splitserve.scheduler.v1 import scheduler_pb2 as api
from tests.support.core.machines import Fleet, Machine, turns

SICK, WELL = ("sick:1", 1), ("well:1", 1)


def blame(breakers: CircuitBreakers, *request_ids: str) -> None:
    """One failed step of these on the sick one, which the other computes."""
    breakers.failed(SICK, request_ids)
    breakers.succeeded(WELL, request_ids)


def test_breaker_opens_when_enough_failed_requests_succeed_elsewhere() -> None:
    breakers = CircuitBreakers()

    for number in range(int(MAX_BLAME) - 1):
        blame(breakers, f"r{number}")
    assert breakers.to_open == []
    blame(breakers, "last")

    assert breakers.to_open == [SICK]


def test_breaker_stays_closed_when_each_step_has_a_guilty_request() -> None:
    breakers = CircuitBreakers()

    for number in range(20):
        breakers.failed(SICK, [f"innocent{number}", f"guilty{number}"])
        breakers.succeeded(WELL, [f"innocent{number}"])
        breakers.ended(f"guilty{number}")

    assert breakers.to_open == []


def test_breaker_stays_closed_when_one_request_keeps_failing() -> None:
    breakers = CircuitBreakers()

    for _ in range(20):
        blame(breakers, "r1")

    assert breakers.to_open == []


@pytest.mark.parametrize(("period", "opens"), [(2, True), (5, True), (20, False)])
def test_breaker_opens_when_more_than_a_tenth_of_steps_fail(period: int, *, opens: bool) -> None:
    breakers = CircuitBreakers()

    for number in range(200):
        if number % period:
            breakers.succeeded(SICK, [f"other{number}"])
        else:
            blame(breakers, f"r{number}")

    assert (breakers.to_open == [SICK]) is opens


def test_executor_is_suspected_when_several_requests_fail_in_a_row() -> None:
    breakers = CircuitBreakers()

    for _ in range(10):
        breakers.failed(SICK, ["r0"])
    assert not breakers.is_suspected(SICK)
    for number in range(1, MAX_FAILURES_IN_A_ROW):
        breakers.failed(SICK, [f"r{number}"])
    assert breakers.is_suspected(SICK)
    breakers.succeeded(SICK, ["another"])

    assert not breakers.is_suspected(SICK)


def test_probes_come_later_each_time_when_they_fail() -> None:
    breakers = CircuitBreakers()
    now_ns, waits = 0, []

    breakers.open(SICK, now_ns)
    for _ in range(9):
        waits.append(breakers.probe_at_ns(SICK) - now_ns)
        now_ns = breakers.probe_at_ns(SICK)
        breakers.probe_failed(SICK, now_ns)

    assert waits[:4] == [FIRST_PROBE_NS * factor for factor in (1, 2, 4, 8)]
    assert waits[-1] == LAST_PROBE_NS
    assert breakers.is_open(SICK)


def test_breaker_waits_longer_when_it_opens_again_soon() -> None:
    breakers = CircuitBreakers()
    breakers.open(SICK, 0)
    breakers.probe_passed(SICK, FIRST_PROBE_NS)
    assert not breakers.is_open(SICK)

    breakers.open(SICK, 2 * FIRST_PROBE_NS)
    assert breakers.probe_at_ns(SICK) == 4 * FIRST_PROBE_NS
    breakers.probe_passed(SICK, 4 * FIRST_PROBE_NS)
    breakers.open(SICK, 10**15)

    assert breakers.probe_at_ns(SICK) == 10**15 + FIRST_PROBE_NS


def test_nothing_is_remembered_of_requests_when_all_have_ended() -> None:
    breakers = CircuitBreakers()

    breakers.failed(SICK, ["r1", "r2"])
    assert not breakers.is_quiet(WELL)
    breakers.succeeded(WELL, ["r1"])
    breakers.ended("r2")

    assert breakers.is_quiet(WELL)
    assert breakers.failed_at("r1") == breakers.failed_at("r2") == ()


KINDS = ("fails", "is_not_a_number", "says_no_tokens")


def engine_of(fleet: Fleet, machine: Machine) -> ExecutorState:
    return next(e for e in fleet.cluster.executors if e.life[0] == machine.address)


async def step(fleet: Fleet, machines: Sequence[Machine]) -> None:
    """A result of each; who was withdrawn joins again, as executors do."""
    for machine in machines:
        if machine.link is not None:
            machine.link.release()
    await turns()
    known = {engine.life[0] for engine in fleet.cluster.executors}
    for machine in machines:
        if machine.address not in known:
            await fleet.join(machine)


async def finishes(fleet: Fleet, machines: Sequence[Machine], count: int) -> dict[int, str]:
    """How so many requests end, by handle: the reason of an error, or nothing."""
    ends: dict[int, str] = {}
    pending = asyncio.create_task(fleet.next_events())
    for _ in range(2000):
        if pending.done():
            ends |= {event.handle: reason_of(event) for event in pending.result()}
            if len(ends) == count:
                return ends
            pending = asyncio.create_task(fleet.next_events())
        await step(fleet, machines)
    raise AssertionError(f"only {ends} ended")


def reason_of(event: api.SessionEvent) -> str:
    return event.finish.error.reason if event.finish.HasField("error") else ""


async def a_fleet(count: int) -> tuple[Fleet, list[Machine]]:
    fleet = Fleet(ClusterConfig())
    machines = [Machine(f"executor:{number}") for number in range(1, count + 1)]
    for machine in machines:
        await fleet.join(machine)
    return fleet, machines


@pytest.mark.parametrize(
    ("num_sick", "kind", "sick_every", "num_requests"),
    [
        *((num_sick, kind, 1, 37) for num_sick in (1, 2) for kind in KINDS),
        *((1, kind, every, 60) for every in (2, 3) for kind in KINDS[:2]),
        # Few steps fail, by chance.
        (0, "fails", 40, 90),
    ],
)
async def test_executors_are_withdrawn_when_many_of_their_steps_fail(
    num_sick: int, kind: str, sick_every: int, num_requests: int
) -> None:
    fleet, machines = await a_fleet(3)
    for machine in machines[: max(num_sick, 1)]:
        machine.sick_every = sick_every
        setattr(machine, kind, True)
    fleet.submit(*range(1, num_requests + 1))

    ends = await finishes(fleet, machines, num_requests)

    assert set(ends.values()) == {""}
    states = [engine_of(fleet, machine).is_withdrawn for machine in machines]
    assert states == [True] * num_sick + [False] * (3 - num_sick)
    await fleet.cluster.drain(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_executor_is_taken_back_when_it_computes_a_probe(kind: str) -> None:
    fleet, machines = await a_fleet(2)
    sick = machines[0]
    setattr(sick, kind, True)
    fleet.submit(*range(1, 9))
    await finishes(fleet, machines, 8)
    for _ in range(20):  # another executor computes a probe first
        await step(fleet, machines)
    assert engine_of(fleet, sick).is_withdrawn

    for _ in range(3):  # it is tried in vain, each time later than before
        fleet.now_ns += 64 * FIRST_PROBE_NS
        fleet.cluster.look_again()
        for _ in range(20):
            await step(fleet, machines)
        assert engine_of(fleet, sick).is_withdrawn
    setattr(sick, kind, False)
    fleet.now_ns += 64 * FIRST_PROBE_NS
    fleet.cluster.look_again()
    for _ in range(20):
        await step(fleet, machines)

    assert engine_of(fleet, sick).takes_requests
    await fleet.cluster.drain(0)


async def test_life_says_where_a_request_failed_and_was_retried() -> None:
    recorders: list[LifeRecorder] = []

    def watcher(fleet: Fleet) -> LifeRecorder:
        recorders.append(LifeRecorder(100, lambda: fleet.now_ns))
        return recorders[0]

    fleet = Fleet(ClusterConfig(), watcher)
    machines = [Machine(f"executor:{number}") for number in (1, 2)]
    for machine in machines:
        await fleet.join(machine)
    machines[0].is_not_a_number = True
    fleet.submit(*range(1, 9))

    await finishes(fleet, machines, 8)

    lives = [[(e.kind, e.reason) for e in life.events] for life in recorders[0].ended]
    moved = (LifeKind.TAKEN_BACK, MoveReason.FAILED_THERE.value)
    life = next(life for life in lives if moved in life)
    given = next(each for each in life[life.index(moved) :] if each[0] is LifeKind.ASSIGNED)
    assert given == (LifeKind.ASSIGNED, AssignedFor.RETRIED.value)
    assert life[-1] == (LifeKind.ENDED, "length")
    await fleet.cluster.drain(0)


@pytest.mark.parametrize("guilt", ["guilty", "guilty_rows"])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_healthy_executors_stay_when_requests_fail_everywhere(guilt: str, count: int) -> None:
    fleet = Fleet(ClusterConfig())
    options: dict[str, Any] = {guilt: 5}
    machines = [Machine(f"executor:{number}", **options) for number in range(count)]
    for machine in machines:
        await fleet.join(machine)
    fleet.submit(*range(1, 41))

    ends = await finishes(fleet, machines, 40)

    reason = "INVALID_LOGITS" if guilt == "guilty_rows" else "EXECUTOR_LOST_REPEATEDLY"
    assert {handle: end for handle, end in ends.items() if end} == dict.fromkeys(
        range(5, 41, 5), reason
    )
    assert not any(engine.is_failing for engine in fleet.cluster.executors)
    assert not any(engine.is_withdrawn for engine in fleet.cluster.executors)
    await fleet.cluster.drain(0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_requests_end_by_name_when_every_executor_is_sick(kind: str, count: int) -> None:
    fleet, machines = await a_fleet(count)
    for machine in machines:
        setattr(machine, kind, True)
    fleet.submit(*range(1, 13))

    ends = await finishes(fleet, machines, 12)

    assert all(ends.values())
    assert any(engine.takes_requests for engine in fleet.cluster.executors)
    assert all(engine.is_failing for engine in fleet.cluster.executors)
    for machine in machines:
        setattr(machine, kind, False)
    fleet.now_ns += 64 * FIRST_PROBE_NS
    fleet.submit(13)
    assert await finishes(fleet, machines, 1) == {13: ""}
    await fleet.cluster.drain(0)
