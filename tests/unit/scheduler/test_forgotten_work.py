"""A wake-up that is lost, by a bug that is made here, costs half a second and a line in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.effects import Effect, WakeAt
from scheduler_service.scheduler.events import Event
from scheduler_service.scheduler.scheduler import Scheduler
from scheduler_service.service.readiness import ForgottenWork, Readiness, ReadinessWatch
from tests.support.core.machines import Machine
from tests.support.core.stepped_fleet import Fleet, turns

Handle = Callable[[Scheduler, Event, int], list[Effect]]


def lose_wake_ups(handle: Handle) -> Handle:
    """As `Scheduler.handle`, and nobody is told of any `WakeAt`."""

    def handle_without(scheduler: Scheduler, event: Event, now_ns: int) -> list[Effect]:
        found = handle(scheduler, event, now_ns)
        return [effect for effect in found if not isinstance(effect, WakeAt)]

    return handle_without


async def test_request_begins_when_its_wake_up_was_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(ClusterConfig(pipeline_depth=1))
    await fleet.join(Machine("executor:1"))
    await turns()
    with monkeypatch.context() as broken:
        broken.setattr(Scheduler, "handle", lose_wake_ups(Scheduler.handle))
        fleet.submit(1)
    await turns()
    forgotten = ForgottenWork(fleet.cluster)
    await forgotten.look()
    assert not fleet.cluster.scheduler.is_computing
    await forgotten.look()
    assert fleet.cluster.scheduler.is_computing
    assert "wake_up_missed num_unfinished=1" in caplog.text
    await fleet.cluster.drain(0)


async def test_nothing_is_said_of_a_wake_up_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(ClusterConfig(pipeline_depth=1))
    await fleet.join(Machine("executor:1"))
    await turns()
    with monkeypatch.context() as broken:
        broken.setattr(Scheduler, "handle", lose_wake_ups(Scheduler.handle))
        fleet.submit(1)
    forgotten = ForgottenWork(fleet.cluster)
    await forgotten.look()
    # A wake-up that comes before the second look is over.
    asyncio.get_running_loop().call_soon(fleet.cluster.look_again)
    await forgotten.look()
    assert fleet.cluster.scheduler.is_computing
    assert "wake_up_missed" not in caplog.text
    await fleet.cluster.drain(0)


async def test_nothing_is_said_when_there_is_nothing_to_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(ClusterConfig(pipeline_depth=1))
    machine = Machine("executor:1")
    await fleet.join(machine)
    await turns()
    forgotten = ForgottenWork(fleet.cluster)
    for _ in range(3):
        await forgotten.look()
    fleet.submit(1)
    await turns()
    for _ in range(3):  # its step is in flight
        await forgotten.look()
    assert fleet.cluster.scheduler.is_computing
    assert machine.link is not None
    machine.link.break_off()
    await turns()
    for _ in range(3):  # nobody is there
        await forgotten.look()
    assert fleet.cluster.scheduler.num_waiting == 1
    assert "wake_up_missed" not in caplog.text
    await fleet.cluster.drain(0)


async def test_readiness_is_looked_at_again_when_it_could_not_be_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(ClusterConfig(pipeline_depth=1))
    changed, published = asyncio.Event(), list[bool]()

    async def publish(is_serving: bool) -> None:
        published.append(is_serving)
        if published == [False, True]:
            raise RuntimeError("not now")

    watch = ReadinessWatch(fleet.cluster, publish)
    running = asyncio.create_task(watch.run(changed))
    await turns()
    await fleet.join(Machine("executor:1"))
    for _ in range(2):
        changed.set()
        await turns()
    running.cancel()
    assert published == [False, True, True]
    assert watch.current is Readiness.READY
    assert "readiness_watch_broken" in caplog.text
    await fleet.cluster.drain(0)
