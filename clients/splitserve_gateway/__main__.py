"""Composition root of the gateway process: read config, serve HTTP, drain."""

from __future__ import annotations

import logging
import os
import sys

import uvicorn

from splitserve_gateway.app import build_app
from splitserve_gateway.config import GatewayConfig
from splitserve_options import options


def main() -> int:
    """Runs the process; the exit code tells."""
    config = GatewayConfig.from_options(options.parse("gateway", sys.argv[1:], os.environ))
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    host, _, port = config.http.rpartition(":")
    uvicorn.run(
        build_app(config),
        host=host.strip("[]"),
        port=int(port),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(config.drain_timeout_s),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
