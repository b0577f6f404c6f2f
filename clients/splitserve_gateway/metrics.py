"""Metrics of a gateway process."""

from __future__ import annotations

from collections import Counter

from prometheus_client import GCCollector, ProcessCollector

from splitserve_gateway.http import EndedExchange, Exchanges
from splitserve_gateway.upstreams import Fleet
from splitserve_metrics import (
    GATEWAY_METRICS,
    Instruments,
    LiveFamily,
    MetricsAddress,
    MetricsListener,
    Page,
)


class GatewayMetrics:
    """Metrics and their listener. `answered` records each answer.

    Call all methods in the event loop.
    """

    def __init__(self, address: MetricsAddress) -> None:
        """Creates the metrics; `serve` starts the listener. Raises FilesUnusable."""
        self._watched: tuple[Fleet, Exchanges] | None = None
        made = self._instruments = Instruments(GATEWAY_METRICS)
        ProcessCollector(registry=made.registry)
        GCCollector(registry=made.registry)
        self._requests = made.counter("splitserve_gateway_requests_total")
        self._durations = made.histogram("splitserve_gateway_request_duration_seconds")
        self._first_bytes = made.histogram("splitserve_gateway_time_to_first_byte_seconds")
        self._listener = MetricsListener(address, self.page)

    async def serve(self) -> str:
        """Starts the listener; returns its address. Raises CannotListen."""
        return await self._listener.start()

    async def close(self) -> None:
        """Stops the listener."""
        await self._listener.close()

    def watch(self, fleet: Fleet, exchanges: Exchanges) -> None:
        """Sets the fleet and the open requests that the metrics read. Called once both exist."""
        self._watched = fleet, exchanges

    def answered(self, answer: EndedExchange) -> None:
        """Records an ended request."""
        self._requests.labels(answer.path, str(answer.code)).inc()
        self._durations.labels(answer.path).observe(answer.duration_s)
        if answer.first_byte_s is not None:
            self._first_bytes.labels(answer.path).observe(answer.first_byte_s)

    def page(self) -> Page:
        """Returns a snapshot of all metrics."""
        return Page(self._instruments.registry, self._state())

    def _state(self) -> list[LiveFamily]:
        if self._watched is None:
            return []
        fleet, exchanges = self._watched
        made = self._instruments
        requests = made.family("splitserve_gateway_requests_open")
        requests.add_metric([], exchanges.num_open)
        schedulers = made.family("splitserve_gateway_schedulers")
        for readiness, number in Counter(fleet.readiness).items():
            schedulers.add_metric([readiness], number)
        session = made.family("splitserve_gateway_session_requests")
        session.add_metric([], fleet.num_session_requests)
        return [requests, schedulers, session]
