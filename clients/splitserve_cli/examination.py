"""Checks of `splitserve doctor`, run once its packages are known to be installed."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from splitserve_cli.checks.adapters import check_adapters
from splitserve_cli.checks.cluster import check_executors, check_model, check_tool_calls
from splitserve_cli.checks.connection import TlsWords, check_connection
from splitserve_cli.checks.finding import (
    Finding,
    State,
    check_settings,
    listened_at,
    write_findings,
    wrong,
)
from splitserve_cli.checks.gateway import GatewayAddress, check_gateway
from splitserve_cli.checks.machine import (
    check_compilers,
    check_file_limit,
    check_instructions,
    check_memory,
    check_shared_memory,
    check_swap,
    check_threads,
    compiler_problems,
    has_gpu,
    num_cores,
)
from splitserve_cli.checks.packages import (
    check_packages,
    check_python,
    check_torch,
    command_installed,
    installed_version,
)
from splitserve_cli.checks.ports import (
    check_port,
    check_process_files,
    check_tls_files,
    check_twice,
)
from splitserve_cli.command_line import add_operators_server, ask, environment_key, operators_config
from splitserve_client import ApiKey, AsyncClient, ClientConfig, CredentialsUnusable, Model
from splitserve_common import FilesUnusable, discovery
from splitserve_options import COMMANDS, Command, Value
from splitserve_rpc import SecurityUnusable, TlsFiles

_EPILOG = """\
exit code: 0 nothing is wrong (there may be warnings); 1 something is wrong. Without --address and
--gateway only this machine is checked. Nothing is changed.
"""


def examine(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = _parse(argv)
    findings = [*local_findings(arguments, os.environ), *asyncio.run(_remote_findings(arguments))]
    return write_findings(findings, is_json=arguments.json, shows_all=arguments.verbose)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="splitserve doctor",
        description="Finds problems on this machine and in running processes.",
        epilog=_EPILOG,
    )
    add_operators_server(parser)
    # No default server: the user must name the server.
    parser.set_defaults(address=os.environ.get("SPLITSERVE_ADDRESS") or None)
    parser.add_argument(
        "--gateway", metavar="URL", help="URL of a gateway, such as http://localhost:8000"
    )
    parser.add_argument(
        "--for",
        dest="command",
        choices=COMMANDS,
        help="process whose packages, options, ports and certificates are checked"
        " (default: according to the installed extras; serve with all of them)",
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="file with the options of that process"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--verbose", action="store_true", help="also list checks without problems")
    return parser.parse_args(argv)


def local_findings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about this machine, and about the options of a process to be run on it."""
    command: Command = arguments.command or command_installed()
    findings, values = check_settings(command, arguments.config, environ)
    yield check_python()
    yield from check_packages(arguments.command, has_traces=values.get("traces_to") is not None)
    if command in ("serve", "executor"):
        yield from _findings_of_computing(values, environ)
    yield check_memory()
    yield check_swap()
    yield check_shared_memory()
    yield check_file_limit()
    yield from findings
    addresses = list(listened_at(command, values))
    yield from check_twice(addresses)
    is_running = arguments.address is not None or arguments.gateway is not None
    by_address = {address: option for option, address in reversed(addresses)}
    for address, option in by_address.items():
        yield check_port(option, address, is_running=is_running)
    yield from check_process_files(command, values)
    yield from check_adapters(values)
    client_files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    yield from check_tls_files(client_files)


def _findings_of_computing(
    values: Mapping[str, Value], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields findings about requirements of executors.

    `values`: their options; empty if invalid.
    """
    device = values.get("device")
    torch = check_torch(device, has_gpu(), installed_version("torch"))
    yield from [] if torch is None else [torch]
    # Without CUDA support, torch computes on the CPU despite a GPU.
    is_on_gpu = device != "cpu" and has_gpu() and torch is None
    yield from check_compilers(compiler_problems(), is_on_gpu=is_on_gpu)
    yield check_instructions()
    if device != "cuda":
        num_executors, threads = values.get("num_executors") or 1, values.get("threads")
        assert isinstance(num_executors, int)
        assert threads is None or isinstance(threads, int)
        yield check_threads(environ, num_cores(), num_executors, threads)


# Instructions for enabling TLS of a gateway and its clients.
_OF_HTTP = TlsWords(
    "start it with --http-tls-cert and --http-tls-key", "give https://", "give http://"
)


async def _remote_findings(arguments: argparse.Namespace) -> list[Finding]:
    findings: list[Finding] = []
    model = None
    if arguments.address is not None:
        found, model = await _scheduler_findings(arguments)
        findings += found
    if arguments.gateway is not None:
        findings += await _gateway_findings(arguments, model)
    return findings


async def _scheduler_findings(
    arguments: argparse.Namespace,
) -> tuple[list[Finding], Model | None]:
    findings, is_one_well = await _connection_findings(arguments, arguments.address)
    if not is_one_well:
        return findings, None
    try:
        config: ClientConfig = operators_config(arguments)
        async with AsyncClient(arguments.address, config) as client:
            found, model = await check_model(client)
            if model is not None:
                found += await check_tool_calls(client.get_tokenizer)
    except (SecurityUnusable, CredentialsUnusable) as error:
        problem = wrong(
            "credentials", str(error), "the scheduler cannot be queried", "check that file"
        )
        return [*findings, problem], None
    findings += found
    executors = await check_executors(
        lambda: ask(arguments, config, lambda operators: operators.list_executors()), model
    )
    if any(each.name == "executors" and each.state is State.WRONG for each in executors):
        # The executors may have been listed at the address for operators.
        found, _ = await _connection_findings(arguments, arguments.cluster_address)
        findings += [each for each in found if each.state is State.WRONG]
    return [*findings, *executors], model


async def _connection_findings(
    arguments: argparse.Namespace, address: str
) -> tuple[list[Finding], bool]:
    """Returns findings about the schedulers at `address`, and whether one can be queried."""
    files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    uses_tls = files != TlsFiles()
    try:
        known = discovery(address)
        addresses = await known.addresses()
    except (ValueError, FilesUnusable, OSError) as error:
        remedy = "give --address HOST:PORT; several: docs/operations.md, Several schedulers"
        return [wrong("address", str(error), "the scheduler cannot be queried", remedy)], False
    by_server = [
        await check_connection(each, files, uses_tls=uses_tls, tls_name=known.host)
        for each in addresses
    ]
    is_one_well = any(all(each.state is State.OK for each in found) for found in by_server)
    return list(chain.from_iterable(by_server)), is_one_well


async def _gateway_findings(arguments: argparse.Namespace, model: Model | None) -> list[Finding]:
    try:
        file = arguments.api_key_file
        key = ApiKey(environment_key() if file is None else None, file)
        headers = dict(key.current())
        gateway = GatewayAddress.parse(arguments.gateway, arguments.tls_ca, headers)
    except (ValueError, CredentialsUnusable) as error:
        return [
            wrong(
                "gateway",
                str(error),
                "the gateway cannot be queried",
                "check --gateway and the key",
            )
        ]
    is_secured = gateway.scheme == "https"
    files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    findings = await check_connection(gateway.address, files, uses_tls=is_secured, words=_OF_HTTP)
    if any(each.state is State.WRONG for each in findings):
        return findings
    return [*findings, *await asyncio.to_thread(check_gateway, gateway, model)]
