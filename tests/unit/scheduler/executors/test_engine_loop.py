from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scheduler_service.core.planning.lateness import MAX_REFUSALS
from scheduler_service.core.request import RequestStatus, SchedulingParams
from scheduler_service.core.row_columns import RowColumns
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executors.answer_watch import AnswerWatch, FleetPulse
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.executors.step_alarm import StepAlarm
from scheduler_service.executors.step_patience import StepPatience
from scheduler_service.journal.journal import FileJournal
from scheduler_service.scheduler.rescue import CoreBroken
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_rpc.domain_error import DomainError
from tests.support.core.engine_loops import (
    ADDRESS,
    CONFIG,
    PATIENCE_S,
    VOCAB_SIZE,
    Broken,
    Clients,
    LoopLink,
    a_loop,
    a_request,
    finish_elsewhere,
    run_until_lost,
)
from tests.support.fakes.fake_chain import expected_tokens


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 2), (3, 2)])
async def test_loop_sends_no_more_steps_ahead_than_the_executor_takes(
    most: int, expected: int
) -> None:
    link, clients = LoopLink(CONFIG, max_inflight_steps=most), Clients()
    loop = a_loop(clients, link=link)
    ahead, has_sent = list[int](), asyncio.Event()

    def note(_result: pb.StepResult) -> None:
        ahead.append(loop.scheduler.num_in_flight)
        if len(ahead) == 6:
            has_sent.set()

    link.alter = note
    loop.readmit(a_request(1))
    running = asyncio.create_task(loop.run())
    await has_sent.wait()
    running.cancel()
    assert max(ahead) == expected


async def test_loop_gives_the_core_up_when_schedule_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Broken(monkeypatch, RowColumns, "plan_work")
    clients = Clients()
    loop = a_loop(clients)
    loop.scheduler.add(a_request(1))

    error = await run_until_lost(loop)

    assert isinstance(error, CoreBroken)
    assert str(error) == "its core failed in schedule: AssertionError"
    assert f"core_invariant_broken address={ADDRESS} call=schedule" in caplog.text
    (moved,) = loop.evacuate()
    assert not moved.is_finished
    await finish_elsewhere([moved], clients)
    assert clients.tokens[1] == expected_tokens([1, 2, 3], 10, 1, VOCAB_SIZE)


async def test_loop_gives_the_core_up_when_schedule_raises_after_a_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = a_loop(Clients())
    running = asyncio.ensure_future(run_until_lost(loop))
    await asyncio.sleep(0)
    Broken(monkeypatch, RowColumns, "plan_work")

    loop.scheduler.add(a_request(1))
    loop.wake_up()

    assert isinstance(await running, CoreBroken)


async def test_loop_logs_the_position_in_the_journal_when_the_core_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "scheduler.journal"
    journal = FileJournal(path, 2**20, 1)
    Broken(monkeypatch, RowColumns, "plan_work")
    core = journal.core(CONFIG, 0, ADDRESS, 1)
    loop = a_loop(Clients(), core)
    core.add(a_request(1))

    await run_until_lost(loop)

    # The core, the request, the call that raised.
    assert f"journal={path}#3" in caplog.text
    journal.close()


async def test_tokens_of_a_step_are_delivered_when_the_next_cannot_be_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Broken(monkeypatch, RowColumns, "plan_work").at_call = 3
    clients = Clients()
    loop = a_loop(clients)
    loop.scheduler.add(a_request(1))

    await run_until_lost(loop)

    requests = loop.evacuate()
    assert len(clients.tokens[1]) == requests[0].sequence.num_output_tokens == 1


