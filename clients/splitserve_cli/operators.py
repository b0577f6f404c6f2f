"""What the commands of operators share: where they ask, and as whom."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from splitserve_cli.command_line import add_address, add_file, add_server, client_config
from splitserve_client.client import AsyncClient
from splitserve_client.client_config import ClientConfig
from splitserve_client.errors import SplitserveError
from splitserve_options.option import DEFAULT_CLUSTER_ADDRESS
from splitserve_rpc.security import read_token

_Answer = TypeVar("_Answer")


def add_operators_server(parser: argparse.ArgumentParser) -> None:
    """Adds the addresses of a server, and the options of `operators_config`."""
    add_server(parser)
    text = "for operators, where the server has no such address itself"
    add_address(parser, "--cluster-address", DEFAULT_CLUSTER_ADDRESS, text)
    add_file(parser, "--cluster-token-file", "secret of the cluster, if it has one")


def operators_config(arguments: argparse.Namespace) -> ClientConfig:
    """How to connect. Raises SecurityUnusable."""
    token = read_token(arguments.cluster_token_file)
    return replace(client_config(arguments), cluster_token=token)


async def ask(
    arguments: argparse.Namespace,
    config: ClientConfig,
    question: Callable[[AsyncClient], Awaitable[_Answer]],
) -> _Answer:
    """The answer from the server, or from its address for operators. Raises SplitserveError."""
    async with AsyncClient(arguments.address, config) as client:
        try:
            return await question(client)
        except SplitserveError as error:
            if error.reason != "METHOD_UNKNOWN":
                raise
    async with AsyncClient(arguments.cluster_address, config) as operators:
        return await question(operators)
