"""What processes of one load tell each other: values of ours, over a socket that only they have."""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from splitserve_bench.load.outcome import Outcome
from splitserve_bench.load.watcher import GivenUp

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
