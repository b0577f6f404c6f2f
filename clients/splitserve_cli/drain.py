"""Command `splitserve drain`: drains executors, so that they can be stopped, or undoes it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from splitserve_cli.command_line import add_operators_server, ask, operators_config, run
from splitserve_common import printable
from splitserve_text import SplitserveError


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0 once all executors are gone."""
    parser = argparse.ArgumentParser(
        prog="splitserve drain",
        description="Drains executors: their requests finish or move to others, then they leave.",
    )
    text = "of an executor, as splitserve info shows it"
    parser.add_argument("executors", nargs="+", metavar="EXECUTOR", help=f"address {text}")
    parser.add_argument(
        "--timeout-s",
        type=float,
        metavar="SECONDS",
        help="time for running requests to finish before they move; 0: none (default: the"
        " scheduler's --drain-timeout-s)",
    )
    parser.add_argument(
        "--undo",
        action="store_true",
        help="cancel draining: the executors get requests again, or rejoin within seconds",
    )
    add_operators_server(parser)
    arguments = parser.parse_args(argv)
    return run("drain", lambda: _drain_all(arguments))


async def _drain_all(arguments: argparse.Namespace) -> int:
    codes = await asyncio.gather(
        *(_drain(arguments, address) for address in dict.fromkeys(arguments.executors))
    )
    return max(codes)


async def _drain(arguments: argparse.Namespace, address: str) -> int:
    shown = printable(address)
    config = operators_config(arguments)
    try:
        if arguments.undo:
            await ask(arguments, config, lambda operators: operators.undrain_executor(address))
            sys.stdout.write(f"{shown} no longer drains\n")
            return 0
        drained = await ask(
            arguments,
            config,
            lambda operators: operators.drain_executor(address, arguments.timeout_s),
        )
    except SplitserveError as error:
        reason = f" [{error.reason}]" if error.reason else ""
        problem = printable(" ".join(error.message.split()))
        sys.stderr.write(f"splitserve drain: {shown}: {problem}{reason}\n")
        return 1
    how = "lost while draining" if drained.is_lost else "drained"
    sys.stdout.write(f"{shown} {how}, {drained.num_moved_requests} requests moved\n")
    return 0
