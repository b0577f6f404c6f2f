"""Explanations of requests for operators: their history, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from splitserve.scheduler.v1 import admin_pb2

_US_S = 1e6


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """Event in the life of a request, `at_s` after its first event.

    `kind` and `numbers` use the names of `LifeEvent` in admin.proto. `executor`, `reason` and
    `detail` may be empty.
    """

    at_s: float
    kind: str
    executor: str
    reason: str
    numbers: Mapping[str, int]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LifePart:
    """Part of a request's time; names are those of `LifePart` in admin.proto."""

    phase: str
    reason: str
    executor: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Reason why an executor cannot take a request."""

    executor: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestLife:
    """History of a request.

    `began_at_s`: seconds since 1970, None if unknown. `parts`: longest first. `current`: the
    current part, None if the request ended. `num_events_left_out`: number of events missing in
    `events` after its first 16.
    """

    request_id: str
    tenant: str
    began_at_s: float | None
    duration_s: float
    is_unfinished: bool
    events: tuple[LifeEvent, ...]
    num_events_left_out: int
    parts: tuple[LifePart, ...]
    current: LifePart | None
    obstacles: tuple[Obstacle, ...]
    num_draft_tokens: int
    num_more_tokens: int
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Requests that match an id, and the size of the record.

    `lives`: requests that the id may mean, latest first. `num_living`, `num_ended`: requests on
    record. `num_kept_at_most`: limit of ended requests; 0 if no history is recorded.
    """

    lives: tuple[RequestLife, ...]
    near_request_ids: tuple[str, ...]
    num_living: int
    num_ended: int
    num_kept_at_most: int


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Request near the front of the waiting queue."""

    request_id: str
    tenant: str
    obstacles: tuple[Obstacle, ...]


@dataclass(frozen=True, slots=True)
class QueueExplanation:
    """Reasons why the first unassigned requests wait.

    `num_executors`: number of executors that take requests.
    """

    first: tuple[WaitingRequest, ...]
    num_unassigned_requests: int
    num_executors: int


def decode_explanation(response: admin_pb2.ExplainResponse) -> Explanation:
    """Decodes the explanation of a request."""
    return Explanation(
        tuple(map(_decode_life, response.lives)),
        tuple(response.near_request_ids),
        response.num_living,
        response.num_ended,
        response.num_kept_at_most,
    )


def decode_queue(response: admin_pb2.ExplainQueueResponse) -> QueueExplanation:
    """Decodes the explanation of the waiting queue."""
    first = (
        WaitingRequest(each.request_id, each.tenant, _decode_obstacles(each.obstacles))
        for each in response.first
    )
    return QueueExplanation(tuple(first), response.num_unassigned_requests, response.num_executors)


def _decode_life(life: admin_pb2.RequestLife) -> RequestLife:
    has_time = life.HasField("began_at")
    return RequestLife(
        request_id=life.request_id,
        tenant=life.tenant,
        began_at_s=life.began_at.ToNanoseconds() / 1e9 if has_time else None,
        duration_s=life.duration_us / _US_S,
        is_unfinished=life.unfinished,
        events=tuple(
            LifeEvent(e.at_us / _US_S, e.kind, e.executor, e.reason, dict(e.numbers), e.detail)
            for e in life.events
        ),
        num_events_left_out=life.num_events_left_out,
        parts=tuple(map(_decode_part, life.parts)),
        current=_decode_part(life.current) if life.HasField("current") else None,
        obstacles=_decode_obstacles(life.obstacles),
        num_draft_tokens=life.num_draft_tokens,
        num_more_tokens=life.num_more_tokens,
        num_accepted_draft_tokens=life.num_accepted_draft_tokens,
    )


def _decode_part(part: admin_pb2.LifePart) -> LifePart:
    return LifePart(part.phase, part.reason, part.executor, part.duration_us / _US_S)


def _decode_obstacles(obstacles: Iterable[admin_pb2.ExecutorObstacle]) -> tuple[Obstacle, ...]:
    return tuple(Obstacle(each.executor, each.reason) for each in obstacles)
