"""A TCP proxy that breaks, holds and slows what goes through it, as a network does it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.support.processes.addresses import reserve_address

_CHUNK_BYTES = 65536
# What a lost segment costs a connection: Linux sends it again after that, or later.
_RETRANSMISSION_S = 0.2


@dataclass(slots=True)
class Way:
    """Disturbance of bytes in one direction; none by default.

    `delay_s`, `bytes_per_s`: of each chunk. `loss_ratio`: how many chunks come late by a
    retransmission, drawn from `rng`. `cut_after_bytes`: so many go through, and then every
    connection is reset, in the middle of a message or not; None: never.
    """

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    loss_ratio: float = 0.0
    cut_after_bytes: int | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _is_open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_open.set()

    def hold(self) -> None:
        """Lets nothing through; what comes meanwhile goes on with `release`."""
        self._is_open.clear()

    def release(self) -> None:
        """Passes held and new bytes on."""
        self._is_open.set()

    async def travel(self, data: bytes) -> None:
        """Returns when `data` would be there."""
        delay_s = self.delay_s + len(data) / self.bytes_per_s
        if self.loss_ratio and self.rng.random() < self.loss_ratio:
            delay_s += _RETRANSMISSION_S
        if delay_s:
            await asyncio.sleep(delay_s)
        await self._is_open.wait()

    def share_before_cut(self, data: bytes) -> tuple[bytes, bool]:
        """Part of `data` before the cut, and whether the cut is reached."""
        if self.cut_after_bytes is None:
            return data, False
        passed = data[: self.cut_after_bytes]
        self.cut_after_bytes -= len(passed)
        if self.cut_after_bytes:
            return passed, False
        self.cut_after_bytes = None
        return passed, True


class CutProxy:
    """Passes bytes on between its clients and `target`. `num_cuts`: connections cut so far."""

    def __init__(self, target: str, address: str = "") -> None:
        """`address`: its own; empty: a free port."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = address
        self.num_cuts = 0
        self.to_target = Way()
        self.to_clients = Way()

    @property
    def is_idle(self) -> bool:
        """Whether there is no connection."""
        return not self._tasks

    async def listen(self) -> None:
        """Takes connections, always at one address."""
        if self._server is None or not self._server.is_serving():
            self.address = self.address or reserve_address()
            host, _, port = self.address.rpartition(":")
            self._server = await asyncio.start_server(self.serve, host, int(port))

    def refuse(self) -> None:
        """Resets every connection, and accepts no more."""
        assert self._server is not None, "it listens"
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Resets every connection; new ones are taken at once."""
        for writer in self._writers:
            transport = writer.transport
            assert isinstance(transport, asyncio.WriteTransport)
            transport.abort()
            self.num_cuts += 1
        self._writers.clear()

    async def serve(
        self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        """Serves one connection."""
        try:
            target_reader, target_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            client_writer.transport.abort()
            return
        for way, reader, writer in (
            (self.to_target, client_reader, target_writer),
            (self.to_clients, target_reader, client_writer),
        ):
            self._writers.add(writer)
            task = asyncio.create_task(self._pump(way, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await way.travel(data)
                data, is_cut = way.share_before_cut(data)
                writer.write(data)
                await writer.drain()
                if is_cut:
                    self.cut()
        writer.close()
        self._writers.discard(writer)
        with suppress(OSError):
            await writer.wait_closed()

    async def close(self) -> None:
        """Cuts all connections, and waits for their end."""
        if self._server is not None:
            self._server.close()
        self.cut()
        self.to_target.release()
        self.to_clients.release()
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def cut_proxy(target: str, address: str = "") -> AsyncIterator[CutProxy]:
    """A proxy for `target` at `address`; empty: on a free port."""
    proxy = CutProxy(target, address)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()
