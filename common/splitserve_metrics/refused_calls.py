"""Counter of the calls that a server refuses, wherever the refusal is raised."""

from __future__ import annotations

import grpc.aio
from prometheus_client import Counter

from splitserve_rpc.errors import CODE_OF_REASON
from splitserve_rpc.interceptors import OnRefusal, ignore_refusal


def counted_refusals(counter: Counter, then: OnRefusal = ignore_refusal) -> OnRefusal:
    """Returns an `on_refusal` callback that counts by reason and then calls `then`."""
    # Each series begins with 0: Prometheus misses the first increment of a series that begins with
    # 1.
    for reason in CODE_OF_REASON:
        counter.labels(reason)

    def tell(method: str, context: grpc.aio.ServicerContext, reason: str) -> None:
        counter.labels(reason).inc()
        then(method, context, reason)

    return tell
