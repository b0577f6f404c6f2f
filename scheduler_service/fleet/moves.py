"""Who waits at one host though another could begin it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import Host

# A request waits at a host for this long before another host takes it.
LEAST_PATIENCE_NS = 10_000_000


def to_be_moved(
    now_ns: int,
    taker: Host,
    others: Iterable[Host],
    goes_first: Callable[[Request], bool] = lambda _request: True,
    most: int | None = None,
) -> tuple[Host, str] | None:
    """Who waits at one of `others` and had better begin at `taker`: the host, and its id.

    `goes_first`: whether a request would begin at `taker` before all who wait for whatever host;
    `most`: so many at each host are looked at.
    Who has KV somewhere waits for its turn
    there for as long as it would take to compute it again: so it loses at most twice what whoever
    knew the future would (ski rental).
    """
    if not taker.openings.is_open:
        return None
    for host in others:
        if host is taker or host.openings.nobody_waits:
            continue
        for request in islice(host.openings.movable, most):
            num_tokens = sum(len(sequence.token_ids) for sequence in request.unfinished)
            patience_ns = max(LEAST_PATIENCE_NS, taker.recompute_ns(num_tokens))
            is_due = host.openings.has_waited_ns(request, now_ns) >= patience_ns
            if not (is_due and goes_first(request)):
                continue
            if taker.fits(request) and _can_begin(request, taker):
                return host, request.request_id
    return None


def has_waited(host: Host, now_ns: int) -> bool:
    """Whether a request waits at `host` that may move; costs the same however many wait."""
    since_ns = host.openings.waits_since_ns
    return since_ns is not None and now_ns - since_ns >= LEAST_PATIENCE_NS


def _can_begin(request: Request, host: Host) -> bool:
    return host.openings.what_lacks(request) is None
