"""A simulated scheduler: the real cluster and the real servicers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from scheduler_service.audit.events import AuditEvent, ExecutorLost
from scheduler_service.cluster import Cluster
from scheduler_service.config import ClusterConfig
from scheduler_service.service.executor_addresses import ExecutorAddresses
from scheduler_service.service.registry import RegistryServicer
from scheduler_service.service.servicer import SchedulerServicer
from splitserve.scheduler.v1 import registry_pb2_grpc, scheduler_pb2_grpc
from splitserve_rpc.address_rules import AddressRules
from tests.simulation.executor_process import BEGINNING_NS
from tests.simulation.network import Network
from tests.simulation.servers import Server
from tests.simulation.virtual_loop import Process, VirtualLoop

_DRAIN_S = 60.0


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
            num_steps = cluster.num_steps_answered
            self.losses.add((event.address, event.executor_epoch, num_steps))

    def close(self) -> None:
        """See Audit."""


@dataclass(slots=True)
class SimulatedScheduler:
    """One address, and the lives there; `loss_logs`: of each of them."""

    loop: VirtualLoop
    network: Network
    host: str
    config: ClusterConfig
    cluster: Cluster | None = None
    process: Process | None = None
    processes: list[Process] = field(default_factory=list)
    loss_logs: list[LossLog] = field(default_factory=list)
    _server: Server | None = None

    @property
    def address(self) -> str:
        """`host:port`; the same in every life."""
        return f"{self.host}:50051"

    def start(self) -> None:
        """Begins a life: it knows nobody."""
        if self.process is None:
            self.process = Process(self.loop, self.host)
            self.processes.append(self.process)
            self.process.start(self._serve())

    def kill(self, *, is_silent: bool = False) -> None:
        """As SIGKILL; `is_silent`: as if its machine went with it."""
        process, self.process, self.cluster = self.process, None, None
        if process is not None:
            self.network.let_go(process, is_silent=is_silent)
            process.kill()

    async def drain(self) -> None:
        """As SIGTERM. Called in its process."""
        assert self.cluster is not None
        assert self._server is not None
        await self.cluster.drain(_DRAIN_S)
        await self._server.stop(1.0)

    async def _serve(self) -> None:
        epoch = BEGINNING_NS + round(self.loop.time() * 1e9) + 1
        self.loss_logs.append(LossLog(self))
        self.cluster = cluster = Cluster(
            self.config,
            epoch,
            lambda: None,
            now_ns=partial(_monotonic_ns, self.loop),
            audit=self.loss_logs[-1],
        )
        self._server = server = Server(self.network, self.address)
        servicer = SchedulerServicer(cluster)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
        registry = RegistryServicer(cluster, ExecutorAddresses(AddressRules()))
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
        server.start()


def _monotonic_ns(loop: VirtualLoop) -> int:
    return round(loop.time() * 1e9)
