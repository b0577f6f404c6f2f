"""What the client commands share: the address, and errors as one line."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO, TypeVar

from splitserve_client.client import AsyncClient
from splitserve_client.client_config import DEFAULT_ADDRESS, ClientConfig
from splitserve_client.errors import SplitserveError
from splitserve_options.option import DEFAULT_CLUSTER_ADDRESS
from splitserve_rpc.printable import printable
from splitserve_rpc.security import SecurityUnusable, check_pair, read_token
from splitserve_rpc.tls import TlsFiles

API_KEY_ENV = "SPLITSERVE_API_KEY"

_TLS_FILES = {
    "--tls-ca": "certificates of whom the server is believed, PEM; plain text without",
    "--tls-cert": "our own certificate, PEM, if the server asks for one",
    "--tls-key": "private key of that, PEM",
}


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds `--address`, and the options of `client_config`."""
    add_address(parser, "--address", DEFAULT_ADDRESS, "the server, or several")
    for flag, text in _TLS_FILES.items():
        add_file(parser, flag, text)
    text = f"file with our API key or JWT; without it, the key itself is in {API_KEY_ENV}"
    add_file(parser, "--api-key-file", text)
    parser.add_argument("--api-key", action=_RefuseKey, help=argparse.SUPPRESS)


class _RefuseKey(argparse.Action):
    """A key here is no abbreviation of the file's name, and its value is not repeated."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(
            "a key on the command line is seen by everybody on this machine (ps): give"
            f" --api-key-file FILE, or set {API_KEY_ENV}"
        )


def add_file(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    """Adds the path of a file, None if it is not given."""
    env = _variable(flag)
    default = os.environ.get(env) or None
    parser.add_argument(
        flag, metavar="FILE", type=Path, default=default, help=f"{text} (env {env})"
    )


def add_address(parser: argparse.ArgumentParser, flag: str, default: str, text: str) -> None:
    """Adds the address of a server."""
    env = _variable(flag)
    parser.add_argument(
        flag,
        metavar="HOST:PORT",
        default=os.environ.get(env) or default,
        help=f"{text} (default: {default}; env {env})",
    )


def _variable(flag: str) -> str:
    """Of the environment, which says what the flag would."""
    return f"SPLITSERVE_{flag[2:].replace('-', '_').upper()}"


def client_config(arguments: argparse.Namespace) -> ClientConfig:
    """How to connect. Raises SecurityUnusable."""
    files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    check_pair(files.cert, files.key)
    file = arguments.api_key_file
    return ClientConfig(
        tls=None if files == TlsFiles() else files,
        api_key=environment_key() if file is None else None,
        api_key_file=file,
    )


def environment_key() -> str | None:
    """The key of whoever runs us, if it is set."""
    return os.environ.get(API_KEY_ENV) or None


def run(name: str, command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a command; SplitserveError and SecurityUnusable are one line and exit code 1."""
    try:
        return asyncio.run(command())
    except SplitserveError as error:
        reason = f" [{error.reason}]" if error.reason else ""
        problem = f"{error.message}{reason}"
    except SecurityUnusable as error:
        problem = str(error)
    sys.stderr.write(f"splitserve {name}: {printable(' '.join(problem.split()))}\n")
    return 1


# -- What the commands of operators share: where they ask, and as whom -----------------------------

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


# -- Text of a model on a terminal: a model may have been talked into speaking to that -------------

# All control characters, also those of 8 bits, but the tab and the end of a line. Others that move
# nothing but text, as marks of direction do, belong to languages.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TextFile(Protocol):
    """Where text goes."""

    def write(self, text: str, /) -> object:
        """Writes it."""

    def flush(self) -> object:
        """Lets it be seen."""


class _Terminal:
    """Escapes control characters, so that they are seen and do nothing."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str, /) -> None:
        self._file.write(_CONTROLS.sub(lambda found: printable(found[0]), text))

    def flush(self) -> None:
        self._file.flush()


def as_seen_by_people(file: TextIO) -> TextFile:
    """`file` as it is, unless it is a terminal: then control characters are written escaped."""
    return _Terminal(file) if file.isatty() else file
