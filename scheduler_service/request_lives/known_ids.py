"""Which lives somebody means by an id, of all that are kept."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from scheduler_service.request_lives.life import Life
from scheduler_service.request_lives.life_recorder import LifeRecorder

MAX_ID_CHARS = 256
MAX_FOUND = 16
_MAX_NEAR = 8
_NUM_ALIKE_CHARS = 6
# What the gateway writes before an id.
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "req_")


def find_lives(recorder: LifeRecorder, request_id: str) -> list[Life]:
    """Those that `request_id` may mean, the latest first, unfinished ones before others.

    If there is none: those whose id begins so, where it can only be one.
    """
    wanted = {request_id[:MAX_ID_CHARS], _without_prefix(request_id[:MAX_ID_CHARS])}
    found = [
        life for life in _all(recorder) if not wanted.isdisjoint(_names(life.request_id))
    ] or _begun(recorder, _without_prefix(request_id[:MAX_ID_CHARS]))
    return found[: -MAX_FOUND - 1 : -1]


def _begun(recorder: LifeRecorder, beginning: str) -> list[Life]:
    """Those of the one request, or answer, that is called something with this beginning."""
    if len(beginning) < _NUM_ALIKE_CHARS:
        return []
    meant: dict[str, list[Life]] = {}
    for life in _all(recorder):
        if any(name.startswith(beginning) for name in _names(life.request_id)):
            meant.setdefault(_names(life.request_id)[-1], []).append(life)
    return next(iter(meant.values())) if len(meant) == 1 else []


def near_ids(recorder: LifeRecorder, request_id: str) -> list[str]:
    """Some that begin or end as `request_id` does."""
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
    """Itself, and what the gateway has joined in it; last what all requests of an answer share.

    These are the id its caller gave, that of the answer, and which prompt; after that, if it tried
    again elsewhere, the number of the try.
    """
    answer, _, prompt = request_id.rpartition(".")
    if not prompt.partition("~")[0].isdecimal():
        return [request_id]
    own, _, answer_id = answer.rpartition(".")
    return [request_id, answer_id, own, answer] if own else [request_id, answer]
