"""What is written down of requests must be possible, whatever went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from scheduler_service.watching.life import Life, LifeKind
from tests.simulation.faults import World

_ENDS = frozenset({LifeKind.ENDED, LifeKind.REFUSED})


def problems_of_lives(world: World) -> list[str]:
    """When nothing is to be done: all have ended, and their time is that of its parts."""
    problems: list[str] = []
    for scheduler in world.schedulers:
        if scheduler.cluster is not None and scheduler.recorder is not None:
            problems += [f"{life.key} goes on" for life in scheduler.recorder.living]
            for life in scheduler.recorder.ended:
                problems += [f"life of {life.key}: {problem}" for problem in _problems(life)]
    return problems


def _problems(life: Life) -> Iterator[str]:
    events = life.events
    kinds = [event.kind for event in events]
    if kinds[-1] not in _ENDS:
        yield f"it ends with {kinds[-1]}"
    if any(before.at_ns > after.at_ns for before, after in pairwise(events)):
        yield "it goes back in time"
    if LifeKind.RECEIVED not in kinds:
        return
    received = events[kinds.index(LifeKind.RECEIVED)]
    spent_ns = sum(life.parts(events[-1].at_ns).values())
    if spent_ns != events[-1].at_ns - received.at_ns:
        yield f"its parts are {spent_ns} ns of {events[-1].at_ns - received.at_ns}"
    if kinds.count(LifeKind.FIRST_TOKEN) > 1:
        yield "it has several first tokens"
    for kind, needed in ((LifeKind.BEGAN, LifeKind.GIVEN), (LifeKind.FIRST_TOKEN, LifeKind.BEGAN)):
        if kind in kinds and needed not in kinds[: kinds.index(kind)]:
            yield f"{kind} comes before {needed}"
