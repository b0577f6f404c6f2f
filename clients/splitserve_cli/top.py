"""Command `splitserve top`: activity of a scheduler in a terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from rich.console import Console
from rich.live import Live

from splitserve.scheduler.v1.live_pb2 import WatchSchedulerResponse
from splitserve_cli.command_line import add_operators_server, ask, operators_config, run
from splitserve_client import AsyncClient
from splitserve_live import LiveState, frame_line, screen

_RATE = 4
_WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="splitserve top", description="Shows the live activity of a scheduler."
    )
    add_operators_server(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one screen and exit (the default without a terminal)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per frame, each on its own line"
    )
    parser.add_argument(
        "--rate",
        type=int,
        default=_RATE,
        choices=range(1, 11),
        help=f"frames per second (default: {_RATE})",
    )
    arguments = parser.parse_args(argv)
    return run("top", lambda: _show(arguments))


async def _show(arguments: argparse.Namespace) -> int:
    config = operators_config(arguments)
    await ask(arguments, config, lambda client: _watch(client, arguments))
    return 0


async def _watch(client: AsyncClient, arguments: argparse.Namespace) -> None:
    async with aclosing(client.watch(arguments.rate)) as frames:
        if arguments.json:
            await _write_json(frames, is_once=arguments.once)
        elif arguments.once or not sys.stdout.isatty() or Console().is_dumb_terminal:
            await _draw_once(frames)
        else:
            await _draw(frames)


async def _draw_once(frames: AsyncIterator[WatchSchedulerResponse]) -> None:
    """Prints one screen: the first frame has the state, the second the activity since."""
    state, num_frames = LiveState(), 0
    async for frame in frames:
        state.take(frame)
        num_frames += 1
        if num_frames == 2:
            break
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    Console(width=width, highlight=False).print(screen(state, width))


async def _write_json(frames: AsyncIterator[WatchSchedulerResponse], *, is_once: bool) -> None:
    async for frame in frames:
        sys.stdout.write(frame_line(frame).decode())
        sys.stdout.flush()
        if is_once:
            return


async def _draw(frames: AsyncIterator[WatchSchedulerResponse]) -> None:
    state, console = LiveState(), Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async for frame in frames:
            state.take(frame)
            live.update(screen(state, console.width, console.height), refresh=True)
