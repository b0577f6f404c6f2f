"""Shared parts of the client commands: flags of the server, errors, and output to a terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO, TypeVar

from splitserve_client import DEFAULT_ADDRESS, AsyncClient, ClientConfig
from splitserve_common import printable
from splitserve_options import DEFAULT_CLUSTER_ADDRESS
from splitserve_rpc import SecurityUnusable, TlsFiles, check_pair, read_token
from splitserve_text import SplitserveError

API_KEY_ENV = "SPLITSERVE_API_KEY"

_TLS_FILES = {
    "--tls-ca": "CA certificates (PEM) to verify the server; without it: plain text",
    "--tls-cert": "client certificate (PEM), if the server requires one",
    "--tls-key": "private key of the client certificate (PEM)",
}


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds `--address` and the flags that `client_config` reads."""
    add_address(parser, "--address", DEFAULT_ADDRESS, "address of the server, or of several")
    for flag, text in _TLS_FILES.items():
        add_file(parser, flag, text)
    text = f"file with the API key or JWT; without it, {API_KEY_ENV} holds the key"
    add_file(parser, "--api-key-file", text)
    parser.add_argument("--api-key", action=_RefuseKey, help=argparse.SUPPRESS)


class _RefuseKey(argparse.Action):
    """Refuses `--api-key`, which would abbreviate `--api-key-file`, without repeating the key."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(
            "a key on the command line is visible to all users of this machine (ps): give"
            f" --api-key-file FILE, or set {API_KEY_ENV}"
        )


def add_file(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    """Adds a file path flag; the parsed value is None without the flag."""
    env = _variable(flag)
    default = os.environ.get(env) or None
    parser.add_argument(
        flag, metavar="FILE", type=Path, default=default, help=f"{text} (env {env})"
    )


def add_address(parser: argparse.ArgumentParser, flag: str, default: str, text: str) -> None:
    """Adds a flag for the address of a server."""
    env = _variable(flag)
    parser.add_argument(
        flag,
        metavar="HOST:PORT",
        default=os.environ.get(env) or default,
        help=f"{text} (default: {default}; env {env})",
    )


def _variable(flag: str) -> str:
    """Returns the environment variable that is equivalent to `flag`."""
    return f"SPLITSERVE_{flag[2:].replace('-', '_').upper()}"


def client_config(arguments: argparse.Namespace) -> ClientConfig:
    """Returns the configuration of a client. Raises SecurityUnusable."""
    files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    check_pair(files.cert, files.key)
    file = arguments.api_key_file
    return ClientConfig(
        tls=None if files == TlsFiles() else files,
        api_key=environment_key() if file is None else None,
        api_key_file=file,
    )


def environment_key() -> str | None:
    """Returns the API key in the environment; None if it is not set."""
    return os.environ.get(API_KEY_ENV) or None


def run(name: str, command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a command.

    Reports SplitserveError and SecurityUnusable in one line, with exit code 1.
    """
    try:
        return asyncio.run(command())
    except SplitserveError as error:
        reason = f" [{error.reason}]" if error.reason else ""
        problem = f"{error.message}{reason}"
    except SecurityUnusable as error:
        problem = str(error)
    sys.stderr.write(f"splitserve {name}: {printable(' '.join(problem.split()))}\n")
    return 1


# -- commands of operators -------------------------------------------------------------------------

_Answer = TypeVar("_Answer")


def add_operators_server(parser: argparse.ArgumentParser) -> None:
    """Adds the addresses of a server and the flags that `operators_config` reads."""
    add_server(parser)
    text = "address for operators, used if --address serves clients only"
    add_address(parser, "--cluster-address", DEFAULT_CLUSTER_ADDRESS, text)
    add_file(
        parser, "--cluster-token-file", "file with the cluster token, if the cluster requires one"
    )


def operators_config(arguments: argparse.Namespace) -> ClientConfig:
    """Returns the configuration of an operator's client. Raises SecurityUnusable."""
    token = read_token(arguments.cluster_token_file)
    return replace(client_config(arguments), cluster_token=token)


async def ask(
    arguments: argparse.Namespace,
    config: ClientConfig,
    question: Callable[[AsyncClient], Awaitable[_Answer]],
) -> _Answer:
    """Returns the answer of the server, or of its address for operators. Raises SplitserveError.

    Asks the address for operators if the server does not offer the method.
    """
    async with AsyncClient(arguments.address, config) as client:
        try:
            return await question(client)
        except SplitserveError as error:
            if error.reason != "METHOD_UNKNOWN":
                raise
    async with AsyncClient(arguments.cluster_address, config) as operators:
        return await question(operators)


def aligned(cells: Sequence[str], alignment: str) -> list[str]:
    """Returns the cells of a column of a table, padded to one width. `alignment`: `<` or `>`."""
    width = max(map(len, cells))
    return [f"{cell:{alignment}{width}}" for cell in cells]


# -- model output on a terminal --------------------------------------------------------------------

# Model output may contain terminal escape sequences. Matches all control characters, including
# 8-bit ones, except tab and newline. Other invisible characters, such as direction marks, are part
# of languages.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TextFile(Protocol):
    """Destination of text."""

    def write(self, text: str, /) -> object:
        """Writes `text`."""

    def flush(self) -> object:
        """Flushes the written text."""


class _Terminal:
    """Writes control characters escaped, so that they are visible and have no effect."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str, /) -> None:
        self._file.write(_CONTROLS.sub(lambda found: printable(found[0]), text))

    def flush(self) -> None:
        self._file.flush()


def as_seen_by_people(file: TextIO) -> TextFile:
    """Returns `file`; if it is a terminal, wrapped so that control characters are escaped."""
    return _Terminal(file) if file.isatty() else file
