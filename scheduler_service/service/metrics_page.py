"""Metrics of a scheduler process, and the page that shows them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import GCCollector, ProcessCollector

from scheduler_service.audit import Audit
from scheduler_service.driver import Driver
from scheduler_service.scheduler import ExecutorState
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.engine.blocks import BlockPool
from scheduler_service.service.readiness import Readiness
from scheduler_service.watching import CountedAudit, RequestWatch
from splitserve_adapters import name_of
from splitserve_metrics import (
    SCHEDULER_METRICS,
    Instruments,
    LiveFamily,
    MetricsAddress,
    MetricsListener,
    Page,
    counted_refusals,
)
from splitserve_rpc import OnRefusal

_STATES = ("serving", "late", "draining", "disconnected", "withdrawn", "failing")


def _families(cluster: Driver, readiness: Readiness, instruments: Instruments) -> list[LiveFamily]:
    """Returns the metrics that are read off the scheduler when the page is read."""
    return [
        *_of_fleet(cluster, readiness, instruments),
        *_of_cores(cluster, instruments),
        *_of_blocks(cluster, instruments),
        *_of_adapters(cluster, instruments),
    ]


def _of_fleet(cluster: Driver, readiness: Readiness, instruments: Instruments) -> list[LiveFamily]:
    unassigned = instruments.family("splitserve_num_requests_unassigned")
    num_unfitting = (
        cluster.scheduler.num_unfitting if any(e.takes_requests for e in cluster.executors) else 0
    )
    unassigned.add_metric(["fitting"], cluster.scheduler.num_waiting - num_unfitting)
    unassigned.add_metric(["unfitting"], num_unfitting)
    executors = instruments.family("splitserve_num_executors")
    states = Counter(map(_state_of, cluster.executors))
    for state in _STATES:
        executors.add_metric([state], states[state])
    ready = instruments.family("splitserve_ready")
    for each in Readiness:
        ready.add_metric([each.value], each is readiness)
    streams = instruments.family("splitserve_client_streams")
    streams.add_metric([], len(cluster.delivery.streams))
    unread = instruments.family("splitserve_unread_bytes")
    unread.add_metric([], cluster.delivery.unread.num_bytes)
    return [unassigned, executors, ready, streams, unread]


def _state_of(engine: ExecutorState) -> str:
    if engine.is_draining:
        return "draining"
    if not engine.is_connected:
        return "disconnected"
    if engine.is_withdrawn:
        return "withdrawn"
    if engine.is_failing:
        return "failing"
    return "serving" if engine.takes_requests else "late"


def _of_cores(cluster: Driver, instruments: Instruments) -> list[LiveFamily]:
    running = instruments.family("splitserve_num_requests_running")
    waiting = instruments.family("splitserve_num_requests_waiting")
    swapped = instruments.family("splitserve_num_requests_swapped")
    preemptions = instruments.family("splitserve_preemptions_total")
    prefixes = instruments.family("splitserve_prefix_tokens_total")
    drafts = instruments.family("splitserve_draft_tokens_total")
    for engine in cluster.executors:
        core, address = engine.engine, engine.address
        running.add_metric([address], core.num_running_requests)
        waiting.add_metric([address], core.num_waiting)
        swapped.add_metric([address], core.num_swapped)
        tally = core.placement.tally
        for (kind, cause), number in tally.preemptions.items():
            preemptions.add_metric([address, kind.value, cause.value], number)
        for source, number in tally.prefix_tokens.items():
            prefixes.add_metric([address, source.value], number)
        totals = core.draft_totals
        drafts.add_metric([address, "accepted"], totals.num_accepted)
        drafts.add_metric([address, "rejected"], totals.num_drafts - totals.num_accepted)
    return [running, waiting, swapped, preemptions, prefixes, drafts]


def _of_blocks(cluster: Driver, instruments: Instruments) -> list[LiveFamily]:
    blocks = instruments.family("splitserve_kv_blocks")
    usage = instruments.family("splitserve_kv_cache_usage_ratio")
    for engine in cluster.executors:
        address = engine.address
        for name, pool, num_deferred in _pools(engine.engine):
            num_used = pool.num_blocks - pool.num_free
            for state, number in (
                ("blank", pool.num_blank),
                ("cached", pool.num_free - pool.num_blank),
                ("referenced", num_used - num_deferred),
                ("deferred", num_deferred),
            ):
                blocks.add_metric([address, name, state], number)
            if pool.num_blocks:
                usage.add_metric([address, name], num_used / pool.num_blocks)
    return [blocks, usage]


def _of_adapters(cluster: Driver, instruments: Instruments) -> list[LiveFamily]:
    adapters = instruments.family("splitserve_adapters")
    loads = instruments.family("splitserve_adapter_loads_total")
    evictions = instruments.family("splitserve_adapter_evictions_total")
    running: set[str] = set()
    num_slots = 0
    for engine in cluster.executors:
        slots, address = engine.engine.adapter_slots, engine.address
        running |= set(engine.engine.placement.adapters)
        if not slots.loads_adapters:
            continue
        num_slots += slots.num_slots
        adapters.add_metric([address, "loaded"], slots.num_loaded)
        adapters.add_metric([address, "loading"], slots.num_loading)
        loads.add_metric([address, "loaded"], slots.num_loads)
        loads.add_metric([address, "failed"], slots.num_failures)
        evictions.add_metric([address], slots.num_evictions)
    num_waiting = cluster.scheduler.queue.num_of_adapters()
    engines = [each.engine for each in cluster.executors]
    blocked = instruments.family("splitserve_num_requests_waiting_for_adapter")
    blocked.add_metric(
        [],
        sum(
            number
            for adapter, number in num_waiting.items()
            if adapter and not any(adapter in each.adapter_slots.loaded for each in engines)
        ),
    )
    info = instruments.family("splitserve_lora_requests_info")
    info.add_metric([_names(running), _names(num_waiting), str(num_slots)], time.time())
    return [adapters, loads, evictions, blocked, info]


def _names(adapters: Iterable[str]) -> str:
    """Returns the names of adapters, without digests, as one label."""
    return ",".join(sorted({name_of(each) for each in adapters if each}))


def _pools(core: Engine) -> list[tuple[str, BlockPool, int]]:
    device, host = core.pools
    return [("device", device, core.placement.blocks.num_only_deferred), ("host", host, 0)]


class SchedulerMetrics:
    """Instruments of a scheduler process, and the page that shows them.

    `watch` is the watcher of the scheduler that feeds the instruments.
    """

    def __init__(self, address: MetricsAddress) -> None:
        self._address = address
        self._listener: MetricsListener | None = None
        self._instruments = Instruments(SCHEDULER_METRICS)
        ProcessCollector(registry=self._instruments.registry)
        GCCollector(registry=self._instruments.registry)
        self.watch = RequestWatch(self._instruments)

    def counted(self, audit: Audit, has_numbers: Callable[[str], bool]) -> CountedAudit:
        """Returns an audit log that counts events and passes them to `audit`; to be called once.

        `has_numbers` returns whether a tenant has metrics of its own: the configuration names it.
        """
        return CountedAudit(audit, self._instruments, has_numbers)

    def counted_calls(self, on_refusal: OnRefusal) -> OnRefusal:
        """Returns a callback that counts a refused call, then calls `on_refusal`; call once."""
        counter = self._instruments.counter("splitserve_calls_refused_total")
        return counted_refusals(counter, on_refusal)

    async def serve(self, cluster: Driver, readiness: Callable[[], Readiness]) -> str:
        """Starts the listener, and returns its address. Raises CannotListen and FilesUnusable."""
        self._listener = MetricsListener(self._address, lambda: self.page(cluster, readiness()))
        return await self._listener.start()

    async def close(self) -> None:
        """Stops the listener, if it was started."""
        if self._listener is not None:
            await self._listener.close()

    def page(self, cluster: Driver, readiness: Readiness) -> Page:
        """Returns the metrics page of this moment; to be called in the event loop."""
        state = _families(cluster, readiness, self._instruments)
        return Page(self._instruments.registry, [*state, *self.watch.families()])
