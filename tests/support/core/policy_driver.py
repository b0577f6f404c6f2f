"""Drives a queue policy by hand, without a core."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_service.core.policies.queue_policy import QueuePolicy, make_queue_policy
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.core.sampling_params import SamplingParams


def make_request(
    arrival: int,
    priority: int = 0,
    tenant: str = "",
    deadline_ns: int | None = None,
    adapter: str = "",
) -> Request:
    """A request without tokens: policies look at what it asks of the scheduler only."""
    return Request(
        f"r{arrival}",
        SamplingParams(),
        arrival,
        SchedulingParams(
            priority=priority, tenant=tenant, deadline_ns=deadline_ns, adapter=adapter
        ),
    )


def make_policy(name: str, waiting: Iterable[Request] = ()) -> QueuePolicy:
    """The policy of this name, with these in its queue."""
    policy = make_queue_policy(name, {})
    for request in waiting:
        policy.push(request)
    return policy


def order(policy: QueuePolicy) -> list[int]:
    """The arrivals of all candidates, if none of them can run."""
    return [request.arrival for request in policy.candidates()]


def admit(policy: QueuePolicy, request: Request, num_uncached_tokens: int = 1) -> None:
    """Lets a waiting request run."""
    policy.admitted(request, num_uncached_tokens)
    policy.remove(request)


def admit_next(policy: QueuePolicy, num_uncached_tokens: int = 1) -> Request:
    """Lets the first candidate run; returns it."""
    request = next(policy.candidates())
    admit(policy, request, num_uncached_tokens)
    return request
