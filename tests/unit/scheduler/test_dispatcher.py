"""Who waits for which executor, and what becomes of those that nobody can have."""

from __future__ import annotations

from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import PolicyConfig
from scheduler_service.core.request import SchedulingParams
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
    assert fleet.cluster.num_unassigned == 2

    fleet.now_ns = 2 * MS
    (event,) = await fleet.next_events()
    assert (event.handle, event.finish.error.reason) == (1, "DEADLINE_UNREACHABLE")
    assert fleet.cluster.num_unassigned == 1
    await fleet.cluster.drain(0)
