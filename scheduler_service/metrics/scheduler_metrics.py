"""The metrics of a scheduler process, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import GCCollector, ProcessCollector

from scheduler_service.audit.audit import Audit
from scheduler_service.driver import Driver
from scheduler_service.metrics import cluster_state
from scheduler_service.metrics.counted_audit import CountedAudit
from scheduler_service.metrics.request_watch import RequestWatch
from scheduler_service.service.readiness import Readiness
from splitserve_metrics.address import MetricsAddress
from splitserve_metrics.instruments import Instruments, Page
from splitserve_metrics.listener import MetricsListener
from splitserve_metrics.refused_calls import counted_refusals
from splitserve_metrics.scheduler_table import SCHEDULER_METRICS
from splitserve_rpc.interceptors import OnRefusal


class SchedulerMetrics:
    """Instruments and the page that shows them.

    `watch` is to see the turns of the scheduler, and `counted` to stand before the audit log.
    """

    def __init__(self, address: MetricsAddress) -> None:
        self._address = address
        self._listener: MetricsListener | None = None
        self._instruments = Instruments(SCHEDULER_METRICS)
        ProcessCollector(registry=self._instruments.registry)
        GCCollector(registry=self._instruments.registry)
        self.watch = RequestWatch(self._instruments)

    def counted(self, audit: Audit, has_numbers: Callable[[str], bool]) -> CountedAudit:
        """To be called once. `has_numbers`: whether the configuration names a tenant."""
        return CountedAudit(audit, self._instruments, has_numbers)

    def counted_calls(self, on_refusal: OnRefusal) -> OnRefusal:
        """To be called once. What the servers are to tell, before `on_refusal`."""
        counter = self._instruments.counter("splitserve_calls_refused_total")
        return counted_refusals(counter, on_refusal)

    async def serve(self, cluster: Driver, readiness: Callable[[], Readiness]) -> str:
        """Answers readers from now on; returns where. Raises CannotListen and FilesUnusable."""
        self._listener = MetricsListener(self._address, lambda: self.page(cluster, readiness()))
        return await self._listener.start()

    async def close(self) -> None:
        """Answers nobody any more."""
        if self._listener is not None:
            await self._listener.close()

    def page(self, cluster: Driver, readiness: Readiness) -> Page:
        """Of this moment; to be called in the event loop."""
        state = cluster_state.families(cluster, readiness, self._instruments)
        return Page(self._instruments.registry, [*state, *self.watch.families()])
