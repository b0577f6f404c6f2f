"""Tests which requests move, and when, while an executor is drained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.executors import Drained
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values import PreemptionCause
from splitserve_contract import DomainError
from tests.support.core.machines import Fleet, Machine, turns


async def test_requests_that_wait_go_at_once_and_those_that_run_stay() -> None:
    fleet = Fleet(ClusterConfig(max_num_seqs=2))
    going, staying = Machine("going:1"), Machine("staying:1")
    await fleet.join(going)
    fleet.submit(1, 2, 3)
    await turns()
    placement = fleet.cluster.executors[0].engine.placement
    placement.preempt(placement.requests["r2"], PreemptionCause.BLOCKS)
    assert fleet.requests_at(going) == ["r1", "r2"]
    draining = fleet.drain(going)
    await turns()
    assert fleet.requests_at(going) == ["r1"]
    assert fleet.cluster.scheduler.num_waiting == 2

    fleet.submit(4)
    await fleet.join(staying)
    assert fleet.requests_at(going) == ["r1"]
    await fleet.finish(going)
    assert await draining == Drained(num_moved=1)
    assert [engine.address for engine in fleet.cluster.executors] == ["staying:1"]
    await fleet.finish(staying)
    await fleet.finish(staying)
    await fleet.finish(staying)
    assert fleet.cluster.num_unfinished == 0
    await fleet.cluster.drain(0)


async def test_what_still_runs_goes_when_the_time_is_up() -> None:
    fleet, going, staying = Fleet(), Machine("going:1"), Machine("staying:1")
    await fleet.join(going)
    fleet.submit(1, 2)
    await turns()
    await fleet.join(staying)
    # Of two calls the shorter time counts.
    first, second = fleet.drain(going), fleet.drain(going, 0)
    assert await first == await second == Drained(num_moved=2)
    assert fleet.requests_at(staying) == ["r1", "r2"]
    # The time of the first is no alarm for anybody any more.
    await fleet.finish(staying)
    assert fleet.cluster.num_unfinished == 0
    assert await fleet.drain(going) == Drained()
    await fleet.cluster.drain(0)


async def test_new_life_is_served_when_the_old_one_drains() -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    await fleet.join(machine)
    fleet.submit(1)
    await turns()
    draining = fleet.drain(machine)
    await turns()
    machine.restart()
    await fleet.join(machine)
    assert (await draining).is_lost
    (engine,) = fleet.cluster.executors
    assert (engine.epoch, engine.is_draining) == (machine.epoch, False)
    await fleet.finish(machine)
    assert fleet.cluster.num_unfinished == 0
    await fleet.cluster.drain(0)


async def test_requests_move_when_a_draining_executor_is_lost() -> None:
    fleet, going, staying = Fleet(), Machine("going:1"), Machine("staying:1")
    await fleet.join(going)
    fleet.submit(1)
    await turns()
    draining = fleet.drain(going)
    await fleet.join(staying)
    assert going.link is not None
    going.link.break_off()
    assert await draining == Drained(is_lost=True)
    assert fleet.requests_at(staying) == ["r1"]
    with pytest.raises(DomainError) as refused:
        await fleet.join(going)
    assert refused.value.reason == "EXECUTOR_DRAINED"
    await fleet.cluster.drain(0)


async def test_idle_executor_is_drained_at_once() -> None:
    fleet, idle, busy = Fleet(), Machine("idle:1"), Machine("busy:1")
    await fleet.join(idle)
    assert await fleet.drain(idle) == Drained()
    await fleet.join(busy)
    fleet.submit(1)
    await turns()
    draining = fleet.drain(busy)
    await turns()
    assert not draining.done()
    fleet.cluster.abort(RequestName("r1"))
    assert await draining == Drained()
    await fleet.cluster.drain(0)


async def refusal(joining: Awaitable[object]) -> str:
    with pytest.raises(DomainError) as refused:
        await joining
    return refused.value.reason


async def test_executor_that_still_drains_serves_on_when_it_is_taken_back() -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    await fleet.join(machine)
    fleet.submit(1)
    await turns()
    draining = fleet.drain(machine)
    await turns()
    fleet.submit(2)
    await turns()
    assert fleet.requests_at(machine) == ["r1"]

    fleet.cluster.undrain_executor(machine.address)
    machine.link.release()  # type: ignore[union-attr]
    await turns()
    assert fleet.requests_at(machine) == ["r1", "r2"]
    assert await refusal(draining) == "DRAIN_UNDONE"
    await fleet.finish(machine)
    await fleet.join(machine)
    (engine,) = fleet.cluster.executors
    assert engine.takes_requests
    fleet.cluster.undrain_executor(machine.address)  # changes nothing
    # It may be drained once more.
    assert await fleet.drain(machine) == Drained()
    await fleet.cluster.drain(0)


async def test_drained_executor_joins_when_it_is_taken_back() -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    await fleet.join(machine)
    assert await fleet.drain(machine) == Drained()
    machine.says_drained = True
    assert await refusal(fleet.join(machine)) == "EXECUTOR_DRAINED"

    fleet.cluster.undrain_executor(machine.address)
    fleet.cluster.undrain_executor(machine.address)
    await fleet.join(machine)
    assert [engine.takes_requests for engine in fleet.cluster.executors] == [True]
    assert await fleet.drain(machine) == Drained()
    assert await refusal(fleet.join(machine)) == "EXECUTOR_DRAINED"
    await fleet.cluster.drain(0)


async def test_drained_executor_is_refused_by_a_restarted_scheduler() -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    machine.says_drained = True
    with pytest.raises(DomainError, match="known: none"):
        fleet.cluster.undrain_executor(machine.address)
    assert await refusal(fleet.join(machine)) == "EXECUTOR_DRAINED"
    assert fleet.cluster.executors == []

    fleet.cluster.undrain_executor(machine.address)
    await fleet.join(machine)
    assert len(fleet.cluster.executors) == 1
    # A new process knows nothing of it.
    machine.restart()
    machine.says_drained = False
    await fleet.join(machine)
    assert len(fleet.cluster.executors) == 1
    await fleet.cluster.drain(0)


async def test_executor_that_is_about_to_end_is_not_taken_back() -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    await fleet.join(machine)
    fleet.submit(1)
    await turns()
    machine.says_draining = True
    leaving = asyncio.create_task(
        fleet.cluster.leave(machine.address, machine.epoch, timeout_s=3600)
    )
    await turns()
    with pytest.raises(DomainError) as refused:
        fleet.cluster.undrain_executor(machine.address)
    assert refused.value.reason == "EXECUTOR_LEAVES"
    await fleet.finish(machine)
    await leaving
    await fleet.cluster.drain(0)


async def test_executor_may_leave_a_scheduler_that_has_ended() -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    await fleet.join(machine)
    await fleet.cluster.drain(0)
    machine.says_draining = False  # nobody asks it
    await fleet.cluster.leave(machine.address, machine.epoch, timeout_s=3600)
