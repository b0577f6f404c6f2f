"""Executors whose results are wrong are withdrawn, and no request fails for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.circuit_breaker import FIRST_PROBE_NS
from scheduler_service.scheduler.effects import MoveReason
from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.scheduler.values.admission import AssignedFor
from scheduler_service.watching.life import LifeKind
from scheduler_service.watching.life_recorder import LifeRecorder
from splitserve.scheduler.v1 import scheduler_pb2 as api
from tests.support.core.machines import Machine
from tests.support.core.stepped_fleet import Fleet, turns

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


@pytest.mark.parametrize("num_sick", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_request_fails_and_the_executor_is_withdrawn_when_all_its_results_are_wrong(
    kind: str, num_sick: int
) -> None:
    fleet, machines = await a_fleet(3)
    for machine in machines[:num_sick]:
        setattr(machine, kind, True)
    fleet.submit(*range(1, 38))

    ends = await finishes(fleet, machines, 37)

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


async def test_life_of_a_request_says_where_it_failed_and_where_it_was_retried() -> None:
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
    given = next(each for each in life[life.index(moved) :] if each[0] is LifeKind.GIVEN)
    assert given == (LifeKind.GIVEN, AssignedFor.RETRIED.value)
    assert life[-1] == (LifeKind.ENDED, "length")
    await fleet.cluster.drain(0)


@pytest.mark.parametrize("sick_every", [2, 3])
@pytest.mark.parametrize("kind", ["fails", "is_not_a_number"])
async def test_executor_is_withdrawn_when_a_part_of_its_steps_fails(
    kind: str, sick_every: int
) -> None:
    fleet, machines = await a_fleet(3)
    machines[0].sick_every = sick_every
    setattr(machines[0], kind, True)
    fleet.submit(*range(1, 61))

    ends = await finishes(fleet, machines, 60)

    assert set(ends.values()) == {""}
    assert engine_of(fleet, machines[0]).is_withdrawn
    assert not any(engine_of(fleet, machine).is_withdrawn for machine in machines[1:])
    await fleet.cluster.drain(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_go_on_elsewhere_when_an_executor_becomes_sick_under_them(kind: str) -> None:
    fleet, machines = await a_fleet(3)
    fleet.submit(*range(1, 13))
    for _ in range(3):
        await step(fleet, machines)
    setattr(machines[1], kind, True)
    fleet.submit(*range(13, 31))

    ends = await finishes(fleet, machines, 30)

    assert set(ends.values()) == {""}
    assert engine_of(fleet, machines[1]).is_withdrawn
    await fleet.cluster.drain(0)


async def test_executor_stays_when_a_few_steps_fail_by_chance() -> None:
    fleet, machines = await a_fleet(3)
    machines[0].fails, machines[0].sick_every = True, 40
    fleet.submit(*range(1, 91))

    ends = await finishes(fleet, machines, 90)

    assert set(ends.values()) == {""}
    assert not any(engine.is_withdrawn for engine in fleet.cluster.executors)
    await fleet.cluster.drain(0)


@pytest.mark.parametrize("guilt", ["guilty", "guilty_rows"])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_healthy_executors_stay_when_requests_fail_everywhere(guilt: str, count: int) -> None:
    fleet = Fleet(ClusterConfig())
    machines = [Machine(f"executor:{number}", **{guilt: 5}) for number in range(count)]
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
