"""Composition root of the gateway process: reads the configuration, serves HTTP, drains."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve_client import CredentialsUnusable
from splitserve_common import CannotListen, FilesUnusable, claim_address, say_why_not, start_logging
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from splitserve_options import options
from splitserve_rpc import CertificateEnds, SecurityUnusable, stop_event

if TYPE_CHECKING:
    from splitserve_gateway.live_page import LivePage
    from splitserve_gateway.metrics import GatewayMetrics
    from splitserve_gateway.tracing import GatewayTraces

_log = logging.getLogger("splitserve_gateway")


def main() -> int:
    """Runs the gateway process.

    Returns the exit code: 1 for a failed start, 2 for a bad configuration.
    """
    values = options.parse("gateway", sys.argv[1:], os.environ)
    start_logging(str(values["log_level"]), str(values["log_format"]))
    # Uvicorn logs a line for every malformed request.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        config = GatewayConfig.from_options(values)
    except (SecurityUnusable, FilesUnusable) as error:
        say_why_not("gateway", error)
        return 2
    try:
        address = claim_address(config.http)
        metrics = _open_metrics(config)
        traces = _open_traces(config)
        server = Server(config, address, metrics, traces)
        live = _open_live(config, server)
    except (CannotListen, FilesUnusable, CredentialsUnusable) as error:
        say_why_not("gateway", error)
        return 1
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        try:
            runner.run(serve(config, server, address, _SideServices(metrics, live)))
        except CannotListen as error:
            say_why_not("gateway", error)
            return 1
    if traces is not None:
        traces.tracing.close()
    return 0


def _open_metrics(config: GatewayConfig) -> GatewayMetrics | None:
    """Returns the metrics; None, without an import, if they are off. Raises FilesUnusable."""
    if config.metrics is None:
        return None
    from splitserve_gateway.metrics import GatewayMetrics

    return GatewayMetrics(config.metrics)


def _open_live(config: GatewayConfig, server: Server) -> LivePage | None:
    """Returns the live page; None if it is off. Raises FilesUnusable and CannotListen."""
    if config.live is None:
        return None
    from splitserve_gateway.live_page import LivePage

    return LivePage(config, config.live, lambda: server.app.state.callers)


def _open_traces(config: GatewayConfig) -> GatewayTraces | None:
    """Returns the traces; None, without an import, if tracing is off."""
    if config.traces is None:
        return None
    from splitserve_gateway.tracing import SERVICE, GatewayTraces
    from splitserve_tracing.tracing import Tracing

    return GatewayTraces(Tracing(config.traces, SERVICE))


@dataclass(frozen=True, slots=True)
class _SideServices:
    """Services at separate addresses; None if off."""

    metrics: GatewayMetrics | None
    live: LivePage | None

    async def start(self) -> None:
        """Starts the services. Raises CannotListen for the address of `metrics`."""
        if self.metrics is not None:
            await self.metrics.serve()
        if self.live is not None:
            self.live.start()

    async def close(self) -> None:
        if self.live is not None:
            await self.live.close()
        if self.metrics is not None:
            await self.metrics.close()


async def serve(
    config: GatewayConfig, server: Server, address: str, side_services: _SideServices
) -> None:
    """Serves until a stop signal, then drains. A second signal ends open requests at once.

    Raises CannotListen for an address of `side_services`.
    """
    await side_services.start()
    stop = stop_event(config.exit_on_stdin_eof, config.drain_timeout_s)
    serving = asyncio.create_task(server.serve())
    stopping = asyncio.create_task(stop.wait())
    ends = CertificateEnds((config.http_tls, config.scheduler_tls))
    looking = asyncio.create_task(ends.keep_looking())
    _log.info("gateway_serving address=%s", address)
    # Objects that exist now are permanent: excludes them from garbage collection.
    gc.collect()
    gc.freeze()
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    looking.cancel()
    exchanges = server.exchanges
    _log.info("gateway_draining num_requests=%d", exchanges.num_open)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, exchanges.end_all)
    await exchanges.drain(config.drain_timeout_s)
    server.should_exit = True
    await serving
    await side_services.close()


if __name__ == "__main__":
    sys.exit(main())
