"""A scheduler behind its real port, in this process, so that a test can look into it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from scheduler_service.audit import Audit, NoAudit
from scheduler_service.callers import AllowAllCallers, Callers
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.request_limits import most_message_bytes
from scheduler_service.service import (
    AdminServicer,
    CallerNames,
    ExecutorAddresses,
    LiveServicer,
    RegistryServicer,
    SchedulerServicer,
    Sleep,
    caller_refusals,
    scopes_of,
)
from scheduler_service.watching import FramePacing, LifeRecorder, LiveView, Watcher
from scheduler_service.watching.request_traces import RequestTraces
from splitserve.scheduler.v1 import (
    admin_pb2_grpc,
    live_pb2_grpc,
    registry_pb2_grpc,
    scheduler_pb2_grpc,
)
from splitserve_common import AddressRules
from splitserve_rpc import Access, OnRefusal, RunningServer, ServerSecurity, bind_server
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import DIGEST

# Steps that a test holds are not to count as lost.
PATIENCE_S = 300.0
# The wall clock of frames.
UNIX_MS = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class SchedulerInProcess:
    """Running scheduler and its parts."""

    cluster: Driver
    servicer: SchedulerServicer
    address: str
    # Set when an executor has come or gone.
    changed: asyncio.Event
    view: LiveView

    async def wait_connected(self, num_executors: int) -> None:
        """Waits until exactly this number of executors is connected. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while sum(e.is_connected for e in self.cluster.executors) != num_executors:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def scheduler_in_process(
    *executors: FakeExecutor,
    config: ClusterConfig | None = None,
    callers: Callers | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    audit: Audit | None = None,
    sleep: Sleep = asyncio.sleep,
    scheduler_epoch: int = 1,
    watchers: Sequence[Watcher] = (),
    live_sleep: Sleep = asyncio.sleep,
    live_pace: FramePacing | None = None,
    live_unread_s: float = PATIENCE_S,
    traces: RequestTraces | None = None,
    counted_calls: Callable[[OnRefusal], OnRefusal] | None = None,
) -> AsyncIterator[SchedulerInProcess]:
    """A scheduler that `executors` have joined. `callers`: None to ask nobody who they are.

    `live_pace`: None for frames that take no time. `counted_calls`: as of SchedulerMetrics.
    """
    audit = audit or NoAudit()
    config = config or ClusterConfig(reconnect_timeout_s=0.1, step_patience_s=PATIENCE_S)
    changed = asyncio.Event()
    view = LiveView(lambda: UNIX_MS, pace=live_pace or FramePacing(lambda: 0), now_ns=now_ns)
    cluster = Driver(
        config,
        scheduler_epoch,
        changed.set,
        now_ns=now_ns,
        audit=audit,
        watchers=(view, *watchers),
    )
    callers = callers or AllowAllCallers()
    names = CallerNames(callers)
    on_refusal = caller_refusals(audit, names)
    if counted_calls is not None:
        on_refusal = counted_calls(on_refusal)
    running = bind_server(
        "127.0.0.1:0",
        (),
        most_message_bytes(config.max_model_len),
        lambda: cluster.served.max_message_bytes,
        ServerSecurity(Access(scopes_of=scopes_of(callers)), on_refusal=on_refusal),
    )
    servicer = SchedulerServicer(cluster, callers, audit, sleep, traces=traces)
    recorder = next((each for each in watchers if isinstance(each, LifeRecorder)), None)
    admin = AdminServicer(cluster, names, audit, recorder=recorder)
    _add(running, cluster, servicer, admin, audit)
    live = LiveServicer(cluster, view, names, audit, live_sleep, live_unread_s)
    live_pb2_grpc.add_LiveServiceServicer_to_server(live, running.server)
    await running.server.start()
    try:
        for executor in executors:
            executor.scheduler_address = f"127.0.0.1:{running.port}"
            executor.digest = DIGEST
            await executor.start()
        address = f"127.0.0.1:{running.port}"
        started = SchedulerInProcess(cluster, servicer, address, changed, view)
        await started.wait_connected(len(executors))
        yield started
    finally:
        await cluster.drain(0)
        await running.stop(0.1)
        for executor in executors:
            await executor.stop()


def _add(
    running: RunningServer,
    cluster: Driver,
    servicer: SchedulerServicer,
    admin: AdminServicer,
    audit: Audit,
) -> None:
    server = running.server
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    registry = RegistryServicer(cluster, ExecutorAddresses(AddressRules()), audit)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
