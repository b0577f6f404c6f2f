"""Requests, as a watcher is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler_service.cluster import Cluster
from scheduler_service.core.request import Request
from splitserve.scheduler.v1 import live_pb2 as live

# Names that are remembered, by a scheduler and by each who watches it.
MAX_NAMES = 8192
_MS = 1_000_000


class Names:
    """Those of requests that somebody saw; they outlive the requests for a while."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names: dict[int, live.LiveRequest] = {}

    def see(self, requests: Iterable[Request]) -> None:
        """Learns the names of requests that have not ended."""
        names = self._names
        for request in requests:
            if request.arrival in names:
                continue
            tracked = self._cluster.tracked(request.request_id)
            if tracked is None:
                continue
            while len(names) >= MAX_NAMES:
                del names[next(iter(names))]
            names[request.arrival] = live.LiveRequest(
                number=request.arrival,
                request_id=tracked.admission.name.own_id,
                tenant=request.scheduling.tenant,
                num_prompt_tokens=request.sequence.num_prompt_tokens,
                stop_len=request.stop_len,
                num_sequences=request.params.num_sequences,
                priority=request.scheduling.priority,
                submitted_ms=tracked.submitted_ns // _MS,
            )

    def of(self, numbers: Iterable[int]) -> Iterator[live.LiveRequest]:
        """Those that are known."""
        return (self._names[number] for number in numbers if number in self._names)
