"""Tests whether a scheduler serves, and that a lost wake-up is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler import Effect, Event, Scheduler, WakeAt
from scheduler_service.service import (
    Readiness,
    ReadinessInputs,
    ReadinessJudge,
    ReadinessWatch,
    StallWatchdog,
)
from splitserve.scheduler.v1 import scheduler_pb2
from tests.support.core.machines import Fleet, Machine, turns

BUSY = ReadinessInputs(
    is_draining=False,
    num_connected=2,
    num_failing=0,
    has_work=True,
    num_steps=10,
    step_allowed_s=5.0,
)
S = 10**9


def judge_after(*looks: tuple[float, ReadinessInputs]) -> Readiness:
    judge = ReadinessJudge()
    return [judge.judge(facts, round(now_s * S)) for now_s, facts in looks][-1]


def test_scheduler_is_ready_when_steps_are_answered() -> None:
    looks = [(4.0 * number, replace(BUSY, num_steps=number)) for number in range(9)]
    assert judge_after(*looks) is Readiness.READY


def test_scheduler_makes_no_progress_when_no_step_is_answered() -> None:
    assert judge_after((0, BUSY), (5.0, BUSY)) is Readiness.READY
    assert judge_after((0, BUSY), (5.1, BUSY)) is Readiness.NO_PROGRESS


def test_scheduler_is_ready_again_when_a_step_is_answered() -> None:
    answered = replace(BUSY, num_steps=11)
    assert judge_after((0, BUSY), (9, BUSY), (10, answered)) is Readiness.READY


def test_scheduler_is_ready_when_work_comes_after_a_pause() -> None:
    idle = replace(BUSY, has_work=False)
    assert judge_after((0, BUSY), (1, idle), (1000, idle), (1004, BUSY)) is Readiness.READY
    assert judge_after((0, idle), (1000, idle), (1005.1, BUSY)) is Readiness.NO_PROGRESS


def test_scheduler_is_ready_when_the_first_executor_comes() -> None:
    nobody = replace(BUSY, num_connected=0)
    assert judge_after((0, nobody), (100, nobody)) is Readiness.NO_EXECUTOR
    assert judge_after((0, nobody), (100, nobody), (104, BUSY)) is Readiness.READY


@pytest.mark.parametrize("facts", [BUSY, replace(BUSY, num_connected=0)])
def test_scheduler_drains_whatever_else_is_the_case(facts: ReadinessInputs) -> None:
    draining = replace(facts, is_draining=True)
    assert judge_after((0, draining), (99, draining)) is Readiness.DRAINING


def test_every_readiness_has_its_name_in_the_contract() -> None:
    names = {f"READINESS_{readiness.value}" for readiness in Readiness}
    assert {*names, "READINESS_UNSPECIFIED"} == set(scheduler_pb2.Readiness.keys())


def test_readiness_is_executors_failing_when_all_connected_executors_fail() -> None:
    judge = ReadinessJudge()

    assert judge.judge(replace(BUSY, num_failing=1), 0) is Readiness.READY
    assert judge.judge(replace(BUSY, num_failing=2), 0) is Readiness.EXECUTORS_FAILING


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
    forgotten = StallWatchdog(fleet.cluster)
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
    forgotten = StallWatchdog(fleet.cluster)
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
    forgotten = StallWatchdog(fleet.cluster)
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


async def test_readiness_is_published_again_after_a_failure(
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
