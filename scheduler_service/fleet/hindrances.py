"""What keeps those from beginning who are first in the queue: told to those who watch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from itertools import islice
from typing import TypeAlias

from scheduler_service.core.admission_blocker import AdmissionBlocker
from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import Host

# So many requests are looked at, and so many hosts for each.
MAX_HEADS = 4
_MAX_HOSTS = 8


class Obstacle(Enum):
    """What is no lack of the request at a host.

    UNFIT: it could never run there. OTHERS_WAIT_THERE: whoever waits there goes first. NONE: it
    could begin, and will. BETTER_IS_BUSY: it could begin, and waits for another host where it has
    less to compute.
    """

    UNFIT = "does_not_fit"
    OTHERS_WAIT_THERE = "others_wait_there"
    NONE = "about_to_begin"
    BETTER_IS_BUSY = "awaits_better"


Hindrance: TypeAlias = AdmissionBlocker | Obstacle
Hindrances: TypeAlias = list[tuple[Host, Hindrance]]


def look_at_heads(
    candidates: Iterable[Request], hosts: Collection[Host], is_held: Callable[[str], bool]
) -> list[tuple[Request, Hindrances]]:
    """The first of `candidates`, each with what keeps it from some of `hosts`.

    `is_held`: whether a request waits for a busy host, by its id.
    """
    looked_at = list(islice(hosts, _MAX_HOSTS))
    return [
        (
            request,
            [
                (h, _held(hindrance(request, h), is_held=is_held(request.request_id)))
                for h in looked_at
            ],
        )
        for request in islice(candidates, MAX_HEADS)
    ]


def _held(hindered_by: Hindrance, *, is_held: bool) -> Hindrance:
    return Obstacle.BETTER_IS_BUSY if is_held and hindered_by is Obstacle.NONE else hindered_by


def hindrance(request: Request, host: Host) -> Hindrance:
    """What keeps `request` from `host` at this moment. Changes nothing."""
    if not host.fits(request):
        return Obstacle.UNFIT
    with host.openings.looked_at():
        lack = host.openings.what_lacks(request)
    if lack is AdmissionBlocker.BUDGET and not host.openings.nobody_waits:
        return Obstacle.OTHERS_WAIT_THERE
    return lack or Obstacle.NONE