async def test_executor_is_at_fault_when_its_result_breaks_the_contract(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = a_loop(Clients())
    loop.scheduler.add(a_request(1, best_of=2))
    tokens = np.array([VOCAB_SIZE], np.int32).tobytes()
    result = pb.StepResult(step_id=7, status=pb.STEP_STATUS_OK, sampled_token_ids=tokens)
    loop.link.answer(result)  # type: ignore[attr-defined]

    error = await run_until_lost(loop)

    assert not isinstance(error, CoreBroken)
    assert "broke the step contract" in str(error)
    assert "core_invariant_broken" not in caplog.text
    # Nothing of the core was touched.
    assert not any(request.is_finished for request in loop.evacuate())


async def test_run_ends_when_a_call_from_outside_breaks_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = a_loop(Clients())
    running = asyncio.ensure_future(run_until_lost(loop))
    await asyncio.sleep(0)
    Broken(monkeypatch, Scheduler, "readmit")
    request = a_request(1)

    with pytest.raises(CoreBroken):
        loop.call("add", lambda: loop.scheduler.add(request))

    assert str(await running) == "its core failed in add: AssertionError"


async def test_core_goes_on_when_it_refuses_a_request() -> None:
    loop = a_loop(Clients())
    request = a_request(1, max_tokens=0)

    with pytest.raises(DomainError):
        loop.call("add", lambda: loop.scheduler.add(request))

    loop.scheduler.add(a_request(2))
    assert loop.call("schedule", loop.scheduler.schedule) is not None


async def test_run_ends_when_it_is_cancelled() -> None:
    loop = a_loop(Clients())
    running = asyncio.ensure_future(loop.run())
    await asyncio.sleep(0)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_loop_does_nothing_when_it_was_woken_up_before_it_was_given_up() -> None:
    clients = Clients()
    lost, other = a_loop(clients), a_loop(clients)
    lost.readmit(a_request(1))
    core = lost.scheduler

    (moved,) = lost.evacuate()
    other.scheduler.readmit(moved)
    await asyncio.sleep(0)

    # What it holds itself has not moved either.
    assert core.num_running == 0
    assert moved.status is RequestStatus.WAITING
    with pytest.raises(ExecutorLost):
        lost.readmit(a_request(2))
    with pytest.raises(RuntimeError, match="given its requests away"):
        core.schedule()


async def test_result_reaches_nobody_when_the_loop_was_given_up() -> None:
    clients = Clients()
    loop = a_loop(clients)
    loop.scheduler.add(a_request(1))
    running = asyncio.ensure_future(run_until_lost(loop))
    await asyncio.sleep(0)

    (moved,) = loop.evacuate()

    assert str(await running) == "it was given up"
    assert moved.sequence.num_output_tokens == 0
    assert clients.tokens == {}


async def test_repeated_result_changes_nothing_when_the_step_was_answered() -> None:
    clients = Clients()
    loop = a_loop(clients)
    loop.scheduler.add(a_request(1))
    running = asyncio.ensure_future(loop.run())
    async with asyncio.timeout(PATIENCE_S):
        while not clients.finished:
            loop.link.answer(pb.StepResult(step_id=1))  # type: ignore[attr-defined]
            clients.has_changed.clear()
            await clients.has_changed.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert clients.tokens[1] == expected_tokens([1, 2, 3], 10, 1, VOCAB_SIZE)


async def test_loop_ends_all_overdue_requests_when_there_is_no_step_to_end_them_in() -> None:
    clients = Clients()
    config = replace(CONFIG, queue_policy="deadline", max_num_waiting=1000)
    loop = a_loop(clients, Scheduler(config))
    num_requests = 3 * MAX_REFUSALS + 1
    for number in range(num_requests):
        request = a_request(number)
        request.scheduling = SchedulingParams(deadline_ns=-1)
        loop.scheduler.add(request)

    loop.wake_up()
    while len(clients.finished) < num_requests:
        clients.has_changed.clear()
        await asyncio.wait_for(clients.has_changed.wait(), PATIENCE_S)

    assert loop.scheduler.num_waiting == 0
    assert not loop.scheduler.is_behind


async def test_parameters_are_encoded_when_their_request_arrives() -> None:
    loop, request = a_loop(Clients()), a_request(1)
    loop.readmit(request)
    assert request.params_set.encoded is not None
    assert not loop.scheduler.num_in_flight


class SilentLink(LoopLink):
    """Its executor answers nothing."""

    def answer(self, result: pb.StepResult) -> None:
        pass


async def test_loop_gives_its_executor_up_when_a_step_is_not_answered() -> None:
    clients = Clients()
    watch = AnswerWatch(ADDRESS, StepPatience(0.01, 0.02), FleetPulse())
    alarm = StepAlarm(
        watch,
        time.monotonic_ns,
        block_size=CONFIG.block_size,
        ask_others=lambda: None,
        recovered=lambda: None,
    )
    loop = a_loop(clients, link=SilentLink(CONFIG), now_ns=time.monotonic_ns, steps=alarm)
    loop.is_connected = True
    loop.scheduler.add(a_request(1))

    error = await run_until_lost(loop)

    assert "its oldest step is not answered after" in str(error)
    assert not loop.takes_requests
    (moved,) = loop.evacuate()
    await finish_elsewhere([moved], clients)
    assert clients.tokens[1] == expected_tokens([1, 2, 3], 10, 1, VOCAB_SIZE)
