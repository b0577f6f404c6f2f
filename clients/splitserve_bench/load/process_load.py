"""A load on targets that several processes share, since one has one core's worth of Python."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from splitserve_bench.load.frames import Begin, Done, Failed, Ready, Run, Stop, Told, receive, send
from splitserve_bench.load.watcher import Watcher

_MODULE = "splitserve_bench.load_process"
_LEAVE_S = 10.0


class LoadProcessFailed(Exception):
    """A process of the load cannot go on, or died; the message says why."""


@dataclass(frozen=True, slots=True)
class _Share:
    """One of the processes. `name`: for people."""

    name: str
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def receive(self) -> Ready | Told | Done:
        """What it says next. Raises LoadProcessFailed."""
        told = await receive(self.reader)
        if told is None:
            code = await self.process.wait()
            raise LoadProcessFailed(
                f"{self.name} ended in the middle of the run (exit code {code})"
            )
        if isinstance(told, Failed):
            raise LoadProcessFailed(told.message)
        assert isinstance(told, Ready | Told | Done), "nothing else is said to us"
        return told

    async def tell(self, value: Begin | Run | Stop) -> None:
        """Where nobody listens any more, `receive` says so."""
        with suppress(ConnectionError):
            await send(self.writer, value)


class ProcessLoad:
    """As LocalLoad, by `num_processes` others; `argv`: what each is told of the load."""

    def __init__(self, argv: Sequence[str], num_processes: int) -> None:
        self._argv = tuple(argv)
        self._num_processes = num_processes
        self._shares: list[_Share] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """However it ended, none of them goes on: they leave when nobody is there to tell them."""
        for share in self._shares:
            share.writer.close()
        leaving = asyncio.gather(*[share.process.wait() for share in self._shares])
        with suppress(TimeoutError):
            # What has failed has nothing to close in peace.
            await asyncio.wait_for(leaving, _LEAVE_S if error is None else 0)
        for share in self._shares:
            if share.process.returncode is None:
                share.process.kill()
                await share.process.wait()

    async def get_ready(self) -> list[str]:
        """Each target's model. Raises LoadProcessFailed, OSError."""
        for number in range(self._num_processes):
            self._shares.append(await self._start(number))
        told = await asyncio.gather(*[share.receive() for share in self._shares])
        (first, *_) = told
        assert isinstance(first, Ready), "that is the first that it says"
        return first.models

    async def _start(self, number: int) -> _Share:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A Ctrl-C of the terminal is for us; they are told when to stop.
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        name = f"process {number + 1} of {self._num_processes}"
        share = _Share(name, process, reader, writer)
        await share.tell(Begin(self._argv, number, self._num_processes))
        return share

    async def run(self, index: int, salt: int, begin_s: float, watcher: Watcher) -> None:
        """One round with that target. Cancelling ends what runs, of which the watcher is told.

        Raises LoadProcessFailed.
        """
        for share in self._shares:
            await share.tell(Run(index, salt, begin_s))
        following = {asyncio.create_task(_follow(share, watcher)) for share in self._shares}
        try:
            await _all_of(following)
        except asyncio.CancelledError:
            for share in self._shares:
                await share.tell(Stop())
            await _all_of(following)
            raise
        finally:
            for task in following:
                task.cancel()


async def _follow(share: _Share, watcher: Watcher) -> None:
    while isinstance(told := await share.receive(), Told):
        for outcome in told.outcomes:
            watcher.ended(outcome)
        for busy_ratio in told.busy_ratios:
            watcher.worked(busy_ratio)
        for given_up in told.given_up:
            watcher.gave_up(given_up)


async def _all_of(tasks: set[asyncio.Task[None]]) -> None:
    """Raises what the first raised that did. Being cancelled cancels none."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
