"""The life of a request as operators are told it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler_service.core.request import Request
from scheduler_service.request_lives.known_ids import find_lives, near_ids
from scheduler_service.request_lives.life import Life
from scheduler_service.request_lives.life_event import Part
from scheduler_service.request_lives.life_recorder import Head, LifeRecorder
from splitserve.scheduler.v1 import admin_pb2

_US_NS = 1000


def explain(
    recorder: LifeRecorder,
    request_id: str,
    heads: Sequence[Head] = (),
    wall_offset_ns: int | None = None,
) -> admin_pb2.ExplainResponse:
    """What is known of `request_id`.

    `heads`: the first that wait now. `wall_offset_ns`: from the clock of events to the time since
    1970; None if that is not known.
    """
    lives = find_lives(recorder, request_id)
    return admin_pb2.ExplainResponse(
        lives=[_encode(recorder, life, heads, wall_offset_ns) for life in lives],
        near_request_ids=() if lives else near_ids(recorder, request_id),
        num_living=recorder.num_living,
        num_ended=recorder.num_ended,
        num_kept_at_most=recorder.num_kept_at_most,
    )


def explain_queue(
    heads: Sequence[Head],
    num_unassigned: int,
    num_executors: int,
    name_of: Callable[[Request], str],
) -> admin_pb2.ExplainQueueResponse:
    """Why the first wait. `name_of`: what its client calls a request."""
    return admin_pb2.ExplainQueueResponse(
        first=[
            admin_pb2.WaitingRequest(
                request_id=name_of(request),
                tenant=request.scheduling.tenant,
                obstacles=_obstacles(reasons),
            )
            for request, reasons in heads
        ],
        num_unassigned_requests=num_unassigned,
        num_executors=num_executors,
    )


def _encode(
    recorder: LifeRecorder, life: Life, heads: Sequence[Head], wall_offset_ns: int | None
) -> admin_pb2.RequestLife:
    recorder.settle(life)
    now_ns = recorder.now_ns if life.ended_ns is None else life.ended_ns
    begin_ns = life.events[0].at_ns
    parts = sorted(life.parts(now_ns).items(), key=lambda item: -item[1])
    message = admin_pb2.RequestLife(
        request_id=life.request_id,
        tenant=life.tenant,
        duration_us=(now_ns - begin_ns) // _US_NS,
        unfinished=life.ended_ns is None,
        events=[
            admin_pb2.LifeEvent(
                at_us=(event.at_ns - begin_ns) // _US_NS,
                kind=event.kind.value,
                executor=event.executor,
                reason=event.reason,
                numbers=event.numbers,
                detail=event.detail,
            )
            for event in life.events
        ],
        num_events_left_out=life.num_left_out,
        parts=[_encode_part(part, time_ns) for part, time_ns in parts],
        num_draft_tokens=life.num_drafts,
        num_more_tokens=life.num_more_tokens,
        num_accepted_draft_tokens=life.num_accepted,
    )
    if life.ended_ns is None:
        message.current.CopyFrom(_encode_part(life.part, now_ns - life.since_ns))
        for request, reasons in heads:
            if request.request_id == life.key:
                message.obstacles.extend(_obstacles(reasons))
    if wall_offset_ns is not None:
        message.began_at.FromNanoseconds(begin_ns + wall_offset_ns)
    return message


def _encode_part(part: Part, time_ns: int) -> admin_pb2.LifePart:
    return admin_pb2.LifePart(
        phase=part.phase.value,
        reason=part.reason,
        executor=part.executor,
        duration_us=time_ns // _US_NS,
    )


def _obstacles(reasons: Sequence[tuple[str, str]]) -> list[admin_pb2.ExecutorObstacle]:
    return [
        admin_pb2.ExecutorObstacle(executor=address, reason=reason) for address, reason in reasons
    ]
