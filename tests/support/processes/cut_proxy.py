"""A TCP proxy whose connections can be cut, as a network does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_CHUNK_BYTES = 65536


class CutProxy:
    """Passes bytes on between its clients and `target`. `num_cuts`: connections cut so far."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.num_cuts = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody is connected."""
        return not self._tasks

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
        target_reader, target_writer = await asyncio.open_connection(self._host, self._port)
        for reader, writer in (
            (client_reader, target_writer),
            (target_reader, client_writer),
        ):
            self._writers.add(writer)
            task = asyncio.create_task(self._pump(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)
        with suppress(OSError):
            await writer.wait_closed()

    async def close(self) -> None:
        """Cuts what is open, and waits for its end."""
        self.cut()
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def cut_proxy(target: str) -> AsyncIterator[CutProxy]:
    """A proxy for `target` on a free port."""
    proxy = CutProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
