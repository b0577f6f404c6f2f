"""A simulated scheduler: the real cluster, servicers and readiness."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_service.service import REGISTRY_SERVICE
from scheduler_service.audit import AuditEvent, ExecutorLost
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.journal import FileJournal, Journal, NoJournal
from scheduler_service.service import (
    ExecutorAddresses,
    Readiness,
    ReadinessWatch,
    RegistryServicer,
    SchedulerServicer,
)
from scheduler_service.watching import LifeRecorder
from splitserve.scheduler.v1 import registry_pb2_grpc, scheduler_pb2_grpc
from splitserve_common import AddressRules
from splitserve_rpc import HealthService
from tests.simulation.executor_process import BEGINNING_NS
from tests.simulation.network import Network
from tests.simulation.servers import Server
from tests.simulation.virtual_loop import Process, VirtualLoop

_NUM_LIVES = 1000
_DRAIN_S = 4.0
_JOURNAL_BYTES = 2**26
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(slots=True)
class LossLog:
    """Stands for an audit log: which executors one life of the scheduler lost.

    A life of an executor that is lost again counts if a step was answered in between, by whomever.
    """

    scheduler: SimulatedScheduler
    losses: set[tuple[str, int, int]] = field(default_factory=set)

    def record(self, event: AuditEvent) -> None:
        """See Audit."""
        cluster = self.scheduler.cluster
        if isinstance(event, ExecutorLost) and cluster is not None:
            num_steps = cluster.membership.num_steps_answered
            self.losses.add((event.address, event.executor_epoch, num_steps))

    def close(self) -> None:
        """See Audit."""


@dataclass(slots=True)
class SimulatedScheduler:
    """One address, and the lives there; `loss_logs`: of each of them. `peers`: all schedulers.

    `recorder`: what the latest life has written down of requests.
    `journal_folder`: where each life records its scheduler, None if none does.
    """

    loop: VirtualLoop
    network: Network
    host: str
    config: ClusterConfig
    journal_folder: Path | None = None
    peers: tuple[str, ...] = ()
    cluster: Driver | None = None
    process: Process | None = None
    processes: list[Process] = field(default_factory=list)
    loss_logs: list[LossLog] = field(default_factory=list)
    recorder: LifeRecorder | None = None
    _is_wanted: bool = False
    _stop: asyncio.Event | None = None
    _journal: Journal = field(default_factory=NoJournal)

    @property
    def address(self) -> str:
        """`host:port`; the same in every life."""
        return f"{self.host}:50051"

    def start(self) -> None:
        """Begins a life, if need be when the last has ended: it knows nobody."""
        self._is_wanted = True
        if self.process is None:
            self.process = Process(self.loop, self.host)
            self.processes.append(self.process)
            self.process.start(self._live(self.process))

    def kill(self, *, is_silent: bool = False) -> None:
        """As SIGKILL; `is_silent`: as if its machine went with it."""
        self._is_wanted = False
        process, self.process, self.cluster = self.process, None, None
        if process is not None:
            self.network.let_go(process, is_silent=is_silent)
            process.kill()
            self._journal.close()

    def stop(self) -> None:
        """As SIGTERM: it lets requests end for a while, says where else to go, and ends."""
        if self.process is not None and self._stop is not None:
            self._is_wanted = False
            self._stop.set()

    async def _live(self, process: Process) -> None:
        self._stop = stop = asyncio.Event()
        epoch = BEGINNING_NS + round(self.loop.time() * 1e9) + 1
        self.loss_logs.append(LossLog(self))
        self._journal = journal = self._new_journal(epoch)
        changed, now_ns = asyncio.Event(), partial(_monotonic_ns, self.loop)
        self.recorder = recorder = LifeRecorder(_NUM_LIVES, now_ns)
        self.cluster = cluster = Driver(
            self.config,
            epoch,
            changed.set,
            now_ns=now_ns,
            journal=journal,
            audit=self.loss_logs[-1],
            watchers=(recorder,),
        )
        health = HealthService()
        await health.set(REGISTRY_SERVICE, _SERVING)
        readiness = ReadinessWatch(cluster, partial(_publish, health))
        server = self._server(cluster, health, readiness)
        server.start()
        watching = asyncio.create_task(readiness.run(changed)) if self.peers else None
        await stop.wait()
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await health.set(REGISTRY_SERVICE, _NOT_SERVING)
        draining = asyncio.create_task(cluster.drain(_DRAIN_S, self.peers))
        await asyncio.sleep(0)  # so that it has begun
        await readiness.look()
        await draining
        await server.stop(1.0)
        journal.close()
        self.network.let_go(process, is_silent=False)
        if self.process is process:
            self.process = self.cluster = None
            if self._is_wanted:
                self.start()

    def _new_journal(self, epoch: int) -> Journal:
        if self.journal_folder is None:
            return NoJournal()
        return FileJournal(self.journal_folder / f"{self.host}-{epoch}", _JOURNAL_BYTES)

    def _server(self, cluster: Driver, health: HealthService, readiness: ReadinessWatch) -> Server:
        server = Server(self.network, self.address)
        # With one there is nowhere else to go: clients do not ask.
        knows = (lambda: readiness.current) if self.peers else (lambda: Readiness.READY)
        servicer = SchedulerServicer(cluster, readiness=knows)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
        registry = RegistryServicer(cluster, ExecutorAddresses(AddressRules()))
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        return server


async def _publish(health: HealthService, is_serving: bool) -> None:
    await health.set("", _SERVING if is_serving else _NOT_SERVING)


def _monotonic_ns(loop: VirtualLoop) -> int:
    return round(loop.time() * 1e9)
