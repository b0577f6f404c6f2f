"""Counts the calls that a server refuses, wherever in it that is."""

from __future__ import annotations

import grpc.aio
from prometheus_client import Counter

from splitserve_rpc.errors import CODE_OF_REASON
from splitserve_rpc.interceptors import OnRefusal, ignore_refusal


def counted_refusals(counter: Counter, then: OnRefusal = ignore_refusal) -> OnRefusal:
    """What a server is to tell: it counts by reason, and tells `then`."""
    # One that begins with 1 has not risen, as Prometheus sees it: the first would be nobody's.
    for reason in CODE_OF_REASON:
        counter.labels(reason)

    def tell(method: str, context: grpc.aio.ServicerContext, reason: str) -> None:
        counter.labels(reason).inc()
        then(method, context, reason)

    return tell
