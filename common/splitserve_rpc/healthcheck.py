"""`python -m splitserve_rpc.healthcheck [ADDRESS]`: 0 if a splitserve process is healthy.

Asks the standard gRPC health service; made for HEALTHCHECK and probes. ADDRESS is `host:port`, by
default the value of `SPLITSERVE_CLUSTER_LISTEN` or else `SPLITSERVE_LISTEN`, as reached from this
machine. The TLS files are those that the environment names for the process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve_rpc.health_service import ALIVE
from splitserve_rpc.security import Security, SecurityUnusable
from splitserve_rpc.tls import Tls

_WILDCARD_HOSTS = ("", "*", "0.0.0.0", "[::]", "::")


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks once. Returns 0 if the server is SERVING, else 1 with the reason on stderr."""
    options = _parse(arguments)
    address = local_address(options.address)
    try:
        identity = Security.from_options(_tls_files(os.environ)).identity
    except SecurityUnusable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    with _channel(address, identity.tls, options.name) as channel:
        status, problem = check(channel, options.service, options.timeout)
    serving = health_pb2.HealthCheckResponse.SERVING
    if problem or status != serving:
        name = problem or health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        sys.stderr.write(f"{address}: {name}\n")
        return 1
    return 0


def check(channel: grpc.Channel, service: str, timeout_s: float) -> tuple[int, str]:
    """Asks the health service once. Returns the ServingStatus and an error, empty if answered."""
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.RpcError as error:
        return health_pb2.HealthCheckResponse.UNKNOWN, f"{error.code().name} {error.details()}"
    return response.status, ""


def _channel(address: str, tls: Tls | None, name: str | None) -> grpc.Channel:
    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(address, options)
    if name is not None:
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(address, tls.channel_credentials(), options)


def _tls_files(environ: Mapping[str, str]) -> dict[str, str | None]:
    names = ("tls_cert", "tls_key", "tls_ca")
    return {name: environ.get(f"SPLITSERVE_{name.upper()}") or None for name in names}


def local_address(listen_address: str) -> str:
    """Returns the address at which this machine reaches a process listening on `listen_address`."""
    host, separator, port = listen_address.rpartition(":")
    return f"127.0.0.1:{port}" if separator and host in _WILDCARD_HOSTS else listen_address


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="splitserve_rpc.healthcheck", description=__doc__)
    # The cluster address comes first: the environment names the TLS files that it uses.
    own = ("SPLITSERVE_CLUSTER_LISTEN", "SPLITSERVE_LISTEN")
    values = [os.environ[name] for name in own if os.environ.get(name)]
    default = values[0] if values else "127.0.0.1:50051"
    parser.add_argument("address", nargs="?", default=default, help="host:port")
    checked = parser.add_mutually_exclusive_group()
    checked.add_argument("--service", default="", help="health service name (default: the server)")
    parser.add_argument("--name", help="name in its certificate (default: ADDRESS's host)")
    checked.add_argument(
        "--alive",
        dest="service",
        action="store_const",
        const=ALIVE,
        help="check only that it answers, like --service alive",
    )
    parser.add_argument(
        "--timeout", type=float, default=3.0, help="deadline in seconds (default: 3)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
