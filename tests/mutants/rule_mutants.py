"""Changes of the rules that clients can see, which the frozen fleets must notice."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.mutants.mutant import Mutant

_QUEUE = "scheduler_service.scheduler.queue."
_GOLDEN = "tests/simulation/golden/test_golden.py::test_fleet_means_what_was_recorded"

RULE_MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "the newest request is served first": Mutant(
            f"{_QUEUE}queue_policy",
            "*policy.key(request), request.arrival)",
            "*policy.key(request), -request.arrival)",
            f"{_GOLDEN}[queue-fcfs-0]",
        ),
        "tenants are not charged for their outputs": Mutant(
            f"{_QUEUE}tenant_order",
            "account.counter += OUTPUT_WEIGHT * num_tokens * account.price",
            "pass",
            f"{_GOLDEN}[queue-fair-0]",
        ),
        "deadlines do not order requests": Mutant(
            f"{_QUEUE}queue_policy",
            "return (request.scheduling.priority, deadline_ns is None, deadline_ns or 0)",
            "return (request.scheduling.priority, deadline_ns is None, 0)",
            f"{_GOLDEN}[queue-deadline-0]",
        ),
        "an urgent request preempts nobody": Mutant(
            f"{_QUEUE}queue_policy",
            "return waiting.scheduling.priority < running.scheduling.priority",
            "return False",
            f"{_GOLDEN}[room-priority-0]",
        ),
        "a tenant may fill the whole queue": Mutant(
            f"{_QUEUE}tenant_order",
            "return num_left >= 0 and self._shares.leaves_enough(tenant, num_held, num_left)",
            "return num_left >= 0",
            f"{_GOLDEN}[full-0]",
        ),
    }
)
