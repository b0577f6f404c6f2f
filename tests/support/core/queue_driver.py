"""Drives a waiting queue by hand, without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scheduler_service.scheduler.queue.queue_policy import make_queue_policy
from scheduler_service.scheduler.queue.waiting_queue import WaitingQueue
from scheduler_service.scheduler.values.request import FinishReason, Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import SamplingParams


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


def make_queue(
    name: str, waiting: Iterable[Request] = (), weights: Mapping[str, float] | None = None
) -> WaitingQueue:
    """A queue with the policy of this name and these requests."""
    queue = WaitingQueue(make_queue_policy(name, weights or {}))
    for request in waiting:
        queue.push(request)
    return queue


def order(queue: WaitingQueue) -> list[int]:
    """The arrivals of all candidates, if none of them can run."""
    return [request.arrival for request in queue.candidates()]


def admit_next(queue: WaitingQueue, num_uncached_tokens: int = 1) -> Request:
    """Lets the first candidate run; returns it."""
    request = next(queue.candidates())
    queue.begun(request, num_uncached_tokens)
    assert queue.take_begun()[-1] is request
    return request


def end(queue: WaitingQueue, request: Request) -> None:
    """Ends a request."""
    request.finish_reason = FinishReason.STOP
    queue.ended(request.request_id)
