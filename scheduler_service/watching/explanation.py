"""Responses to Explain and ExplainQueue, and the search for the lives that an id may mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from scheduler_service.scheduler.values import Request
from scheduler_service.watching.life import Life, PhaseSpan
from scheduler_service.watching.life_recorder import Head, LifeRecorder
from splitserve.scheduler.v1 import admin_pb2

MAX_ID_CHARS = 256
MAX_FOUND = 16
_MAX_NEAR = 8
_NUM_ALIKE_CHARS = 6
# Prefixes of the gateway's ids.
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "req_")


def find_lives(recorder: LifeRecorder, request_id: str) -> list[Life]:
    """Returns the lives that `request_id` may mean: unfinished requests first, then the latest.

    At most MAX_FOUND. If no recorded id is equal, returns the lives whose id begins with
    `request_id`, provided that they belong to one request or answer.
    """
    wanted = {request_id[:MAX_ID_CHARS], _without_prefix(request_id[:MAX_ID_CHARS])}
    found = [
        life for life in _all(recorder) if not wanted.isdisjoint(_names(life.request_id))
    ] or _begun(recorder, _without_prefix(request_id[:MAX_ID_CHARS]))
    return found[: -MAX_FOUND - 1 : -1]


def _begun(recorder: LifeRecorder, beginning: str) -> list[Life]:
    """Returns the lives whose id has this beginning, if they belong to one request or answer.

    Returns none if they belong to several, or if `beginning` has fewer than 6 characters.
    """
    if len(beginning) < _NUM_ALIKE_CHARS:
        return []
    meant: dict[str, list[Life]] = {}
    for life in _all(recorder):
        if any(name.startswith(beginning) for name in _names(life.request_id)):
            meant.setdefault(_names(life.request_id)[-1], []).append(life)
    return next(iter(meant.values())) if len(meant) == 1 else []


def near_ids(recorder: LifeRecorder, request_id: str) -> list[str]:
    """Returns up to 8 recorded ids, latest first, that begin or end with the same 6 characters."""
    text = _without_prefix(request_id[:MAX_ID_CHARS])
    start, end = text[:_NUM_ALIKE_CHARS], text[-_NUM_ALIKE_CHARS:]
    ids = (life.request_id for life in _all(recorder))
    near = {each: None for each in ids if text and (each.startswith(start) or each.endswith(end))}
    return list(near)[: -_MAX_NEAR - 1 : -1]


def _all(recorder: LifeRecorder) -> Iterable[Life]:
    return chain(recorder.ended, recorder.living)


def _without_prefix(request_id: str) -> str:
    for prefix in _PREFIXES:
        if request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id


def _names(request_id: str) -> list[str]:
    """Returns a request id and the ids that the gateway joined in it.

    The last item is the same for all requests of one answer. The gateway joins the id of its
    caller, the id of the answer, the number of the prompt and, after a retry at another scheduler,
    the number of the try.
    """
    answer, _, prompt = request_id.rpartition(".")
    if not prompt.partition("~")[0].isdecimal():
        return [request_id]
    own, _, answer_id = answer.rpartition(".")
    return [request_id, answer_id, own, answer] if own else [request_id, answer]


_US_NS = 1000


def explain(
    recorder: LifeRecorder,
    request_id: str,
    heads: Sequence[Head] = (),
    wall_offset_ns: int | None = None,
) -> admin_pb2.ExplainResponse:
    """Returns the lives of `request_id`, or similar ids if it has no recorded life.

    `heads`: first requests of the waiting queue now. `wall_offset_ns`: difference between the clock
    of events and the time since 1970; None if unknown.
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
    """Returns the first requests of the waiting queue, with the obstacle at each executor.

    `name_of`: the client's id of a request.
    """
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


def _encode_part(part: PhaseSpan, time_ns: int) -> admin_pb2.LifePart:
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
