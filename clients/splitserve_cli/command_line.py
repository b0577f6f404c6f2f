"""What the client commands share: the address, and errors as one line."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

from splitserve_client.client_config import DEFAULT_ADDRESS, ClientConfig
from splitserve_client.errors import SplitserveError
from splitserve_rpc.printable import printable
from splitserve_rpc.security import SecurityUnusable, check_pair
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
