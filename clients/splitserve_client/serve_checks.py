"""What `splitserve serve` can find out at once, before anything slow starts."""

from __future__ import annotations

import errno
import importlib.util
import re
import socket
from pathlib import Path

from splitserve_rpc.option_table import BUNDLED_MODEL

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_EXECUTOR_MODULES = ("torch", "transformers")


class CannotServe(Exception):
    """Serving is impossible; the message is one line for people."""


def check_model(model: str) -> None:
    """Raises CannotServe if `model` is clearly no checkpoint; the executor looks closer."""
    missing = [name for name in _EXECUTOR_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotServe(
            f"executors need {' and '.join(missing)}: pip install 'splitserve[executor]'"
        )
    if model == BUNDLED_MODEL:
        return
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise CannotServe(f"--model {model}: config.json is missing; is it a checkpoint?")
    elif directory.exists():
        raise CannotServe(f"--model {model}: not a directory")
    elif not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise CannotServe(f"--model {model}: no such directory")


def claim_address(listen: str) -> str:
    """`listen`, with a free port instead of port 0. Raises CannotServe if it is not to be had."""
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise CannotServe(f"cannot listen on {listen}: unknown host {host}") from error
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
            probe.listen()
        except OSError as error:
            problem = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise CannotServe(f"cannot listen on {listen}: {problem}") from error
        return f"{host}:{probe.getsockname()[1]}"


def reachable_address(listen: str) -> str:
    """The address under which a server that listens on `listen` is reached from here."""
    host, _, port = listen.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"
