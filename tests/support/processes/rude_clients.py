"""Clients of the gateway that leave in the middle, at random places and in every way.

Each has a connection of its own, on which it sends one to three requests ahead.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from splitserve_gateway.server import Server
from tests.contract.stranger.process import poll
from tests.support.processes.fake_service import FakeService
from tests.support.processes.gateway import RunningGateway, post_bytes
from tests.support.processes.patience import PATIENCE_S

_BODIES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "one two three", "max_tokens": 60}),
    ("/v1/completions", {"prompt": "one two three", "max_tokens": 60, "stream": True}),
    ("/v1/completions", {"prompt": ["a b", "c", "d e f"], "max_tokens": 40, "stream": True}),
    ("/v1/completions", {"prompt": "x", "n": 3, "max_tokens": 40}),
    ("/v1/completions", {"prompt": "word " * 600, "max_tokens": 400, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "stream": True},
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10_000_000}),
    ("/v1/nothing", {}),
)
# Leaves before all is sent; before any of the answer; after some of it; after what comes first.
_PLACES = ("sending", "sent", "reading", "long")


async def leave_at_random(gateway: RunningGateway, rng: random.Random) -> None:
    """One client, from its connection to its end."""
    reader, writer = await gateway.connect()
    data = b"".join(post_bytes(*rng.choice(_BODIES)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    place = rng.choice(_PLACES)
    try:
        if place == "sending":
            data = data[: rng.randrange(len(data))]
        writer.write(data)
        await writer.drain()
        if place == "reading":
            await reader.read(rng.choice((1, 200, 2000)))
        elif place == "long":
            async with asyncio.timeout(rng.random() / 4):
                await reader.readexactly(rng.randrange(100, 5000))
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        pass  # it was cut, or the answer was shorter, or takes longer than one has patience for
    await _leave(reader, writer, rng)


async def _leave(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
) -> None:
    way = rng.choice(("close", "reset", "half"))
    plain = writer.get_extra_info("socket")
    try:
        if way == "reset":
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way == "half" and writer.can_write_eof():
            # Says that it sends no more, and waits: the other side is to close.
            writer.write_eof()
            while await reader.read(65536):
                pass
    except OSError:
        pass
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def leave_often(
    gateway: RunningGateway, num_clients: int, width: int, rng: random.Random
) -> None:
    """`num_clients`, of which `width` are there at a time."""
    remaining = iter(range(num_clients))

    async def one_after_another() -> None:
        for _ in remaining:
            await leave_at_random(gateway, rng)

    await asyncio.gather(*(one_after_another() for _ in range(width)))


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is there, of what nothing is to stay."""

    num_tasks: int
    num_files: int

    @classmethod
    def now(cls) -> Leftovers:
        """Of this process, with the gateway in it."""
        return cls(len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")))


async def wait_for_nothing(
    server: Server,
    service: FakeService,
    before: Leftovers,
) -> None:
    """Waits until no block, request, connection, task and file is left. Raises TimeoutError."""
    await service.wait_idle()

    async def look() -> tuple[bool, object]:
        left = Leftovers.now()
        counts = (
            server.exchanges.num_open,
            server.app.state.gateway.fleet.num_session_requests,
            len(server.server_state.connections),
        )
        is_clean = left.num_tasks <= before.num_tasks and left.num_files <= before.num_files
        return is_clean and not any(counts), (left, before, counts)

    await poll(look, PATIENCE_S)
