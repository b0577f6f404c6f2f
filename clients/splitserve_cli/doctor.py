"""`splitserve doctor`: what is wrong here, what that means, and what to do."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from splitserve_cli.checks.cluster import check_executors, check_model
from splitserve_cli.checks.connection import check_connection
from splitserve_cli.checks.finding import Finding, State, wrong
from splitserve_cli.checks.gateway import GatewayAddress, check_gateway
from splitserve_cli.checks.machine import (
    check_file_limit,
    check_instructions,
    check_memory,
    check_shared_memory,
    check_swap,
    check_threads,
    num_cores,
)
from splitserve_cli.checks.packages import check_packages, check_python
from splitserve_cli.checks.ports import check_port
from splitserve_cli.checks.settings import check_settings, listened_at
from splitserve_cli.checks.tls_files import check_tls_files
from splitserve_cli.command_line import environment_key
from splitserve_cli.operators import add_operators_server, ask, operators_config
from splitserve_client.api_key import ApiKey
from splitserve_client.client import AsyncClient
from splitserve_client.client_config import ClientConfig
from splitserve_client.errors import CredentialsUnusable
from splitserve_client.types import Model
from splitserve_options.option import COMMANDS, Command
from splitserve_rpc.discovery import discovery
from splitserve_rpc.printable import printable
from splitserve_rpc.security import SecurityUnusable
from splitserve_rpc.tls import TlsFiles
from splitserve_rpc.watched_files import FilesUnusable

_EPILOG = """\
exit code: 0 nothing is wrong, though there may be warnings; 1 something is. Without --address and
--gateway it looks at this machine alone. Nothing is changed.
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    arguments = _parse(argv)
    findings = [*local_findings(arguments, os.environ), *asyncio.run(_remote_findings(arguments))]
    text = _json(findings) if arguments.json else _text(findings, shows_all=arguments.verbose)
    sys.stdout.write(text)
    return int(any(each.state is State.WRONG for each in findings))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="splitserve doctor",
        description="Looks for what is wrong, on this machine and at running processes.",
        epilog=_EPILOG,
    )
    add_operators_server(parser)
    # Only who names a server wants it to be asked.
    parser.set_defaults(address=os.environ.get("SPLITSERVE_ADDRESS") or None)
    parser.add_argument("--gateway", metavar="URL", help="a gateway, as http://localhost:8000")
    parser.add_argument(
        "--for",
        dest="command",
        choices=COMMANDS,
        default="serve",
        help="whose options, ports and certificates are looked at (default: serve)",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="file with these options")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--verbose", action="store_true", help="also what is well, one by one")
    return parser.parse_args(argv)


def local_findings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Of this machine, and of the options of a process that is to run on it."""
    command: Command = arguments.command
    yield check_python()
    yield from check_packages(command)
    yield check_instructions()
    yield check_memory()
    yield check_swap()
    yield check_shared_memory()
    yield check_file_limit()
    findings, values = check_settings(command, arguments.config, environ)
    yield from findings
    if values.get("device") != "cuda":
        num_executors, threads = values.get("num_executors") or 1, values.get("threads")
        assert isinstance(num_executors, int)
        assert threads is None or isinstance(threads, int)
        yield check_threads(environ, num_cores(), num_executors, threads)
    for option, address in listened_at(command, values):
        yield check_port(option, address)
    paths = (values.get(f"tls_{name}") for name in ("cert", "key", "ca"))
    own = TlsFiles(*(Path(str(path)) if path else None for path in paths))
    given = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    for files in {own: None, given: None}:
        yield from check_tls_files(files)


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
    findings, is_one_well = await _connection_findings(arguments)
    if not is_one_well:
        return findings, None
    try:
        config: ClientConfig = operators_config(arguments)
        async with AsyncClient(arguments.address, config) as client:
            found, model = await check_model(client)
    except (SecurityUnusable, CredentialsUnusable) as error:
        problem = wrong("credentials", str(error), "nobody can be asked", "look at that file")
        return [*findings, problem], None
    findings += found
    findings += await check_executors(
        lambda: ask(arguments, config, lambda operators: operators.list_executors()), model
    )
    return findings, model


async def _connection_findings(arguments: argparse.Namespace) -> tuple[list[Finding], bool]:
    """Of all schedulers that the address stands for, and whether one of them can be asked."""
    files = (arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    wants_tls = any(file is not None for file in files)
    try:
        known = discovery(arguments.address)
        addresses = await known.addresses()
    except (ValueError, FilesUnusable, OSError) as error:
        remedy = "give --address HOST:PORT, or several as the handbook says"
        return [wrong("address", str(error), "nobody can be asked", remedy)], False
    by_server = [
        await check_connection(address, arguments.tls_ca, wants_tls=wants_tls, tls_name=known.host)
        for address in addresses
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
        return [wrong("gateway", str(error), "it cannot be asked", "look at what was given")]
    is_secured = gateway.scheme == "https"
    findings = await check_connection(gateway.address, gateway.ca, wants_tls=is_secured)
    if any(each.state is State.WRONG for each in findings):
        return findings
    return [*findings, *await asyncio.to_thread(check_gateway, gateway, model)]


def _json(findings: Sequence[Finding]) -> str:
    entries = [{**asdict(each), "state": each.state.value} for each in findings]
    return json.dumps({"findings": entries, "is_well": not _number(findings, State.WRONG)}) + "\n"


def _text(findings: Sequence[Finding], *, shows_all: bool) -> str:
    """What is wrong comes first."""
    lines: list[str] = []
    for state in (State.WRONG, State.WARNING, State.OK):
        for each in findings:
            if each.state is state and (shows_all or state is not State.OK):
                lines += _lines(each)
    lines.append(
        f"{_number(findings, State.WRONG)} wrong, {_number(findings, State.WARNING)} warnings,"
        f" {_number(findings, State.OK)} ok"
    )
    return "\n".join(lines) + "\n"


def _lines(each: Finding) -> Iterator[str]:
    yield printable(f"{each.state.value:8} {each.name}: {each.found}")
    if each.meaning:
        yield printable(f"{'':9}{each.meaning}")
    if each.remedy:
        yield printable(f"{'':9}-> {each.remedy}")


def _number(findings: Sequence[Finding], state: State) -> int:
    return sum(each.state is state for each in findings)
