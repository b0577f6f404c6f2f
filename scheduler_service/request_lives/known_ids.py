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
    """Those that `request_id` may mean, the latest first, unfinished ones before others."""
    wanted = {request_id[:MAX_ID_CHARS], _without_prefix(request_id[:MAX_ID_CHARS])}
    found = [
        life
        for life in chain(recorder.ended, recorder.living)
        if life.request_id in wanted or not wanted.isdisjoint(_parts(life.request_id))
    ]
    return found[: -MAX_FOUND - 1 : -1]


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


def _parts(request_id: str) -> list[str]:
    """What the gateway has joined: the id its caller gave, that of the answer, which prompt.

    After that, if it tried again elsewhere, the number of the try.
    """
    answer, _, prompt = request_id.rpartition(".")
    if not prompt.partition("~")[0].isdecimal():
        return []
    own, _, answer_id = answer.rpartition(".")
    return [answer, answer_id, own] if own else [answer]
