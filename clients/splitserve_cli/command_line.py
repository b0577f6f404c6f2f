"""What the client commands share: the address, and errors as one line."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from splitserve_client.connection import DEFAULT_ADDRESS
from splitserve_client.errors import SplitserveError

# The second is what executors read: where they run, it names the same server.
_ADDRESS_ENV = ("SPLITSERVE_ADDRESS", "SPLITSERVE_SCHEDULER")


def add_address(parser: argparse.ArgumentParser) -> None:
    """Adds `--address`."""
    given = [os.environ[name] for name in _ADDRESS_ENV if os.environ.get(name)]
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        default=given[0] if given else DEFAULT_ADDRESS,
        help=f"the server (default: {DEFAULT_ADDRESS}; env {_ADDRESS_ENV[0]})",
    )


def run(name: str, command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a command; an error of the server or of the connection is one line and exit code 1."""
    try:
        return asyncio.run(command())
    except SplitserveError as error:
        reason = f" [{error.reason}]" if error.reason else ""
        sys.stderr.write(f"splitserve {name}: {' '.join(error.message.split())}{reason}\n")
        return 1
