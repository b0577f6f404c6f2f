"""Load shared by several processes, since one process has one core's worth of Python.

Holds the parent's side, the messages between the processes, and the relay of a child's outcomes.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from splitserve_bench.load.outcome import LoadAbandoned, Outcome, Watcher

_MODULE = "splitserve_bench.load_process"
_LEAVE_S = 10.0


class LoadProcessFailed(Exception):
    """A load process failed or died; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class _Share:
    """Load process as seen by its parent. `name`: label for error messages."""

    name: str
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def receive(self) -> Ready | WatcherCalls | Done:
        """Returns the next message of the process.

        Raises LoadProcessFailed if the process failed or ended.
        """
        message = await receive(self.reader)
        if message is None:
            code = await self.process.wait()
            raise LoadProcessFailed(f"{self.name} ended during the run (exit code {code})")
        if isinstance(message, Failed):
            raise LoadProcessFailed(message.message)
        assert isinstance(message, Ready | WatcherCalls | Done), "all messages of a load process"
        return message

    async def send(self, value: AssignLoad | Run | StopLoad) -> None:
        """Sends a message. Ignores a closed connection, which `receive` reports."""
        with suppress(ConnectionError):
            await send(self.writer, value)


class ProcessLoad:
    """Load as of LocalLoad, by `num_processes` child processes. `argv`: flags of the load."""

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
        """Ends the child processes, which leave when their connection closes; kills late ones."""
        for share in self._shares:
            share.writer.close()
        leaving = asyncio.gather(*[share.process.wait() for share in self._shares])
        with suppress(TimeoutError):
            # After an error the children get no time to close connections.
            await asyncio.wait_for(leaving, _LEAVE_S if error is None else 0)
        for share in self._shares:
            if share.process.returncode is None:
                share.process.kill()
                await share.process.wait()

    async def get_ready(self) -> list[str]:
        """Starts the processes; returns the model of each target.

        Raises LoadProcessFailed, OSError.
        """
        for number in range(self._num_processes):
            self._shares.append(await self._start(number))
        (first, *_) = await asyncio.gather(*[share.receive() for share in self._shares])
        assert isinstance(first, Ready), "the first message of a load process"
        return first.models

    async def _start(self, number: int) -> _Share:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C of the terminal goes to the parent only, which tells its children to stop.
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        name = f"process {number + 1} of {self._num_processes}"
        share = _Share(name, process, reader, writer)
        await share.send(AssignLoad(self._argv, number, self._num_processes))
        return share

    async def run(self, index: int, salt: int, begin_s: float, watcher: Watcher) -> None:
        """Runs one round with target number `index`. Raises LoadProcessFailed.

        Cancelling interrupts running requests, and their outcomes still reach the watcher.
        """
        for share in self._shares:
            await share.send(Run(index, salt, begin_s))
        following = {asyncio.create_task(_follow(share, watcher)) for share in self._shares}
        try:
            await _all_of(following)
        except asyncio.CancelledError:
            for share in self._shares:
                await share.send(StopLoad())
            await _all_of(following)
            raise
        finally:
            for task in following:
                task.cancel()


async def _follow(share: _Share, watcher: Watcher) -> None:
    while isinstance(calls := await share.receive(), WatcherCalls):
        for outcome in calls.outcomes:
            watcher.ended(outcome)
        for busy_ratio in calls.busy_ratios:
            watcher.worked(busy_ratio)
        for given_up in calls.given_up:
            watcher.gave_up(given_up)


async def _all_of(tasks: set[asyncio.Task[None]]) -> None:
    """Waits for all tasks; raises the first exception.

    Cancelling this does not cancel the tasks.
    """
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


# -- Messages between processes --------------------------------------------------------------------
# Pickled values over a socket that only these processes have.

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class AssignLoad:
    """Assigns part `share` of `num_shares` of a load to a process. `argv`: flags of the load."""

    argv: tuple[str, ...]
    share: int
    num_shares: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Message that all targets answered; `models`: model name of each target."""

    models: list[str]


@dataclass(frozen=True, slots=True)
class Run:
    """Starts one round with target number `index`."""

    index: int
    salt: int
    begin_s: float


@dataclass(frozen=True, slots=True)
class StopLoad:
    """Ends the round; running requests are interrupted."""


@dataclass(frozen=True, slots=True)
class WatcherCalls:
    """Calls of a watcher since the last message."""

    outcomes: list[Outcome]
    busy_ratios: list[float]
    given_up: list[LoadAbandoned]


@dataclass(frozen=True, slots=True)
class Done:
    """The round has ended, and all outcomes were sent."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The process has failed and sends nothing more. `message`: reason for the user."""

    message: str


async def send(writer: asyncio.StreamWriter, value: object) -> None:
    """Sends `value`; waits while the other side does not read. Raises OSError."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(content)) + content)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Any:  # noqa: ANN401
    """Receives one message and returns its value; None if the connection is closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# -- Relay of outcomes to the parent, several times a second ---------------------------------------

_EVERY_S = 0.1


class Relay:
    """Watcher that sends all calls to the parent process.

    Buffers them, so answers never wait for it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._outcomes: list[Outcome] = []
        self._busy_ratios: list[float] = []
        self._given_up: list[LoadAbandoned] = []

    def ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def worked(self, busy_ratio: float) -> None:
        self._busy_ratios.append(busy_ratio)

    def gave_up(self, given_up: LoadAbandoned) -> None:
        self._given_up.append(given_up)

    async def run(self) -> None:
        """Sends the buffered calls at intervals until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Sends the buffered calls now."""
        if self._outcomes or self._busy_ratios or self._given_up:
            calls = WatcherCalls(self._outcomes, self._busy_ratios, self._given_up)
            self._outcomes, self._busy_ratios, self._given_up = [], [], []
            await send(self._writer, calls)
