"""Composition root of the scheduler process: read config, wire, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

from scheduler_service.cluster import Cluster
from scheduler_service.config import SchedulerServiceConfig
from scheduler_service.journal.journal import open_journal
from scheduler_service.request_limits import most_message_bytes
from scheduler_service.service.admin import AdminServicer
from scheduler_service.service.registry import RegistryServicer
from scheduler_service.service.servicer import SchedulerServicer
from splitserve.scheduler.v1 import admin_pb2_grpc, registry_pb2_grpc, scheduler_pb2_grpc
from splitserve_options import options
from splitserve_rpc.addresses import CannotListen
from splitserve_rpc.server import bind_server, stop_event

SERVICE = "splitserve.scheduler.v1.SchedulerService"
_SERVICES = (
    SERVICE,
    "splitserve.scheduler.v1.RegistryService",
    "splitserve.scheduler.v1.AdminService",
)
_STOP_GRACE_S = 1.0

_log = logging.getLogger(__name__)


async def serve(config: SchedulerServiceConfig) -> None:
    """Serves until told to stop, then drains. Raises CannotListen."""
    stop = stop_event(config.exit_on_stdin_eof)
    most_bytes = most_message_bytes(config.cluster.max_model_len)
    running = bind_server(config.listen, _SERVICES, most_bytes, lambda: cluster.max_message_bytes)
    changed = asyncio.Event()
    scheduler_epoch = time.time_ns()
    journal = open_journal(config.journal, config.journal_max_bytes, scheduler_epoch)
    cluster = Cluster(config.cluster, scheduler_epoch, changed.set, journal=journal)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
        SchedulerServicer(cluster), running.server
    )
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(
        RegistryServicer(cluster), running.server
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(cluster), running.server)

    async def publish_health() -> None:
        while True:
            connected = any(engine.is_connected for engine in cluster.engines)
            await running.set_serving(("", SERVICE), connected)
            await changed.wait()
            changed.clear()

    health = asyncio.create_task(publish_health())
    await running.server.start()
    _log.info("scheduler_started listen=%s port=%d", config.listen, running.port)
    await stop.wait()
    _log.info("scheduler_draining num_unfinished=%d", cluster.num_unfinished)
    health.cancel()
    await running.set_serving(("", SERVICE), False)
    await cluster.drain(config.drain_timeout_s)
    await running.stop(_STOP_GRACE_S)
    journal.close()
    _log.info("scheduler_stopped")


def main() -> int:
    """Runs the process; the exit code tells."""
    values = options.parse("scheduler", sys.argv[1:], os.environ)
    try:
        config = SchedulerServiceConfig.from_options(values)
    except ValueError as error:
        sys.stderr.write(f"splitserve scheduler: {error}\n")
        return 2
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        asyncio.run(serve(config))
    except CannotListen as error:
        sys.stderr.write(f"splitserve scheduler: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
