"""Composition root of the scheduler process: reads options, wires the parts, serves, drains."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from scheduler_service.adapters import AdapterRegistry
from scheduler_service.audit import Audit, AuditUnusable, open_audit
from scheduler_service.callers import Callers, OpenedCallers, open_callers
from scheduler_service.config import SchedulerServiceConfig
from scheduler_service.driver import Driver
from scheduler_service.executors import ExecutorLink
from scheduler_service.journal import JournalUnusable, open_journal
from scheduler_service.request_limits import most_message_bytes
from scheduler_service.service import (
    AdminServicer,
    CallerNames,
    ExecutorAddresses,
    LiveServicer,
    ReadinessWatch,
    RegistryServicer,
    SchedulerServicer,
    caller_refusals,
    scopes_of,
)
from scheduler_service.watching import LifeRecorder, LiveView
from splitserve.scheduler.v1 import (
    admin_pb2_grpc,
    live_pb2_grpc,
    registry_pb2_grpc,
    scheduler_pb2_grpc,
)
from splitserve_common import (
    CannotListen,
    Discovery,
    FilesUnusable,
    discovery,
    is_loopback,
    say_why_not,
    start_logging,
)
from splitserve_options import options
from splitserve_rpc import (
    Access,
    CertificateEnds,
    OnRefusal,
    Role,
    RunningServer,
    SecurityUnusable,
    ServerSecurity,
    bind_server,
    stop_event,
)

SERVICE = "splitserve.scheduler.v1.SchedulerService"
_CLUSTER_SERVICES = (
    "splitserve.scheduler.v1.RegistryService",
    "splitserve.scheduler.v1.AdminService",
    "splitserve.scheduler.v1.LiveService",
)
_STOP_GRACE_S = 1.0
_ADAPTERS_FILE_PERIOD_S = 1.0

if TYPE_CHECKING:
    from scheduler_service.service import SchedulerMetrics
    from scheduler_service.watching.request_traces import RequestTraces

_log = logging.getLogger("scheduler_service")


async def serve(config: SchedulerServiceConfig, opened: OpenedCallers) -> None:
    """Serves until the process is told to stop, then drains.

    Raises CannotListen, JournalUnusable and AuditUnusable.
    """
    stop = stop_event(config.exit_on_stdin_eof, config.drain_timeout_s)
    peers = None if config.peers is None else discovery(config.peers)
    metrics = _open_metrics(config)
    traces = _open_traces(config)
    audit = open_audit(config.audit_log)
    if metrics is not None:
        audit = metrics.counted(audit, partial(_is_configured, config, opened))
    for_clients, for_cluster = _bind(
        config,
        opened.callers,
        _on_refusal(metrics, audit, opened.callers),
        lambda: cluster.served.max_message_bytes,
    )
    changed = asyncio.Event()
    scheduler_epoch = time.time_ns()
    journal = open_journal(config.journal, config.journal_max_bytes)
    recorder, live = _open_recorder(config), LiveView()
    watchers = [None if metrics is None else metrics.watch, recorder, traces, live]
    connect = partial(ExecutorLink, identity=config.security.identity)
    adapters = await _open_adapters(config)
    cluster = Driver(
        config.cluster,
        scheduler_epoch,
        changed.set,
        journal=journal,
        audit=audit,
        watchers=[each for each in watchers if each is not None],
        connect=connect,
        adapters=adapters,
    )
    if opened.tenants is not None:
        cluster.weigh_tenants(opened.tenant_weights)
    readiness = ReadinessWatch(cluster, partial(for_clients.set_serving, ("", SERVICE)))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
        SchedulerServicer(
            cluster, opened.callers, audit, readiness=lambda: readiness.current, traces=traces
        ),
        for_clients.server,
    )
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(
        RegistryServicer(cluster, ExecutorAddresses(config.executor_addresses), audit),
        for_cluster.server,
    )
    _add_operators(
        for_cluster,
        AdminServicer(
            cluster, CallerNames(opened.callers), audit, config.drain_timeout_s, recorder
        ),
        LiveServicer(cluster, live, CallerNames(opened.callers), audit),
    )
    servers = list({id(running): running for running in (for_clients, for_cluster)}.values())

    # Fetch the issuer's keys before the first call, so that the first tokens can be verified.
    await opened.refresh_token_keys()
    refreshing = opened.keep_fresh(cluster.weigh_tenants, audit=audit)
    # Executors register only while the cluster services are SERVING. The health of the client
    # service, which needs an executor, is published by `ReadinessWatch`.
    await for_cluster.set_serving(_CLUSTER_SERVICES, True)
    ends = CertificateEnds(config.security.shown)
    background_tasks = [
        asyncio.create_task(work)
        for work in (
            readiness.run(changed),
            refreshing,
            ends.keep_looking(),
            adapters.keep_fresh(partial(asyncio.sleep, _ADAPTERS_FILE_PERIOD_S)),
        )
    ]
    # The metrics listener may find its port taken. It starts first, while no server has to be
    # stopped for that.
    if metrics is not None:
        await metrics.serve(cluster, lambda: readiness.current)
    for running in servers:
        await running.server.start()
    _log.info(
        "scheduler_started listen=%s port=%d cluster_port=%d",
        config.listen,
        for_clients.port,
        for_cluster.port,
    )
    if opened.callers.knows_callers and not config.security.identity.is_proof:
        # Any process that reaches the cluster port can register, and would get all prompts.
        _log.warning("executors_unauthenticated cluster_listen=%s", config.cluster_listen)
    # The objects made so far live as long as the process. Frozen, they cost no time in later
    # collections, during which steps would wait.
    gc.collect()
    gc.freeze()
    await stop.wait()
    _log.info("scheduler_draining num_unfinished=%d", cluster.num_unfinished)
    for task in background_tasks:
        task.cancel()
    await for_cluster.set_serving(_CLUSTER_SERVICES, False)
    await _drain(cluster, readiness, config.drain_timeout_s, await _addresses(peers))
    await asyncio.gather(*(running.stop(_STOP_GRACE_S) for running in servers))
    if metrics is not None:
        await metrics.close()
    if traces is not None:
        await asyncio.to_thread(traces.close)
    journal.close()
    await asyncio.to_thread(audit.close)
    _log.info("scheduler_stopped")


async def _open_adapters(config: SchedulerServiceConfig) -> AdapterRegistry:
    adapters = AdapterRegistry(config.adapters, config.adapters_dir, config.adapters_file)
    await adapters.read_file()
    return adapters


async def _drain(
    cluster: Driver, readiness: ReadinessWatch, patience_s: float, peers: tuple[str, ...]
) -> None:
    """Drains the scheduler for up to `patience_s` seconds, and publishes DRAINING at once."""
    draining = asyncio.create_task(cluster.drain(patience_s, peers))
    await asyncio.sleep(0)  # lets `drain` set its state before readiness is looked at
    await readiness.look()
    await draining


def _add_operators(running: RunningServer, admin: AdminServicer, live: LiveServicer) -> None:
    """Adds the services for operators, AdminService and LiveService, to a server."""
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, running.server)
    live_pb2_grpc.add_LiveServiceServicer_to_server(live, running.server)


def _open_metrics(config: SchedulerServiceConfig) -> SchedulerMetrics | None:
    """Returns the metrics; None if metrics are off: no module is imported, nothing is counted."""
    if config.metrics is None:
        return None
    from scheduler_service.service import SchedulerMetrics

    return SchedulerMetrics(config.metrics)


def _on_refusal(metrics: SchedulerMetrics | None, audit: Audit, callers: Callers) -> OnRefusal:
    """Returns the callback for refused calls: writes them to the audit log, and counts them."""
    on_refusal = caller_refusals(audit, CallerNames(callers))
    return on_refusal if metrics is None else metrics.counted_calls(on_refusal)


def _open_traces(config: SchedulerServiceConfig) -> RequestTraces | None:
    """Returns the request traces; None if tracing is off: no tracing module is imported."""
    if config.traces is None:
        return None
    from scheduler_service.watching.request_traces import SERVICE as SERVICE_IN_TRACES
    from scheduler_service.watching.request_traces import RequestTraces
    from splitserve_tracing.tracing import Tracing

    return RequestTraces(Tracing(config.traces, SERVICE_IN_TRACES))


def _open_recorder(config: SchedulerServiceConfig) -> LifeRecorder | None:
    """Returns the recorder of requests for Explain; None if no requests are remembered."""
    if not config.remember_requests:
        return None
    return LifeRecorder(config.remember_requests, time.monotonic_ns)


def _is_configured(config: SchedulerServiceConfig, opened: OpenedCallers, tenant: str) -> bool:
    """Returns whether the tenants file or `--tenant-weights` names `tenant`."""
    named = {} if opened.tenants is None else opened.tenants.value.named
    return tenant in named or tenant in config.cluster.policies.tenant_weights


async def _addresses(peers: Discovery | None) -> tuple[str, ...]:
    """Returns the addresses of the other schedulers; empty if they cannot be looked up."""
    try:
        return () if peers is None else await peers.addresses()
    except OSError as error:
        _log.warning("peers_not_known problem=%r", str(error))
        return ()


def _bind(
    config: SchedulerServiceConfig,
    callers: Callers,
    on_refusal: OnRefusal,
    message_limit: Callable[[], int],
) -> tuple[RunningServer, RunningServer]:
    """Binds and returns the servers for clients and for the cluster.

    Both are the same server if both addresses are the same.
    """
    most_bytes = most_message_bytes(config.cluster.max_model_len)
    identity = config.security.identity
    unchecked = (Role.OPERATOR,) if config.no_operator_token else ()
    access = Access(identity, scopes_of(callers), unchecked)
    has_one = config.cluster_listen == config.listen
    services = (SERVICE, *(_CLUSTER_SERVICES if has_one else ()))
    for_clients = bind_server(
        config.listen,
        services,
        most_bytes,
        message_limit,
        ServerSecurity(
            access,
            config.security.client_tls,
            has_reflection=is_loopback(config.listen),
            on_refusal=on_refusal,
        ),
    )
    if has_one:
        return for_clients, for_clients
    for_cluster = bind_server(
        config.cluster_listen,
        _CLUSTER_SERVICES,
        security=ServerSecurity(
            access,
            identity.tls,
            has_reflection=is_loopback(config.cluster_listen),
            on_refusal=on_refusal,
        ),
    )
    return for_clients, for_cluster


def main() -> int:
    """Runs the scheduler process, and returns its exit code.

    0: stopped in order. 1: cannot listen. 2: options, files, journal or audit log are unusable.
    """
    values = options.parse("scheduler", sys.argv[1:], os.environ)
    start_logging(str(values["log_level"]), str(values["log_format"]))
    try:
        config = SchedulerServiceConfig.from_options(values)
        opened = open_callers(config.callers)
    except (ValueError, SecurityUnusable, FilesUnusable) as error:
        say_why_not("scheduler", error)
        return 2
    try:
        asyncio.run(serve(config, opened))
    except CannotListen as error:
        say_why_not("scheduler", error)
        return 1
    except (JournalUnusable, AuditUnusable) as error:
        say_why_not("scheduler", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
