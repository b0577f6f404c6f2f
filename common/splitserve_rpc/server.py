"""gRPC server with the parts of every process: health, reflection, keepalive, errors."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from splitserve_common import CannotListen, claim_address
from splitserve_rpc.access import Access
from splitserve_rpc.health_service import HealthService
from splitserve_rpc.interceptors import BoundaryInterceptor, OnRefusal, ignore_refusal
from splitserve_rpc.tls import Tls

# -- Limits for the connections and calls that peers of a gRPC server may hold open ----------------


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one server. gRPC cannot count by address; a proxy in front can.

    `max_connections`: further connections are closed at once. `max_streams`: concurrent calls of
    one connection; HTTP/2 clients hold the next call back. `handshake_s`: from the connection to
    the end of the TLS handshake and of the HTTP/2 preface. `idle_s`: time without any call before
    the connection is closed; gRPC clients connect again with the next call. `metadata_bytes`:
    headers of a call as HTTP/2 counts them; a credential may have 8 KiB.
    """

    max_connections: int = 4096
    max_streams: int = 4096
    handshake_s: float = 20.0
    idle_s: float = 300.0
    metadata_bytes: int = 16 * 1024

    def options(self) -> list[tuple[str, int]]:
        """Returns the limits as gRPC server options."""
        return [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", round(self.idle_s * 1000)),
            # Both are equal, since gRPC refuses sizes between the two at random.
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
        ]


LIMITS = ConnectionLimits()


# -- Tracker of the handlers of a server that have not ended: `OpenHandlers` -----------------------


class OpenHandlers(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Tracks the tasks that handle calls, from the start of a call to the end of its task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        task = asyncio.current_task()
        assert task is not None, "grpc.aio calls this in the handler's task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    async def wait_ended(self, timeout_s: float) -> bool:
        """Waits until no handler is open. Returns whether that happened within `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks


# -- Server ----------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# A message larger than the limit by up to this is refused with a reason, a larger one by gRPC.
_TOO_LARGE_BYTES = 1024 * 1024
# gRPC notices an unreachable peer after at most the sum of these; `peer_watch` is faster. Earlier
# releases accept one ping in 5 s, so pings must not be more frequent.
KEEPALIVE_S = 10.0
PING_TIMEOUT_S = 5.0
_LAST_HANDLERS_S = 0.2
# Time for an orphaned process to end by itself, after its drain.
_ORPHAN_GRACE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Bound server. Must be started after its servicers are registered."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    handlers: OpenHandlers
    port: int

    async def set_serving(self, services: Sequence[str], serving: bool) -> None:
        """Sets the health of `services`."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in services:
            await self.health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Ends all calls after at most `grace_s`, and waits briefly for their handlers.

        A handler that is pending when the event loop closes leaves a traceback in the log, such as
        a client that watches the health, which nothing else ends.
        """
        await self.server.stop(grace_s)
        await self.handlers.wait_ended(_LAST_HANDLERS_S)


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """Access control and TLS of a server. `tls`: None for plain text.

    `on_refusal`: called with the method, the call and the reason of every refused call.
    """

    access: Access
    tls: Tls | None = None
    has_reflection: bool = True
    on_refusal: OnRefusal = ignore_refusal


OPEN = ServerSecurity(Access())


def channel_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, max_receive_bytes: int | None = None
) -> list[tuple[str, int]]:
    """Returns the options of every channel and server: message sizes and keepalive pings."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_receive_bytes or max_message_bytes),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        # The ping has its own timeout, by default a minute.
        ("grpc.http2.ping_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", round(KEEPALIVE_S * 500)),
    ]


def bind_server(
    address: str,
    services: Sequence[str],
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    message_limit: Callable[[], int] | None = None,
    security: ServerSecurity = OPEN,
    limits: ConnectionLimits = LIMITS,
) -> RunningServer:
    """Makes a server on `address` (port 0: any free port). Raises CannotListen.

    `max_message_bytes`: maximum size of a message. `message_limit`: returns the current maximum, if
    it may change; None: always `max_message_bytes`.
    """
    claim_address(address)
    boundary = BoundaryInterceptor(
        message_limit or (lambda: max_message_bytes), security.access, security.on_refusal
    )
    options = channel_options(max_receive_bytes=max_message_bytes + _TOO_LARGE_BYTES)
    options += [("grpc.so_reuseport", 0), *limits.options()]
    handlers = OpenHandlers()
    server = grpc.aio.server(interceptors=[handlers, boundary], options=options)
    try:
        if security.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, security.tls.server_credentials())
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {address}: {error}") from error
    servicer = HealthService()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if security.has_reflection:
        reflection.enable_server_reflection(
            [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
    return RunningServer(server, servicer, handlers, port)


def stop_event(exit_on_stdin_eof: bool, drain_s: float) -> asyncio.Event:
    """Returns an event that is set by SIGTERM, SIGINT or, optionally, by the end of stdin.

    The end of stdin tells the processes of `splitserve serve` that their parent has ended, even if
    it was killed. No parent can then kill a process whose event loop or thread is blocked, so a
    process that does not end within `drain_s` and some seconds kills itself.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    if exit_on_stdin_eof:
        arguments = (lambda: loop.call_soon_threadsafe(event.set), drain_s + _ORPHAN_GRACE_S)
        threading.Thread(target=_end_at_eof, args=arguments, daemon=True).start()
    return event


def _end_at_eof(stop: Callable[[], object], grace_s: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    with suppress(RuntimeError):  # the event loop is already closed
        stop()
    time.sleep(grace_s)
    os._exit(1)
