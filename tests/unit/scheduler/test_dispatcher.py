"""Who waits for which executor, and what becomes of those that nobody can have."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scheduler_service.callers.admission import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import PolicyConfig
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.request_names import RequestName
from scheduler_service.streams.sinks import RequestSink
from splitserve_rpc.json_lines import JsonFormatter
from tests.support.core.machines import Machine
from tests.support.core.stepped_fleet import Fleet, turns

MS = 1_000_000


async def test_request_in_quarantine_ends_at_its_deadline_when_no_executor_is_there() -> None:
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


async def test_lines_about_requests_in_quarantine_say_whose_they_are_and_their_trace() -> None:
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
    fleet.stream.names[handle] = name
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
