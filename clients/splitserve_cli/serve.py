"""Command `splitserve serve`: scheduler, executors and gateway as processes that end with it.

This module is imported before the first process starts: it imports no gRPC.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from splitserve_cli.serve_config import (
    CannotServe,
    ServeConfig,
    check_adapters,
    check_callers,
    check_draft_model,
    check_gateway,
    check_http,
    check_loopback,
    check_model,
    http_tls,
    metrics_flags,
    needs_key,
    on_gpus_of_their_own,
    reachable_address,
)
from splitserve_cli.supervisor import Child, Supervisor
from splitserve_common import (
    CannotListen,
    claim_address,
    is_loopback,
    listen_at,
    with_fewer_threads,
)
from splitserve_options import (
    CACHE_ENV,
    DEFAULT_CLUSTER_ADDRESS,
    ENV_PREFIX,
    Command,
    OptionKind,
    Value,
    options,
)

# Options that child processes get with values of their own.
_OWN = (
    *("listen", "cluster_listen", "scheduler", "advertise_address", "http", "metrics_listen"),
    *("live_listen", "live_schedulers"),
)
# Default address of the live page.
_LIVE = "127.0.0.1:8001"


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns the exit code: 0 after Ctrl-C or SIGTERM, 1 if serving is impossible.
    """
    started_at = time.monotonic()
    values = options.parse("serve", argv, os.environ)
    errors = _json_errors(values)
    try:
        if not values["insecure"]:
            check_loopback("listen", values["listen"])
            check_loopback("cluster-listen", values["cluster_listen"])
            check_loopback("metrics-listen", values["metrics_listen"])
            check_http(values)
            check_http(values, "live-listen")
        check_callers(values)
        check_model(str(values["model"]))
        check_draft_model(values)
        check_adapters(values)
        listen = claim_address(str(values["listen"]))
        cluster = _claim_cluster(values["cluster_listen"], listen)
        http = None if values["no_http"] else _claim_http(str(values["http"]))
        live = None if http is None or values["no_live"] else claim_live(values["live_listen"])
    except (CannotServe, CannotListen) as error:
        sys.stderr.write(f"splitserve serve: {error}\n")
        return 1
    addresses = _Addresses(listen, cluster, http, live)
    return asyncio.run(_supervisor(values, addresses, started_at, errors).run())


def _json_errors(values: Mapping[str, Value]) -> TextIO | None:
    """Returns the log file of child processes: their standard error is converted to JSON.

    None for text logs.
    """
    if values["log_format"] == "text":
        return None
    from splitserve_common import start_logging

    errors = start_logging(str(values["log_level"]), str(values["log_format"]))
    return None if errors is None else errors.file


def _claim_cluster(cluster: Value, listen: str) -> str:
    """Claims the address for executors and operators; by default only this machine can reach it."""
    if cluster is None and is_loopback(listen):
        return listen
    return claim_address(str(cluster or DEFAULT_CLUSTER_ADDRESS))


def _claim_http(http: str) -> str:
    check_gateway()
    return claim_address(http)


@dataclass(frozen=True, slots=True)
class _Live:
    """Address of the live page. `listening`: bound socket that the gateway inherits, if any."""

    address: str
    listening: socket.socket | None = None

    @property
    def flags(self) -> list[str]:
        """Flags of the gateway for the live page."""
        flags = [f"--live-listen={self.address}"]
        if self.listening is not None:
            flags.append(f"--live-socket={self.listening.fileno()}")
        return flags


def claim_live(live: Value) -> _Live:
    """Claims the given address of the live page, or a free one.

    Keeps the socket of a free address, as other processes also search for free addresses.
    """
    if live is not None:
        return _Live(claim_address(str(live)))
    try:
        listening = listen_at(_LIVE)
    except CannotListen:
        listening = listen_at("127.0.0.1:0")
    host, port = listening.getsockname()
    return _Live(f"{host}:{port}", listening)


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Addresses on which the processes listen; None for a process that does not run."""

    listen: str
    cluster: str
    http: str | None
    live: _Live | None


def _supervisor(
    values: Mapping[str, Value],
    addresses: _Addresses,
    started_at: float,
    errors: TextIO | None,
) -> Supervisor:
    listen, cluster = addresses.listen, addresses.cluster
    http, live = addresses.http, addresses.live
    environ = with_fewer_threads(environ_of_children(os.environ))
    address = reachable_address(listen)
    listens = [f"--listen={listen}", f"--cluster-listen={cluster}"]
    # The executors listen on this machine only, from whichever address they register.
    near = "--executor-addresses=127.0.0.1"
    # Cluster token of these processes alone: any other executor that registered would receive the
    # prompts.
    token = secrets.token_urlsafe(32) if values["cluster_token_file"] is None else None
    # Operators cannot know this token, so it is not required of them.
    operators = [] if token is None else ["--no-operator-token"]
    metrics = metrics_flags(values)
    scheduler_options = [*listens, near, *operators, *next(metrics), *_flags("scheduler", values)]
    for_gateway = next(metrics)
    scheduler = f"--scheduler={reachable_address(cluster)}"
    executor_options = [scheduler, *_flags("executor", values)]
    num_executors = values["num_executors"]
    assert isinstance(num_executors, int), "an integer option"
    executors = [
        Child(
            f"executor {number}",
            "executor_service",
            [*flags, *next(metrics)],
            environ,
            token,
            errors,
        )
        for number, flags in enumerate(on_gpus_of_their_own(executor_options, num_executors), 1)
    ]
    drain_timeout_s = values["drain_timeout_s"]
    assert isinstance(drain_timeout_s, float), "a number option"
    config = ServeConfig(
        address=address,
        http=None if http is None else reachable_address(http),
        model=str(values["served_model_name"] or values["model"]),
        with_demo=not values["no_demo"],
        drain_timeout_s=drain_timeout_s,
        started_at=started_at,
        http_tls=http_tls(values),
        needs_key=needs_key(values),
        live=None if live is None else reachable_address(live.address),
        operators=None if cluster == listen else reachable_address(cluster),
    )
    scheduling = Child(
        "the scheduler", "scheduler_service", scheduler_options, environ, token, errors
    )
    gateway = None
    if http is not None:
        gateway_options = [
            f"--http={http}",
            f"--schedulers={address}",
            *([] if live is None else live.flags),
            f"--live-schedulers={reachable_address(cluster)}",
            *for_gateway,
            *_flags("gateway", values),
        ]
        gateway = Child(
            "the gateway",
            "splitserve_gateway",
            gateway_options,
            environ,
            errors=errors,
            listening=None if live is None else live.listening,
        )
    return Supervisor(config, scheduling, executors, gateway)


def environ_of_children(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the services: without options, which all are passed as flags.

    A service would also read variables that are meant for another one.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in CACHE_ENV or not name.startswith(ENV_PREFIX)
    }


def _flags(command: Command, values: Mapping[str, Value]) -> list[str]:
    """Returns the given options of `command` as flags."""
    flags = []
    for option in options.options_of(command):
        value = values.get(option.key)
        if value is None or option.key in _OWN:
            continue
        if option.kind is not OptionKind.SWITCH:
            flags.append(f"{option.flag}={value}")
        elif value:
            flags.append(option.flag)
    return flags
