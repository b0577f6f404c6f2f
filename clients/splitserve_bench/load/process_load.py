"""A load on targets that several processes share, since one has one core's worth of Python."""

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

from splitserve_bench.load.outcome import GivenUp, Outcome, Watcher

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


# --------------------------------------------------------------------------------------------------
# What processes of one load tell each other: values of ours, over a socket that only they have.

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Begin:
    """What a process is: number `share` of `num_shares`, of the load that the flags say."""

    argv: tuple[str, ...]
    share: int
    num_shares: int


@dataclass(frozen=True, slots=True)
class Ready:
    """All targets have answered; their models."""

    models: list[str]


@dataclass(frozen=True, slots=True)
class Run:
    """One round with one target."""

    index: int
    salt: int
    begin_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The round is over; what runs is interrupted."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a watcher would have been told since the last time."""

    outcomes: list[Outcome]
    busy_ratios: list[float]
    given_up: list[GivenUp]


@dataclass(frozen=True, slots=True)
class Done:
    """The round has ended, and all was told."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing more comes; the message is for whoever began the run."""

    message: str


async def send(writer: asyncio.StreamWriter, value: object) -> None:
    """Waits while the other side does not read. Raises OSError."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(content)) + content)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Any:  # noqa: ANN401
    """The next value; None where the other side has gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# -- Tells whoever began the run what a watcher is told, some times a second -----------------------

_EVERY_S = 0.1


class Relay:
    """A Watcher. What cannot be sent yet is kept; answers do not wait for that."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._outcomes: list[Outcome] = []
        self._busy_ratios: list[float] = []
        self._given_up: list[GivenUp] = []

    def ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def worked(self, busy_ratio: float) -> None:
        self._busy_ratios.append(busy_ratio)

    def gave_up(self, given_up: GivenUp) -> None:
        self._given_up.append(given_up)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Everything so far."""
        if self._outcomes or self._busy_ratios or self._given_up:
            told = Told(self._outcomes, self._busy_ratios, self._given_up)
            self._outcomes, self._busy_ratios, self._given_up = [], [], []
            await send(self._writer, told)
