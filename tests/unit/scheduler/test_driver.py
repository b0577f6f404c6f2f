"""Tests how the driver executes effects: streams, steps and log lines."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from scheduler_service.callers import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import Effect, Event
from scheduler_service.scheduler.engine import RowColumns
from scheduler_service.scheduler.values import (
    PolicyConfig,
    Request,
    SamplingParams,
    SchedulingParams,
    StepEvents,
)
from scheduler_service.streams import RequestSink
from splitserve_common import JsonFormatter
from tests.support.core.machines import VOCAB_SIZE, Fleet, Machine, turns
from tests.support.core.pure_fleet import Broken

MS = 1_000_000


async def test_quarantined_request_ends_at_its_deadline() -> None:
    policies = PolicyConfig(queue_policy="deadline")
    fleet = Fleet(ClusterConfig(policies=policies, max_executor_losses=1))
    machine = Machine("executor:1")
    await fleet.join(machine)
    fleet.submit(1, scheduling=SchedulingParams(deadline_ns=MS))
    fleet.submit(2)
    while machine.link is None or not machine.link.held:
        await turns()
    machine.link.break_off()
    await turns()
    assert fleet.cluster.scheduler.num_waiting == 2

    fleet.now_ns = 2 * MS
    (event,) = await fleet.next_events()
    assert (event.handle, event.finish.error.reason) == (1, "DEADLINE_UNREACHABLE")
    assert fleet.cluster.scheduler.num_waiting == 1
    await fleet.cluster.drain(0)


async def test_long_parameters_are_encoded_before_the_first_step() -> None:
    fleet = Fleet()
    for number in (1, 2):
        await fleet.join(Machine(f"executor:{number}"))
    fleet.submit(1, logit_bias=dict.fromkeys(range(VOCAB_SIZE), 1.0))
    place = fleet.cluster.scheduler.locations["r1"]
    assert place.request.params_set.encoded is not None
    assert not fleet.cluster.scheduler.is_computing
    await fleet.cluster.drain(0)


async def test_log_names_call_and_address_of_a_failed_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet()
    await fleet.join(Machine("executor:1"))
    Broken(monkeypatch, RowColumns, "plan_work")
    fleet.submit(1)
    await turns()
    assert "core_invariant_broken address=executor:1 call=plan_step journal=" in caplog.text
    assert "block 3 freed twice" in caplog.text
    assert "executor_lost address=executor:1 num_requests=1" in caplog.text
    assert fleet.cluster.executors == []
    assert fleet.cluster.num_unfinished == 1
    await fleet.cluster.drain(0)


async def test_steps_are_planned_after_all_arrivals_of_a_turn() -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    await fleet.join(machine)
    fleet.submit(1, 2, 3)
    await turns()
    assert machine.link is not None
    assert [len(result.sampled_token_ids) // 4 for result in machine.link.held] == [3, 3]
    await fleet.cluster.drain(0)


async def test_event_during_effects_is_handled_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, machine = Fleet(), Machine("executor:1")
    await fleet.join(machine)
    fleet.submit(1)
    await turns()
    handled: list[str] = []
    handle, deliver = fleet.cluster.scheduler.handle, fleet.cluster.delivery.deliver

    def note(event: Event, now_ns: int) -> list[Effect]:
        handled.append(type(event).__name__)
        return handle(event, now_ns)

    def deliver_and_abort(events: StepEvents) -> None:
        if "RequestAborted" not in handled and len(handled) == 1:
            fleet.cluster.abort(RequestName("r1"))
            assert handled == ["StepCompleted"]
        deliver(events)

    monkeypatch.setattr(fleet.cluster.scheduler, "handle", note)
    monkeypatch.setattr(fleet.cluster.delivery, "deliver", deliver_and_abort)
    assert machine.link is not None
    machine.link.release()
    await turns()
    assert handled[:2] == ["StepCompleted", "RequestAborted"]
    assert fleet.cluster.num_unfinished == 0
    await fleet.cluster.drain(0)


async def test_log_lines_of_quarantine_have_request_and_trace() -> None:
    fleet = Fleet(ClusterConfig(max_executor_losses=1))
    machines = [Machine(f"executor:{number}") for number in (1, 2, 3)]
    await fleet.join(machines[0])
    for handle in (1, 2):
        submit_traced(fleet, handle)
    await turns()
    with logged("scheduler_service.watching.operator_log") as lines:
        for machine, following in itertools.pairwise(machines):
            assert machine.link is not None
            machine.link.break_off()
            await turns()
            await fleet.join(following)
    await fleet.cluster.drain(0)

    about = [line for line in lines if "request_id" in line]
    assert [(line["event"], line["request_id"], line["trace_id"]) for line in about] == [
        ("request_quarantined", "r1", f"{1:032x}"),
        ("request_quarantined", "r2", f"{2:032x}"),
        ("request_kills_executors", "r1", f"{1:032x}"),
        ("request_acquitted", "r2", f"{2:032x}"),
    ]
    assert about[3]["fields"] == {"why": "another_failed"}


def submit_traced(fleet: Fleet, handle: int) -> None:
    name = RequestName(f"r{handle}")
    params = SamplingParams(max_tokens=9)
    request = Request.create(name.key, [1, handle], params, arrival=handle, seed=handle)
    fleet.stream.begin(handle, name)
    admission = Admission(name, trace_id=f"{handle:032x}")
    fleet.cluster.submit(request, RequestSink(fleet.stream, handle), admission)


@contextmanager
def logged(name: str) -> Iterator[list[dict[str, Any]]]:
    """Lines of that logger, as a process writes them with `--log-format json`."""
    lines: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(self.format(record)))

    handler, logger = Kept(), logging.getLogger(name)
    handler.setFormatter(JsonFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
