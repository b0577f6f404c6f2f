"""Child process of a shared load: `python -m splitserve_bench.load_process SOCKET`.

`splitserve bench --processes` starts it, sends it commands, and ends it by closing the socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from splitserve_bench.arguments import BenchConfig, bench_config
from splitserve_bench.load import (
    AssignLoad,
    Done,
    Failed,
    LocalLoad,
    Pace,
    Ready,
    Relay,
    Run,
    StopLoad,
    receive,
    send,
)
from splitserve_bench.parser import build_parser
from splitserve_bench.runs import PROBLEMS, problem_text
from splitserve_bench.targets import open_target
from splitserve_bench.workloads import Conversation


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a load: every `num_shares`th conversation, and that part of the open ones."""

    number: int
    num_shares: int

    def of_conversations(self, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
        """Yields the share's conversations with their times.

        All shares together are the whole load.
        """
        return islice(conversations, self.number, None, self.num_shares)

    def of_pace(self, pace: Pace) -> Pace:
        """Returns the pace of the share. All shares together keep the wanted number open."""
        return replace(
            pace,
            concurrency=None if pace.concurrency is None else self._of(pace.concurrency),
            max_open=self._of(pace.max_open),
        )

    def _of(self, number: int) -> int:
        return (number + self.num_shares - 1 - self.number) // self.num_shares


async def serve(connection: socket.socket) -> None:
    """Executes the parent's commands until the connection closes."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    assigned = await receive(reader)
    if not isinstance(assigned, AssignLoad):
        return
    try:
        config = bench_config(build_parser().parse_intermixed_args(assigned.argv), os.environ)
        await _serve_rounds(config, Share(assigned.share, assigned.num_shares), reader, writer)
    except* PROBLEMS as errors:
        with suppress(ConnectionError):
            await send(writer, Failed(problem_text(errors)))


async def _serve_rounds(
    config: BenchConfig, share: Share, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    targets = [(address.name, open_target(address, config.asking)) for address in config.targets]
    load = LocalLoad(
        targets, lambda: share.of_conversations(config.workload()), share.of_pace(config.run.pace)
    )
    async with load:
        await send(writer, Ready(await load.get_ready()))
        listening = asyncio.create_task(receive(reader))
        while isinstance(command := await listening, Run | StopLoad):
            listening = asyncio.create_task(receive(reader))
            # A StopLoad after the end of a round is ignored.
            if isinstance(command, Run):
                await _run_round(load, command, listening, writer)


async def _run_round(
    load: LocalLoad, command: Run, listening: asyncio.Task[object], writer: asyncio.StreamWriter
) -> None:
    """Runs a round until all requests have ended or another message arrives."""
    relay = Relay(writer)
    relaying = asyncio.create_task(relay.run())
    running = asyncio.create_task(load.run(command.index, command.salt, command.begin_s, relay))
    await asyncio.wait({running, listening, relaying}, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()
    relaying.cancel()
    await asyncio.wait({relaying})
    await relay.flush()
    await send(writer, Done())


if __name__ == "__main__":
    with suppress(ConnectionError):
        asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
